// What a warp does with a run of items: keys, softmax, values, block after block.
#pragma once

#include "attention/coded_exceptions.cuh"
#include "attention/coded_ring.cuh"
#include "attention/coded_state.cuh"
#include "attention/coded_tile.cuh"

namespace tierkv {

// A row as its warp needs it.
struct RowScales {
  float score;       // of a product of raw keys, to log2 units
  float key_step;    // of a digit
  float value_step;  // of a digit
};

// One step of a tile loop: the first of four becomes the last.
template <class T, int kCount>
__device__ __forceinline__ void rotate_tiles(T (&x)[kItemTiles][kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T first = x[0][i];
#pragma unroll
    for (int o = 1; o < kItemTiles; ++o) x[o - 1][i] = x[o][i];
    x[kItemTiles - 1][i] = first;
  }
}

template <int kDimBlocks, int kStreams, int kCopiesLog>
struct CodedWarp {
  static constexpr int32_t kHeadDim = 16 * kDimBlocks;
  using Streams = LanePair<kStreams, kCopiesLog>;
  const CodedAttention& call;
  BlockRing& ring;
  const CodedHeaders& headers;
  SharedTable<kCopiesLog> key_table, value_table;
  CodedState<kDimBlocks> state;
  BlockRun run;

  // Block i of the run, in its slot.
  __device__ __forceinline__ OpenBlock open(const ExpectedHeader& header, int32_t i,
                                            int32_t tokens) {
    ring.wait();
    const OpenBlock b = open_block<kStreams>(ring.current(), ring.slot_bytes, header, tokens);
    if (run.holds(i)) state.bad |= run.units ^ b.units();
    return b;
  }
  // Raw blocks are rare: their code is short, not fast. A block that is not coded: false where it
  // is no raw one either.
  __device__ __forceinline__ bool open_other(const OpenBlock& b, const ExpectedHeader& header,
                                             int32_t i, RawBlock* raw) {
    const bool named = !run.holds(i) || (run.copied > 0 && run.units == b.units());
    const uint8_t* from = run.bytes_of(i);
    const bool valid = __all_sync(kFullWarp, named) && open_raw(b, from, header, raw);
    state.bad |= static_cast<uint32_t>(!valid);
    return valid;
  }

  __device__ __forceinline__ void score_raw(const OpenBlock& b, int32_t i,
                                            float (&s)[kItemTiles][4]) {
    RawBlock raw;
    if (!open_other(b, headers.keys, i, &raw)) return;
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll 1
      for (int f = 0; f < kDimBlocks && o < tile_count(b.tokens); ++f) {
        uint32_t a[4], q[2] = {0, 0};
#pragma unroll
        for (int z = 0; z < kDimBlocks; ++z) {
          if (z == f) q[0] = state.q[z][0], q[1] = state.q[z][1];
        }
        raw_fragment(raw, kHeadDim, Component::kKey, o, f, a);
        mma_m16n8k16(s[0], a, q[0], q[1]);
      }
      rotate_tiles(s);
    }
  }

  // Tiles are a loop: unrolled, the instructions of all tiles do not fit into the caches that 16
  // warps at different places of a kernel share.
  __device__ __forceinline__ void score_coded(const OpenBlock& b, const uint16_t* query,
                                              float (&s)[kItemTiles][4]) {
    Streams streams;
    state.bad |= streams.open(b);
    // The first exceptions are loaded here and used after the streams.
    ExceptionPair pair;
    uint32_t queries = 0;
    if (b.exceptions() > 0) queries = load_score_exceptions(b, 0, query, &pair);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      if (o < tiles) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          streams.fragment(key_table, a);
          mma_m16n8k16(s[0], a, state.q[f][0], state.q[f][1]);
        }
      }
      rotate_tiles(s);
    }
    state.bad |= streams.ends(b);
