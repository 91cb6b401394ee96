// SPDX-License-Identifier: Apache-2.0
// What a warp does with a run of items of weighted blocks.
//
//   scores    q turned back by the block's first position, times keys turned by their places
//   output    sum of (p f(e)) times codes, in units of the row's step and of a power of two
//
// The power of two follows the largest exponent that values have had, so that p f(e) stays inside
// fp16: like the reference of the softmax it moves seldom.
#pragma once

#include "attention/coded/weighted_keys.cuh"
#include "attention/core/online_softmax.h"

namespace tierkv {

template <int kDimBlocks, class Code, CodedBreadth kBreadth>
struct WeightedWarp : WeightedKeys<kDimBlocks, Code, kBreadth> {
  using Base = WeightedKeys<kDimBlocks, Code, kBreadth>;
  using Block = typename Base::Block;
  using Streams = typename Base::Streams;
  using Base::call, Base::params, Base::state, Base::run, Base::row_index, Base::from, Base::to;
  using Base::kHeadDim, Base::kSlices, Base::kSliceBlocks, Base::kPairing;
  using Base::means;
  using KeptRow = typename Base::KeptRow;
  static constexpr int32_t kNoOctave = -64;      // below that of any exponent
  static constexpr int32_t kOctaveHeadroom = 5;  // p is at most 2^8, and fp16 holds 2^15 of it

