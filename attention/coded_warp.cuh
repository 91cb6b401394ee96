// What a warp does with a run of items: keys, softmax, values, block after block.
#pragma once

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

template <int kDimBlocks, int kStreams, int kCopiesLog>
struct CodedWarp {
  static constexpr int32_t kHeadDim = 16 * kDimBlocks;
  using Streams = LanePair<kStreams, kCopiesLog>;
  const CodedAttention& call;
  BlockRing& ring;
  const ExpectedHeader& key_header;
  const ExpectedHeader& value_header;
  SharedTable<kCopiesLog> key_table, value_table;
  CodedState<kDimBlocks> state;
  RefWindow refs;

  __device__ __forceinline__ OpenBlock open(const CodedComponent& c, const ExpectedHeader& header,
                                            int32_t i, int32_t tokens) {
    const CodedBlockRef ref = refs.get(i);
    ring.wait();
    const int64_t from = int64_t{ref.offset} * 16;
    if (ref.units == 0 || from + int64_t{ref.units} * 16 > c.size) {
      OpenBlock none{};
      return none;
    }
    return open_block(ring.address(ring.slot), c.bytes + from, ref, ring.grid.slot_bytes, header,
                      tokens);
  }

  __device__ __forceinline__ void score_raw(const OpenBlock& b, float (&s)[kItemTiles][4]) {
#pragma unroll 1
    for (int o = 0; o < tile_count(b.tokens); ++o) {
      float one[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        raw_fragment(b, kHeadDim, Component::kKey, o, f, a);
        mma_m16n8k16(one, a, state.q[f][0], state.q[f][1]);
      }
#pragma unroll
      for (int z = 0; z < kItemTiles; ++z) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[z][i] = z == o ? one[i] : s[z][i];
      }
    }
  }

  __device__ __forceinline__ void score_coded(const OpenBlock& b, const uint16_t* query,
                                              float (&s)[kItemTiles][4]) {
    Streams streams;
    state.valid &= streams.open(b);
    // Loaded here, used after the streams: the latency hides behind them.
    uint2 first = make_uint2(0, 0);
    if (b.exceptions > 0) first = exception_queries(b, 0, query);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      if (o >= tiles) break;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        streams.fragment(key_table, a);
        mma_m16n8k16(s[o], a, state.q[f][0], state.q[f][1]);
      }
    }
    state.valid &= streams.ends(b);
#pragma unroll 1
    for (int32_t i = 0; i < b.exceptions; i += 16) {
      if (i > 0) first = exception_queries(b, i, query);
      score_exceptions(b, i, first, s);
    }
  }

  // The B operand of 16 exceptions: q of this lane's column at the dims they change.
  __device__ __forceinline__ uint2 exception_queries(const OpenBlock& b, int32_t first,
                                                     const uint16_t* query) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), column = lane / 4;
    uint32_t half[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t i = first + 2 * (lane % 4) + j % 2 + 8 * (j / 2);
      half[j] = 0;
      if (i >= b.exceptions || column >= call.columns) continue;
      const auto dim = static_cast<int32_t>(load_shared(b.exception_words + 4 * i) % kSliceDims);
      if (dim < kHeadDim) half[j] = query[column * kHeadDim + dim];
    }
    return make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
  }

  __device__ __forceinline__ void score_exceptions(const OpenBlock& b, int32_t first, uint2 queries,
                                                   float (&s)[kItemTiles][4]) {
    ExceptionFour four;
    state.valid &= four.load(b, first, kHeadDim);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      if (!ExceptionFour::any_in(four.token, 16 * o)) continue;
      uint32_t a[4];
      four.operand(four.token, 16 * o, a);
      mma_m16n8k16(s[o], a, queries.x, queries.y);
    }
  }

  __device__ __forceinline__ void add_raw(const OpenBlock& b, const uint32_t (&p)[kItemTiles][2]) {
#pragma unroll 1
    for (int o = 0; o < tile_count(b.tokens); ++o) {
      uint32_t low = 0, high = 0;
#pragma unroll
      for (int z = 0; z < kItemTiles; ++z)
        low = z == o ? p[z][0] : low, high = z == o ? p[z][1] : high;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        raw_fragment(b, kHeadDim, Component::kValue, o, f, a);
        mma_m16n8k16(state.out[f], a, low, high);
      }
    }
  }

  __device__ __forceinline__ void add_coded(const OpenBlock& b,
                                            const uint32_t (&p)[kItemTiles][2]) {
    Streams streams;
    state.valid &= streams.open(b);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      if (o >= tiles) break;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        streams.fragment(value_table, a);
        mma_m16n8k16(state.out[f], a, p[o][0], p[o][1]);
      }
    }
    state.valid &= streams.ends(b);
