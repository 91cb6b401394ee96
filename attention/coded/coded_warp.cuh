// SPDX-License-Identifier: Apache-2.0
// What a warp does with a run of items: keys, softmax, values, block after block.
#pragma once

#include "attention/coded/coded_exceptions.cuh"
#include "attention/coded/coded_raw_blocks.cuh"
#include "attention/coded/coded_ring.cuh"
#include "attention/coded/coded_sight.cuh"
#include "attention/coded/coded_slices.cuh"
#include "attention/coded/coded_state.cuh"
#include "attention/coded/coded_tile.cuh"
#include "gpu/constants.h"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/mma.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

template <int kDimBlocks, class Code, CodedBreadth kBreadth>
struct CodedWarp {
  static constexpr bool kIsPlain = kBreadth == CodedBreadth::kPlain;
  static constexpr bool kSliced = kBreadth == CodedBreadth::kSlices;
  static constexpr int32_t kHeadDim = 16 * kDimBlocks;
  static constexpr int kSlices = (kHeadDim + kSliceDims - 1) / kSliceDims;
  static constexpr int kSliceBlocks = kDimBlocks / kSlices, kSliceDim = kHeadDim / kSlices;
  static constexpr int32_t kTileBytes = kTileTokens * 2 * kHeadDim;  // of the window
  static constexpr int32_t kWindowAhead = 2;                         // items asked for in advance
  using Streams = LaneCodes<Code>;
  const CodedAttention& call;
  BlockRing& ring;
  const CodedKernelParams& params;
  using Table = SharedTable<Code::kCopiesLog>;
  Table key_table, value_table;
  bool fits;  // shared memory is as large as it must be
  CodedState<kDimBlocks> state;
  BlockRun run;
  int32_t row_index, from, to;  // items of the row
  float key_scale;              // brings a digit times q to log2 units

  // Block i of the run, in its slot.
  __device__ __forceinline__ OpenBlock open(const ExpectedHeader& header, int32_t i,
                                            int32_t tokens) {
    ring.wait();
    const OpenBlock b = open_block<Code::kStreams>(ring.slot, ring.slot_bytes, header, tokens);
    if (run.holds(i)) state.bad |= run.mine.units ^ b.units();
    return b;
  }
  // A block that is not coded: false where it is no raw one either.
  __device__ __forceinline__ bool open_other(const OpenBlock& b, const ExpectedHeader& header,
                                             int32_t i, RawBlock* raw) {
    const bool named = !run.holds(i) || (run.mine.units > 0 && run.mine.units == b.units());
    const auto* from = run.bytes_of(call, i);
    const bool valid = __all_sync(kFullWarp, named) && open_raw(b, from, header, raw);
    state.bad |= static_cast<uint32_t>(!valid);
    return valid;
  }

  // The sums of a tile before this slice, the first of s.
  __device__ __forceinline__ static void begin_tile(const float (&s)[kItemTiles][4],
                                                    float (&tile)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] = kSliced ? s[0][i] : 0.0f;
  }

  template <int kSlice>
  __device__ __forceinline__ void score_coded(const OpenBlock& b, const Table& table,
                                              float (&s)[kItemTiles][4]) {
    Streams streams;
    state.bad |= streams.open(b);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4];
      begin_tile(s, tile);
      if (o < tiles) {
#pragma unroll
        for (int f = kSlice * kSliceBlocks; f < (kSlice + 1) * kSliceBlocks; ++f) {
          uint32_t a[4];
          streams.fragment(table, a);
          mma_m16n8k16(tile, a, state.q[f][0], state.q[f][1]);
        }
      }
      push_tile(s, tile);
    }
    state.bad |= streams.ends(b);
    int32_t done = 0;
