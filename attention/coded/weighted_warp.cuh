// SPDX-License-Identifier: Apache-2.0
// What a warp does with a run of items of coded blocks.
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

template <int kDimBlocks, class Code>
struct WeightedWarp : WeightedKeys<kDimBlocks, Code> {
  using Base = WeightedKeys<kDimBlocks, Code>;
  using Block = typename Base::Block;
  using Streams = typename Base::Streams;
  using Base::call, Base::params, Base::state, Base::run;
  using Base::kHeadDim, Base::kSlices, Base::kSliceBlocks, Base::kSliceDim, Base::kTurning;
  using Base::means;
  using KeptRow = typename Base::KeptRow;
  static constexpr int32_t kNoOctave = -64;      // below that of any exponent
  static constexpr int32_t kOctaveHeadroom = 5;  // p is at most 2^8, and fp16 holds 2^15 of it

  // Scores into the B operand of P^T, times the factors of the values. Each lane sums what it has:
  // state.add_lanes() follows the last block.
  __device__ __forceinline__ void weigh_values(const Block& x, float (&s)[kItemTiles][4],
                                               uint32_t (&p)[kItemTiles][2]) {
    const int32_t tokens = x.slice[0].block.tokens;
    state.hide_behind(tokens, s);
    const float key_scale = bits_float(load_shared(Base::kept() + Base::kKeptScale));
    state.raise_reference(s, key_scale);
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

  template <int kSlice>
  __device__ __forceinline__ void add_exceptions(const OpenBlock& b, int32_t first,
                                                 const uint32_t (&p)[kItemTiles][2]) {
    const uint32_t words = b.exception_words + 4 * first;
    const int32_t left = b.exceptions() - first;
    ExceptionPair pair;
    state.bad |= pair.template load<kSliceDim>(words, left, b.tokens, 1 / kDigitScale);
    const uint32_t rows = ExceptionPair::row_halves(pair.dim);
    const uint32_t weights = exception_weights(words, left, p);
#pragma unroll
    for (int f = 0; f < kSliceBlocks; ++f) {
      uint32_t a[2];
      pair.operand(rows, 16 * f, a);
      mma_m16n8k8(state.out[kSlice * kSliceBlocks + f], a, weights);
    }
  }
  // Outputs of a raw slice, which uses p up. They are rare: this function is short, not fast, and
  // reads them from memory.
  template <int kSlice>
  __device__ __forceinline__ void add_raw(const OpenBlock& b, const RawBlock& raw,
                                          uint32_t (&p)[kItemTiles][2]) {
#pragma unroll 1
    for (int o = 0; o < tile_count(b.tokens); ++o) {
#pragma unroll 1
      for (int f = 0; f < kSliceBlocks; ++f) {
        uint32_t a[4];
        float sum[4] = {};
        raw_fragment(raw, kSliceDim, Component::kValue, o, f, a);
        mma_m16n8k16(sum, a, p[0][0], p[0][1]);
#pragma unroll
        for (int z = 0; z < kSliceBlocks; ++z) {
          float(&out)[4] = state.out[kSlice * kSliceBlocks + z];
#pragma unroll
          for (int j = 0; j < 4; ++j) out[j] += z == f ? sum[j] : 0.0f;
        }
      }
      shift_tiles(p);
    }
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
        add_exceptions<kSlice>(slice.with_exceptions(), i, p);
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
        const auto codes = [&](int, uint32_t(&a)[4]) { streams.codes(table, base, a); };
        state.template add_tile<kSlice * kSliceBlocks, (kSlice + 1) * kSliceBlocks>(codes, p[0]);
        shift_tiles(p);
      }
      state.bad |= Base::streams_end(slice, streams);
    } else {
      add_raw<kSlice>(slice.block, slice.raw, p);
    }
    if constexpr (kSlice + 1 < kSlices) add_slices<kSlice + 1>(x, weights);
  }

  // What begin_blocks() asked for, and keep_row() and keep_run() keep. KeptRow::tokens: coded ones
  // of the row and its sinks, from the first of these blocks on.
  __device__ __forceinline__ void attend_blocks() {
    const int32_t count = run.count;
#pragma unroll 1
    for (int32_t i = 0; i < count; i += 2) {
      const KeptRow row = Base::kept_row();
      const int32_t block = row.from + i / 2;
      const int32_t here = min(row.tokens - i * (kBlockTokens / 2), kBlockTokens) -
                           (block == 0 ? call.weighted.sink_tokens : 0);
      const uint32_t passed = row.passed + static_cast<uint32_t>(i / 2);
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      Base::turn_queries(block);
      Base::score_block(Base::open_block(i, passed, params.headers.keys, here), s);
      Base::pass_block(i);
      const Block values = Base::open_block(i + 1, passed, params.headers.values, here);
      Base::check_exponents(values, kLeastExponent, kMostExponent);
      weigh_values(values, s, p);
      if (values.valid) add_slices<0>(values, p);
      Base::pass_block(i + 1);
    }
    const uint32_t passed = Base::kept_row().passed + static_cast<uint32_t>(count / 2);
    __syncwarp();  // all lanes have read it
    store_shared(Base::kept() + Base::kKeptPassed, passed);
  }

  // from, to: items of the row.
  __device__ __forceinline__ bool is_named(const CodedRow& row, int32_t from, int32_t to) const {
    const WeightedRows& w = call.weighted;
    const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
    return this->fits && from >= 0 && row.coded_tokens >= 0 && row.sink_tokens >= 0 &&
           row.sink_tokens <= kMostRawSinks && (blocks == 0 || row.sink_tokens == w.sink_tokens) &&
           (kTurning == KeyTurning::kNone || blocks <= w.num_block_turns) && to <= blocks &&
           row.step >= 0 && row.step < call.num_steps && row.first_block >= 0 &&
           int64_t{row.first_block} + blocks <= call.num_blocks;
  }

  // Items begin .. end - 1 of all, those of row r that hold any: asks for their first blocks.
  __device__ __forceinline__ void begin_row(int32_t r, int32_t begin, int32_t end) {
    const CodedRow& row = call.rows[r];
    const int32_t from = begin - row.first_item, to = end - row.first_item;
    const bool named = is_named(row, from, to);
    state.bad = static_cast<uint32_t>(!named);
    run.count = 0;
    state.begin();
    if (!named || from >= to) return;
    state.bad |= Base::begin_blocks(row.first_block + from, to - from);
    Base::keep_queries(r, row.step);
    load_means(row.step);
    Base::keep_row(from, row.coded_tokens + row.sink_tokens - from * kBlockTokens);
    Base::keep_run();
    store_shared(Base::kept() + Base::kKeptOctave, static_cast<uint32_t>(kNoOctave));
    const float key_scale = this->score_scale(r) * call.keys.steps[row.step];
    store_shared(Base::kept() + Base::kKeptScale, float_bits(key_scale));
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
  __device__ __forceinline__ void attend_row(WarpItems& items, int32_t& number) {
    if (run.count == 0) return;
    const uint32_t kept_items = Base::kept() + 32;
    store_shared(Base::kept() + Base::kKeptIndex, static_cast<uint32_t>(items.row));
    store_shared_16(kept_items,
                    {static_cast<uint32_t>(items.first), static_cast<uint32_t>(items.end),
                     static_cast<uint32_t>(items.last), static_cast<uint32_t>(number)});
    attend_blocks();
    state.add_lanes();
    const uint4 x = load_shared_16(kept_items);
    items.first = static_cast<int32_t>(x.x), items.end = static_cast<int32_t>(x.y);
    items.last = static_cast<int32_t>(x.z), number = static_cast<int32_t>(x.w);
    items.row = static_cast<int32_t>(load_shared(Base::kept() + Base::kKeptIndex));
    state.finish_blocks(call.values.steps[call.rows[items.row].step] * power_of_two(octave()));
  }
};

}  // namespace tierkv