#pragma unroll 1
    for (int32_t first = 0; first < b.exceptions; first += 16) add_exceptions(b, first, p);
  }

  __device__ __forceinline__ void add_exceptions(const OpenBlock& b, int32_t first,
                                                 const uint32_t (&p)[kItemTiles][2]) {
    ExceptionFour four;
    state.valid &= four.load(b, first, kHeadDim);
    const int32_t column = static_cast<int32_t>(threadIdx.x % 32 / 4);
    uint32_t half[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Exceptions 8 to 15 are those of j = 2 and 3.
      half[j] = 0;
      if (j >= 2 && first + 8 >= b.exceptions) continue;
      // p of (token, column) lies in lane 4 column + (token % 8) / 2, register token / 8.
      const int32_t token = max(four.token[j], 0), lane = 4 * column + token % 8 / 2;
      uint32_t pair = 0;
#pragma unroll
      for (int i = 0; i < 2 * kItemTiles; ++i) {
        const uint32_t x = __shfl_sync(kFullWarp, p[i / 2][i % 2], lane);
        pair = i == token / 8 ? x : pair;
      }
      half[j] = token % 2 ? pair >> 16 : pair & 0xffffu;
    }
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      if (!ExceptionFour::any_in(four.dim, 16 * f)) continue;
      uint32_t a[4];
      four.operand(four.dim, 16 * f, a);
      mma_m16n8k16(state.out[f], a, half[0] | half[1] << 16, half[2] | half[3] << 16);
    }
  }

  // A slot is free: block `slots_per_warp` after `used` takes its place.
  __device__ __forceinline__ void next_block(int32_t used) {
    __syncwarp();
    const int32_t wanted = used + ring.grid.slots_per_warp;
    if (wanted < refs.count) {
      if (wanted == refs.first + 32) refs.load(used + 1);
      ring.request(wanted % 2 == 0 ? call.keys : call.values, refs.get(wanted), ring.slot);
    }
    ring.pass();
  }

  // Asks for the first of `count` blocks of keys and of values.
  __device__ __forceinline__ void begin_blocks(int32_t first, int32_t count) {
    refs.keys = call.keys.blocks + first;
    refs.values = call.values.blocks + first;
    refs.count = 2 * count;
    refs.load(0);
    int32_t slot = ring.slot;
#pragma unroll 1
    for (int32_t i = 0; i < ring.grid.slots_per_warp && i < 2 * count; ++i) {
      ring.request(i % 2 == 0 ? call.keys : call.values, refs.get(i), slot);
      if (++slot == ring.grid.slots_per_warp) slot = 0;
    }
  }

  // What begin_blocks() asked for: all blocks but the row's last one have 64 tokens. `tokens` are
  // those of the row from the first of these blocks on.
  __device__ __forceinline__ void attend_blocks(const RowScales& scales, const uint16_t* query,
                                                int32_t count, int32_t tokens) {
    const float scale = scales.score * scales.key_step;
#pragma unroll 1
    for (int32_t i = 0; i < count; ++i, tokens -= kBlockTokens) {
      const int32_t here = min(tokens, kBlockTokens);
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      OpenBlock b = open(call.keys, key_header, 2 * i, here);
      state.valid &= b.valid;
      if (b.valid && !b.raw) score_coded(b, query, s);
      if (b.valid && b.raw) score_raw(b, s);
      const float base = static_cast<float>(b.base) * scale;
      const float offset[2] = {base * state.query_sum[0], base * state.query_sum[1]};
      next_block(2 * i);
      float added[2];
      state.weigh(s, here, scale * kDigitScale, offset, added, p);
      b = open(call.values, value_header, 2 * i + 1, here);
      state.valid &= b.valid;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        state.base_sum[c] = fmaf(static_cast<float>(b.base), added[c], state.base_sum[c]);
      }
      if (b.valid && !b.raw) add_coded(b, p);
      if (b.valid && b.raw) add_raw(b, p);
      next_block(2 * i + 1);
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
      state.valid = false;
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
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
        if (16 * o >= tokens) break;
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          window_fragment(keys + at + o * tile_bytes, f, a);
          mma_m16n8k16(s[o], a, state.q[f][0], state.q[f][1]);
        }
      }
      const float none[2] = {0.0f, 0.0f};
      float added[2];
      state.weigh(s, tokens, scales.score, none, added, p);
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
        if (16 * o >= tokens) break;
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          window_fragment(values + at + o * tile_bytes, f, a);
          mma_m16n8k16(state.out[f], a, p[o][0], p[o][1]);
        }
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
    if (count > 0) begin_blocks(row.first_block + from, count);
    state.begin(call, query);
    RowScales scales{call.sm_scale * kLog2E, 0.0f, 0.0f};
    float unit = 0.0f;
    if (named) {
      scales.key_step = call.keys.steps[row.step];
      scales.value_step = call.values.steps[row.step];
      unit = scales.value_step * kDigitScale;
      if (to > blocks) fetch_window(row);
      if (count > 0) attend_blocks(scales, query, count, row.coded_tokens - from * kBlockTokens);
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
    state.valid &= named;
    state.leave(call, unit, scales.value_step, partial);
  }
};

}  // namespace tierkv