#pragma unroll 1
    for (; done + kExceptionStep < b.exceptions(); done += 2 * kExceptionStep) {
      score_exceptions<kSlice, 2>(b, done, s);
    }
    if (done < b.exceptions()) score_exceptions<kSlice, 1>(b, done, s);
  }

  // kSteps steps of them.
  template <int kSlice, int kSteps>
  __device__ __forceinline__ void score_exceptions(const OpenBlock& b, int32_t first,
                                                   float (&s)[kItemTiles][4]) {
    // Lanes of columns that are not there take the last one: their sums are not kept.
    const int32_t column = min(static_cast<int32_t>(fresh_lane() / 4), call.columns - 1);
    const auto* query = static_cast<const uint16_t*>(call.q) +
                        (int64_t{row_index} * params.row_columns + column) * kHeadDim +
                        kSlice * kSliceDims;
    ExceptionPair pair[kSteps];
    uint32_t rows[kSteps], queries[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int32_t at = first + i * kExceptionStep;
      state.bad |= pair[i].template load<kSliceDim>(b.exception_words + 4 * at, b.exceptions() - at,
                                                    b.tokens);
      queries[i] = exception_queries(pair[i], query);
      rows[i] = ExceptionPair::row_halves(pair[i].token);
    }
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      uint32_t a[kSteps][2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) pair[i].operand(rows[i], 16 * o, a[i]);
      if constexpr (kSteps == 2) {
        const uint32_t both[4] = {a[0][0], a[0][1], a[1][0], a[1][1]};
        mma_m16n8k16(s[o], both, queries[0], queries[1]);
      } else {
        mma_m16n8k8(s[o], a[0], queries[0]);
      }
    }
  }

  // Uses p up.
  template <int kSlice>
  __device__ __forceinline__ void add_coded(const OpenBlock& b, const Table& table,
                                            uint32_t (&p)[kItemTiles][2]) {
    Streams streams;
    state.bad |= streams.open(b);
#pragma unroll 1
    for (int32_t i = 0; i < b.exceptions(); i += kExceptionStep) add_exceptions<kSlice>(b, i, p);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll 1
    for (int o = 0; o < tiles; ++o) {
#pragma unroll
      for (int f = kSlice * kSliceBlocks; f < (kSlice + 1) * kSliceBlocks; ++f) {
        uint32_t a[4];
        streams.fragment(table, a);
        mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
      }
      shift_tiles(p);
    }
    state.bad |= streams.ends(b);
  }

  template <int kSlice>
  __device__ __forceinline__ void add_exceptions(const OpenBlock& b, int32_t first,
                                                 const uint32_t (&p)[kItemTiles][2]) {
    ExceptionPair pair;
    state.bad |= pair.template load<kSliceDim>(b.exception_words + 4 * first,
                                               b.exceptions() - first, b.tokens);
    const uint32_t rows = ExceptionPair::row_halves(pair.dim);
    const uint32_t weights =
        exception_weights(b.exception_words + 4 * first, b.exceptions() - first, p);
#pragma unroll
    for (int f = 0; f < kSliceBlocks; ++f) {
      uint32_t a[2];
      pair.operand(rows, 16 * f, a);
      mma_m16n8k8(state.out[kSlice * kSliceBlocks + f], a, weights);
    }
  }

  // The slot of block `used` is free: the block `slots` after it takes its place.
  __device__ __forceinline__ void next_block(int32_t used) {
    __syncwarp();
    const int32_t wanted = used + ring.slots;
    if (wanted < run.count) {
      if (wanted == run.first + 32) state.bad |= run.load(call, used + 1);
      ring.request(call, run, wanted);
    }
    ring.pass();
  }

  // Asks for the first of `count` blocks of keys and of values. Not 0 where a reference is wrong.
  __device__ __forceinline__ uint32_t begin_blocks(int32_t first, int32_t count) {
    run.first_block = first;
    run.count = 2 * count;
    const uint32_t bad = run.load(call, 0);
#pragma unroll 1
    for (int32_t i = 0; i < ring.slots; ++i) {
      ring.request(call, run, i);
      ring.swap();
    }
    return bad;
  }

  // Block i of the run, in its slot: scores of keys, or outputs of values, whose p they use up.
  __device__ __forceinline__ void score_block(int32_t i, int32_t tokens,
                                              float (&s)[kItemTiles][4]) {
    if constexpr (kSliced) {
      ring.wait();
      BlockSlices slices(call, run, ring, i);
      state.bad |= static_cast<uint32_t>(!score_slices<0>(*this, slices, tokens, s));
    } else {
      const OpenBlock b = open(params.headers.keys, i, tokens);
      RawBlock raw;
      if (b.coded) {
        score_coded<0>(b, key_table, s);
      } else if (open_other(b, params.headers.keys, i, &raw)) {
        score_raw<0>(*this, b, raw, s);
      }
    }
  }
  __device__ __forceinline__ void add_block(int32_t i, int32_t tokens,
                                            uint32_t (&p)[kItemTiles][2]) {
    if constexpr (kSliced) {
      ring.wait();
      BlockSlices slices(call, run, ring, i);
      state.bad |= static_cast<uint32_t>(!add_slices<0>(*this, slices, tokens, p));
    } else {
      const OpenBlock b = open(params.headers.values, i, tokens);
      RawBlock raw;
      if (b.coded) {
        add_coded<0>(b, value_table, p);
      } else if (open_other(b, params.headers.values, i, &raw)) {
        add_raw<0>(*this, b, raw, p);
      }
    }
  }
  // What begin_blocks() asked for: all blocks but the row's last one have 64 tokens. `tokens` are
  // those of the row from the first of these blocks on.
  __device__ __forceinline__ void attend_blocks(int32_t tokens) {
#pragma unroll 1
    for (int32_t i = 0; i < run.count; i += 2) {
      const int32_t here = min(tokens - i * (kBlockTokens / 2), kBlockTokens);
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      score_block(i, here, s);
      next_block(i);
      state.weigh(s, here, key_scale * kDigitScale, p);
      add_block(i + 1, here, p);
      next_block(i + 1);
    }
  }

  // The page of item i of the window; null where it would lie outside.
  __device__ __forceinline__ const uint8_t* window_page(const CodedRow& row, int32_t i) const {
    const int64_t page = call.window_pages[row.first_page + i];
    if (page < 0 || (page + 1) * call.window_page_bytes > call.window_size) return nullptr;
    return call.window + page * call.window_page_bytes;
  }
  // Asks for item i of the window, if there is one, to be brought into L2.
  __device__ __forceinline__ void fetch_window(const CodedRow& row, int32_t i) {
    const int32_t tokens = min(row.window_tokens - i * kBlockTokens, kBlockTokens);
    const uint8_t* page = tokens > 0 ? window_page(row, i) : nullptr;
    if (page == nullptr) return;
    const auto bytes = static_cast<uint32_t>(tile_count(tokens) * kTileBytes);
#pragma unroll
    for (int32_t c = 0; c < 2; ++c) {
      CopyPieces pieces;
      pieces.count = 1;
      pieces.total = bytes;
      pieces.piece[0] = {nullptr, page + c * kItemTiles * kTileBytes, bytes};
      prefetch_pieces(pieces);
    }
  }

  // Scores of the first `tokens` tokens of a page.
  __device__ __forceinline__ void score_window(const uint8_t* keys, int32_t tokens,
                                               float (&s)[kItemTiles][4]) {
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4] = {};
      if (16 * o < tokens) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          window_fragment(keys + o * kTileBytes, f, a);
          mma_m16n8k16(tile, a, state.q[f][0], state.q[f][1]);
        }
      }
      push_tile(s, tile);
    }
  }

  // Items of the window, whose values are their own unit.
  __device__ __forceinline__ void attend_window(float scale, const CodedRow& row, int32_t first,
                                                int32_t count) {
    const ColumnSight sight(params, row.window_tokens);
#pragma unroll 1
    for (int32_t i = first; i < first + count; ++i) {
      if (i + kWindowAhead < first + count) fetch_window(row, i + kWindowAhead);
      const int32_t tokens = min(row.window_tokens - i * kBlockTokens, kBlockTokens);
      const uint8_t* keys = window_page(row, i);
      if (keys == nullptr) {
        state.bad = 1;
        return;
      }
      const uint8_t* values = keys + kItemTiles * kTileBytes;
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      score_window(keys, tokens, s);
      if constexpr (!kIsPlain) sight.hide(i * kBlockTokens, s);
      state.template weigh<!kIsPlain>(s, tokens, scale, p);
#pragma unroll 1
      for (int o = 0; 16 * o < tokens; ++o) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          window_fragment(values + o * kTileBytes, f, a);
          mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
        }
        shift_tiles(p);
      }
    }
  }

  // Brings q times a value of a key to log2 units.
  __device__ __forceinline__ float score_scale() const {
    const float scale = call.sm_scale * kLog2E;
    if constexpr (!kIsPlain)
      return params.units == nullptr ? scale : scale * params.units[row_index];
    return scale;
  }

  // Items begin .. end - 1 of all, those of row r that hold any: asks for their first blocks.
  __device__ __forceinline__ void begin_row(int32_t r, int32_t begin, int32_t end) {
    row_index = r;
    const CodedRow& row = call.rows[r];
    const int32_t blocks = (row.coded_tokens + kBlockTokens - 1) / kBlockTokens;
    from = begin - row.first_item, to = end - row.first_item;
    const bool named =
        fits && from >= 0 && to <= coded_row_items(row.coded_tokens, row.window_tokens) &&
        row.step >= 0 && row.step < call.num_steps && row.mean < call.num_means &&
        row.coded_tokens >= 0 && row.window_tokens >= 0 && row.first_page >= 0 &&
        row.first_page + (row.window_tokens + kBlockTokens - 1) / kBlockTokens <=
            call.num_window_pages &&
        row.first_block >= 0 && int64_t{row.first_block} + blocks <= call.num_blocks &&
        (kIsPlain || blocks == 0 || row.window_tokens >= params.queries.q_len - 1);
    if (!named) to = from;
    state.bad = static_cast<uint32_t>(!named);
    // All that must come from memory is asked for before any of it is waited for.
    const float step = named ? call.keys.steps[row.step] : 0.0f;
    state.load_queries(call, static_cast<const uint16_t*>(call.q) +
                                 int64_t{row_index} * params.row_columns * kHeadDim);
    run.count = 0;
    if (from < min(to, blocks)) {
      state.bad |= begin_blocks(row.first_block + from, min(to, blocks) - from);
    }
    key_scale = score_scale() * step;
    state.begin(key_scale * static_cast<float>(call.keys.codebook.base));
    const int32_t first = max(from, blocks);
#pragma unroll 1
    for (int32_t i = first; i < min(to, first + kWindowAhead); ++i) fetch_window(row, i - blocks);
  }
  // What begin_row() began.
  __device__ __forceinline__ void finish_row(float* partial) {
    const CodedRow& row = call.rows[row_index];
    if (to > from) {
      const int32_t blocks = (row.coded_tokens + kBlockTokens - 1) / kBlockTokens;
      attend_blocks(row.coded_tokens - from * kBlockTokens);
      state.finish_blocks(call.values.steps[row.step],
                          static_cast<float>(call.values.codebook.base));
      const int32_t first = max(from - blocks, 0);
      if (to > blocks) {
        attend_window(score_scale(), row, first, to - blocks - first);
      }
    }
    state.leave(call, partial);
  }
};

}  // namespace tierkv