  // Scores into the B operand of P^T, times the factors of the values. Each lane sums what it has:
  // add_sums() follows the last block.
  __device__ __forceinline__ void weigh_values(const Block& x, float (&s)[kItemTiles][4],
                                               uint32_t (&p)[kItemTiles][2]) {
    const int32_t tokens = x.slice[0].block.tokens;
    state.hide_behind(tokens, s);
    const float key_scale = bits_float(load_shared(Base::kept() + Base::kKeptScale));
    state.template raise_reference<false>(s, key_scale);
    const int32_t value_octave = raise_octave(x, tokens);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = exp2_fast(0.125f * static_cast<float>(x.exponents[h] - 8 * value_octave));
    }
    float sum[2] = {};
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float f = __shfl_sync(kFullWarp, factor[o / 2],
                                    static_cast<int32_t>(16 * o + 8 * h + fresh_lane() / 4) % 32);
        const float a = exp2_fast(fmaf(s[o][2 * h], key_scale, -state.reference[0]));
        const float b = exp2_fast(fmaf(s[o][2 * h + 1], key_scale, -state.reference[1]));
        sum[0] += a, sum[1] += b;
        p[o][h] = transpose_8x8(pack_halves(f * a, f * b));
      }
    }
    state.sum[0] += sum[0], state.sum[1] += sum[1];
  }
  __device__ __forceinline__ void add_sums() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) {
        state.sum[c] += __shfl_xor_sync(kFullWarp, state.sum[c], i);
      }
    }
  }
  // out is in units of 2^octave() steps.
  __device__ __forceinline__ int32_t octave() const {
    return static_cast<int32_t>(load_shared(Base::kept() + Base::kKeptOctave));
  }
  // Keeps p f(e) below 2^15; returns the octave.
  __device__ __forceinline__ int32_t raise_octave(const Block& x, int32_t tokens) {
    const auto lane = static_cast<int32_t>(fresh_lane());
    int32_t most = lane < tokens ? x.exponents[0] : kLeastExponent;
    if (lane + 32 < tokens) most = max(most, x.exponents[1]);
    const int32_t before = octave();
    if (!__any_sync(kFullWarp, most > 8 * (before + kOctaveHeadroom))) return before;
    const int32_t raised = __reduce_max_sync(kFullWarp, most) >> 3;
    const float factor = power_of_two(max(before - raised, -126));
    store_shared(Base::kept() + Base::kKeptOctave, static_cast<uint32_t>(raised));
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.out[f][i] *= factor;
    }
    return raised;
  }

  // Outputs of slice kSlice and of those behind it.
  template <int kSlice>
  __device__ __forceinline__ void add_slices(const Block& x,
                                             const uint32_t (&weights)[kItemTiles][2]) {
    const auto& slice = x.slice[kSlice];
    uint32_t p[kItemTiles][2];
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) p[o][0] = weights[o][0], p[o][1] = weights[o][1];
    if (slice.block.coded) {
#pragma unroll 1
      for (int32_t i = 0; i < slice.block.exceptions(); i += kExceptionStep) {
        Base::template add_exceptions<kSlice>(slice.with_exceptions(), i, p);
      }
      // Behind that of the keys: not in a register of its own while keys are decoded.
      auto table = this->key_table;
      table.mask = params.value_mask, table.address += params.table_bytes;
      Streams streams;
      Base::open_streams(slice, streams);
      const uint32_t base = Base::code_halves(call.values.codebook.base);
      const int32_t tiles = tile_count(slice.block.tokens);
#pragma unroll 1
      for (int o = 0; o < tiles; ++o) {
#pragma unroll
        for (int f = kSlice * kSliceBlocks; f < (kSlice + 1) * kSliceBlocks; ++f) {
          uint32_t a[4];
          streams.codes(table, base, a);
          mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
        }
        shift_tiles(p);
      }
      state.bad |= Base::streams_end(slice, streams);
    } else {
      add_raw<kSlice>(*this, slice.block, slice.raw, p);
    }
    if constexpr (kSlice + 1 < kSlices) add_slices<kSlice + 1>(x, weights);
  }

  // What begin_blocks() asked for, and keep_row() and keep_run() keep. KeptRow::tokens: coded ones
  // of the row and its sinks, from the first of these blocks on.
  __device__ __forceinline__ void attend_blocks() {
    Base::load_run();
#pragma unroll 1
    for (int32_t i = 0; i < run.count; i += 2) {
      const KeptRow row = Base::kept_row();
      const int32_t block = row.from + i / 2;
      const int32_t here = min(row.tokens - i * (kBlockTokens / 2), kBlockTokens) -
                           (block == 0 ? call.weighted.sink_tokens : 0);
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      Base::turn_queries(row, block);
      Base::score_block(Base::open_block(i, params.headers.keys, here), s);
      pass_block(i);
      const Block values = Base::open_block(i + 1, params.headers.values, here);
      Base::check_exponents(values, kLeastExponent, kMostExponent);
      weigh_values(values, s, p);
      if (values.valid) add_slices<0>(values, p);
      pass_block(i + 1);
    }
  }
  __device__ __forceinline__ void pass_block(int32_t i) {
    Base::load_run();
    Base::next_block(i);
    Base::keep_run();
  }

  // The raw sinks of the row: few, so their code is short.
  __device__ __forceinline__ void attend_sinks(float scale, const CodedRow& row) {
    const auto g = static_cast<int32_t>(fresh_lane() / 4),
               t = static_cast<int32_t>(fresh_lane() % 4);
    const int32_t count = row.sink_tokens;
    const auto* keys =
        reinterpret_cast<const uint16_t*>(call.weighted.raw_sinks + int64_t{row.first_sink} * 16);
    const uint16_t* values = keys + count * kHeadDim;
    const auto value = [&](int32_t token, int32_t d) {
      return token < count ? uint32_t{values[token * kHeadDim + d]} : 0u;
    };
    float s[kItemTiles][4] = {};
    uint32_t p[kItemTiles][2];
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int32_t token = g + 8 * (r % 2), d = 16 * f + 2 * t + 8 * (r / 2);
        a[r] = token < count ? *reinterpret_cast<const uint32_t*>(keys + token * kHeadDim + d) : 0u;
      }
      mma_m16n8k16(s[0], a, state.q[f][0], state.q[f][1]);
    }
    const ColumnSight sight(params, count + row.window_tokens);
    sight.hide(0, s);
    state.template weigh<true>(s, count, scale, p);
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int32_t d = 16 * f + g + 8 * (r % 2), token = 2 * t + 8 * (r / 2);
        a[r] = value(token, d) | value(token + 1, d) << 16;
      }
      mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
    }
  }

  __device__ __forceinline__ bool is_named(const CodedRow& row) const {
    const WeightedRows& w = call.weighted;
    const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
    const int64_t sink_bytes = int64_t{row.sink_tokens} * kHeadDim * 4;
    return this->fits && from >= 0 && row.coded_tokens >= 0 && row.window_tokens >= 0 &&
           row.sink_tokens >= 0 && row.sink_tokens <= kMostRawSinks &&
           (blocks == 0 || row.sink_tokens == w.sink_tokens) &&
           (kPairing == RopePairing::kNone || blocks <= w.num_block_turns) &&
           (row.sink_tokens == 0 || w.blocks_only ||
            int64_t{row.first_sink} * 16 + sink_bytes <= w.raw_sinks_size) &&
           to <= coded_row_items(row.coded_tokens, row.window_tokens, row.sink_tokens) &&
           row.step >= 0 && row.step < call.num_steps && row.first_page >= 0 &&
           row.first_page + (row.window_tokens + kBlockTokens - 1) / kBlockTokens <=
               call.num_window_pages &&
           row.first_block >= 0 && int64_t{row.first_block} + blocks <= call.num_blocks &&
           (blocks == 0 || w.blocks_only || row.window_tokens >= params.queries.q_len - 1);
  }

  __device__ __forceinline__ void begin_row(int32_t r, int32_t begin, int32_t end) {
    row_index = r;
    const CodedRow& row = call.rows[r];
    const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
    from = begin - row.first_item, to = end - row.first_item;
    const bool named = is_named(row);
    if (!named) to = from;
    state.bad = static_cast<uint32_t>(!named);
    run.count = 0;
    state.load_queries(call, Base::query(row_index, 0));
    state.begin_plain();
    if (from < min(to, blocks)) {
      state.bad |= Base::begin_blocks(row.first_block + from, min(to, blocks) - from);
      load_means(row.step);
      Base::keep_row(
          {row_index, row.step, from, row.coded_tokens + row.sink_tokens - from * kBlockTokens});
      Base::keep_run();
      store_shared(Base::kept() + Base::kKeptOctave, static_cast<uint32_t>(kNoOctave));
      const float key_scale = this->score_scale() * call.keys.steps[row.step];
      store_shared(Base::kept() + Base::kKeptScale, float_bits(key_scale));
    }
  }
  __device__ __forceinline__ void load_means(int32_t step) const {
    const auto* of_row =
        reinterpret_cast<const uint4*>(call.weighted.key_means) + int64_t{step} * (kHeadDim / 8);
    __syncwarp();  // the means of the row before have been read
    const auto lane = static_cast<int32_t>(fresh_lane());
    if (lane < kHeadDim / 8) store_shared_16(means + 16 * lane, of_row[lane]);
    __syncwarp();
  }

  // The blocks of what begin_row() began. number: of the warp, needed as `items` are only when this
  // returns.
  template <class Items>
  __device__ __forceinline__ void attend_row(Items& items, int32_t& number) {
    if (run.count == 0) return;
    const uint32_t kept_items = Base::kept() + 32;
    store_shared_16(kept_items,
                    {static_cast<uint32_t>(items.first), static_cast<uint32_t>(items.end),
                     static_cast<uint32_t>(items.last), static_cast<uint32_t>(number)});
    attend_blocks();
    add_sums();
    const uint4 x = load_shared_16(kept_items);
    items.first = static_cast<int32_t>(x.x), items.end = static_cast<int32_t>(x.y);
    items.last = static_cast<int32_t>(x.z), number = static_cast<int32_t>(x.w);
    row_index = items.row = Base::kept_row().row_index;
    const CodedRow& row = call.rows[row_index];
    from = items.first - row.first_item, to = items.end - row.first_item;
    state.finish_blocks(call.values.steps[row.step] * power_of_two(octave()), 0.0f);
    state.load_queries(call, Base::query(row_index, 0));
  }
  // What is behind them.
  __device__ __forceinline__ void finish_row(float* partial) {
    const CodedRow& row = call.rows[row_index];
    if (to > from && !call.weighted.blocks_only) {
      const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
      const int32_t sinks = row.sink_tokens > 0 ? 1 : 0;
      if (sinks == 1 && from <= blocks && to > blocks) attend_sinks(this->score_scale(), row);
      const int32_t first = max(from - blocks - sinks, 0);
      if (to > blocks + sinks) {
        Base::attend_window(this->score_scale(), row, first, to - blocks - sinks - first);
      }
    }
    state.leave(call, partial);
  }
};

}  // namespace tierkv