#pragma unroll 1
    for (int32_t i = 0; i < b.exceptions(); i += kExceptionStep) {
      if (i > 0) queries = load_score_exceptions(b, i, query, &pair);
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
        uint32_t a[2];
        pair.operand(pair.token, 16 * o, a);
        mma_m16n8k8(s[o], a, queries);
      }
    }
  }
  __device__ __forceinline__ uint32_t load_score_exceptions(const OpenBlock& b, int32_t first,
                                                            const uint16_t* query,
                                                            ExceptionPair* pair) {
    state.bad |= pair->template load<kHeadDim>(b.exception_words + 4 * first,
                                               b.exceptions() - first, b.tokens);
    return exception_queries(*pair, query);
  }

  __device__ __forceinline__ void add_raw(const OpenBlock& b, int32_t i,
                                          uint32_t (&p)[kItemTiles][2]) {
    RawBlock raw;
    if (!open_other(b, headers.values, i, &raw)) return;
#pragma unroll 1
    for (int o = 0; o < tile_count(b.tokens); ++o) {
#pragma unroll 1
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        float sum[4] = {};
        raw_fragment(raw, kHeadDim, Component::kValue, o, f, a);
        mma_m16n8k16(sum, a, p[0][0], p[0][1]);
#pragma unroll
        for (int z = 0; z < kDimBlocks; ++z) {
#pragma unroll
          for (int j = 0; j < 4; ++j) state.out[z][j] += z == f ? sum[j] : 0.0f;
        }
      }
      rotate_tiles(p);
    }
  }

  // Uses p up.
  __device__ __forceinline__ void add_coded(const OpenBlock& b, uint32_t (&p)[kItemTiles][2]) {
    Streams streams;
    state.bad |= streams.open(b);
#pragma unroll 1
    for (int32_t i = 0; i < b.exceptions(); i += kExceptionStep) add_exceptions(b, i, p);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll 1
    for (int o = 0; o < tiles; ++o) {
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        streams.fragment(value_table, a);
        mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
      }
      rotate_tiles(p);
    }
    state.bad |= streams.ends(b);
  }

  __device__ __forceinline__ void add_exceptions(const OpenBlock& b, int32_t first,
                                                 const uint32_t (&p)[kItemTiles][2]) {
    ExceptionPair pair;
    state.bad |= pair.template load<kHeadDim>(b.exception_words + 4 * first, b.exceptions() - first,
                                              b.tokens);
    const uint32_t weights = exception_weights(pair, p);
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[2];
      pair.operand(pair.dim, 16 * f, a);
      mma_m16n8k8(state.out[f], a, weights);
    }
  }

  // The slot of block `used` is free: the block `slots` after it takes its place.
  __device__ __forceinline__ void next_block(int32_t used) {
    __syncwarp();
    const int32_t wanted = used + ring.slots;
    if (wanted < run.count) {
      if (wanted == run.first + 32) state.bad |= run.load(call, used + 1, ring.slot_bytes);
      ring.request(run, wanted, ring.slot);
    }
    ring.pass();
  }

  // Asks for the first of `count` blocks of keys and of values. Not 0 where a reference is wrong.
  __device__ __forceinline__ uint32_t begin_blocks(int32_t first, int32_t count) {
    run.keys = call.keys.blocks + first;
    run.values = call.values.blocks + first;
    run.count = 2 * count;
    const uint32_t bad = run.load(call, 0, ring.slot_bytes);
    int32_t slot = ring.slot;
#pragma unroll 1
    for (int32_t i = 0; i < ring.slots; ++i) {
      ring.request(run, i, slot);
      if (++slot == ring.slots) slot = 0;
    }
    return bad;
  }

  // What begin_blocks() asked for, with the query of this lane's column: all blocks but the row's
  // last one have 64 tokens. `tokens` are those of the row from the first of these blocks on.
  __device__ __forceinline__ void attend_blocks(const RowScales& scales, const uint16_t* query,
                                                int32_t tokens) {
    const float scale = scales.score * scales.key_step;
#pragma unroll 1
    for (int32_t i = 0; i < run.count; i += 2, tokens -= kBlockTokens) {
      const int32_t here = min(tokens, kBlockTokens);
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      OpenBlock b = open(headers.keys, i, here);
      if (b.coded) {
        score_coded(b, query, s);
      } else {
        score_raw(b, i, s);
      }
      const float base = static_cast<float>(b.base()) * scale;
      const float offset[2] = {base * state.query_sum[0], base * state.query_sum[1]};
      next_block(i);
      float added[2];
      state.weigh(s, here, scale * kDigitScale, offset, added, p);
      b = open(headers.values, i + 1, here);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        state.base_sum[c] = fmaf(static_cast<float>(b.base()), added[c], state.base_sum[c]);
      }
      if (b.coded) {
        add_coded(b, p);
      } else {
        add_raw(b, i + 1, p);
      }
      next_block(i + 1);
    }
  }

  __device__ __forceinline__ bool has_window(const CodedRow& row) const {
    const int64_t bytes = int64_t{tile_count(row.window_tokens)} * 2 * 32 * kHeadDim;
    return row.window >= 0 && row.window % 16 == 0 && row.window + bytes <= call.window_size;
  }
  // Asks for the window to be brought into L2.
  __device__ __forceinline__ void fetch_window(const CodedRow& row) {
    if (!has_window(row)) return;
    CopyPieces pieces;
    pieces.count = 1;
    pieces.total = static_cast<uint32_t>(tile_count(row.window_tokens) * 2 * 32 * kHeadDim);
    pieces.piece[0] = {nullptr, call.window + row.window, pieces.total};
    prefetch_pieces(pieces);
  }

  // Items of the window, whose values are their own unit.
  __device__ __forceinline__ void attend_window(const RowScales& scales, const CodedRow& row,
                                                int32_t first, int32_t count) {
    const int32_t tile_bytes = 32 * kHeadDim, tiles = tile_count(row.window_tokens);
    if (!has_window(row)) {
      state.bad = 1;
      return;
    }
    const uint8_t* keys = call.window + row.window;
    const uint8_t* values = keys + int64_t{tiles} * tile_bytes;
#pragma unroll 1
    for (int32_t i = first; i < first + count; ++i) {
      const int32_t tokens = min(row.window_tokens - i * kBlockTokens, kBlockTokens);
      const int64_t at = int64_t{i} * kItemTiles * tile_bytes;
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
#pragma unroll 1
      for (int o = 0; o < kItemTiles; ++o) {
        if (16 * o < tokens) {
#pragma unroll
          for (int f = 0; f < kDimBlocks; ++f) {
            uint32_t a[4];
            window_fragment(keys + at + o * tile_bytes, f, a);
            mma_m16n8k16(s[0], a, state.q[f][0], state.q[f][1]);
          }
        }
        rotate_tiles(s);
      }
      const float none[2] = {0.0f, 0.0f};
      float added[2];
      state.weigh(s, tokens, scales.score, none, added, p);
#pragma unroll 1
      for (int o = 0; 16 * o < tokens; ++o) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          window_fragment(values + at + o * tile_bytes, f, a);
          mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
        }
        rotate_tiles(p);
      }
    }
  }

  // Items begin .. end - 1 of all, those of a row that hold any.
  __device__ __forceinline__ void attend_row(int32_t row_index, int32_t begin, int32_t end,
                                             bool fits, float* partial) {
    const CodedRow row = call.rows[row_index];
    const auto* query =
        static_cast<const uint16_t*>(call.q) + int64_t{row_index} * call.columns * kHeadDim;
    const int32_t blocks = (row.coded_tokens + kBlockTokens - 1) / kBlockTokens;
    const int32_t from = begin - row.first_item, to = end - row.first_item;
    const bool named = fits && from >= 0 &&
                       to <= coded_row_items(row.coded_tokens, row.window_tokens) &&
                       row.step >= 0 && row.step < call.num_steps && row.coded_tokens >= 0 &&
                       row.window_tokens >= 0 && row.first_block >= 0 &&
                       int64_t{row.first_block} + blocks <= call.num_blocks;
    const int32_t count = named ? min(to, blocks) - from : 0;
    const uint32_t bad = count > 0 ? begin_blocks(row.first_block + from, count) : 0;
    state.begin(call, query);
    RowScales scales{call.sm_scale * kLog2E, 0.0f, 0.0f};
    float unit = 0.0f;
    if (named) {
      scales.key_step = call.keys.steps[row.step];
      scales.value_step = call.values.steps[row.step];
      unit = scales.value_step * kDigitScale;
      if (to > blocks) fetch_window(row);
      // Lanes of columns that are not there take the last one: their sums are not kept.
      const int32_t column = min(static_cast<int32_t>(threadIdx.x % 32 / 4), call.columns - 1);
      const uint16_t* own = query + column * kHeadDim;
      if (count > 0) attend_blocks(scales, own, row.coded_tokens - from * kBlockTokens);
      if (to > blocks) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
          for (int i = 0; i < 4; ++i) state.out[f][i] *= unit;
        }
        unit = 1.0f;
        const int32_t first = max(from - blocks, 0);
        attend_window(scales, row, first, to - blocks - first);
      }
    }
    state.bad |= bad | static_cast<uint32_t>(!named);
    state.leave(call, unit, scales.value_step, partial);
  }
};

}  // namespace tierkv
