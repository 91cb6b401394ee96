// The kernel of coded attention. A warp owns a run of items and one ring of slots; no warp waits
// for another but at the beginning, when the CTA copies its tables.
//
// Bound: shared-memory wavefronts of the lookups; copies of the tables make them fewer.
#pragma once

#include "attention/coded_shared.h"
#include "attention/coded_tile.cuh"
#include "attention/online_softmax.h"
#include "attention/ptx.cuh"

namespace tierkv {

struct CodedKernelParams {
  CodedAttention call;
  CodedAttentionGrid grid;
};

// What a warp leaves of a row: `columns` outputs of head_dim floats, then the references and sums.
// A negative sum says that the row is corrupt. Warp w and row r share partial w + r: one of the two
// grows from each partial to the next.
__device__ __forceinline__ int64_t coded_partial_floats(const CodedAttention& call) {
  return int64_t{call.columns} * (call.head_dim + 2);
}

// By the whole warp: the last row whose first item is at most `item`.
__device__ __forceinline__ int32_t find_row(const CodedAttention& call, int32_t item) {
  int32_t low = 0, count = call.num_rows;
  while (count > 1) {
    const int32_t stride = (count + 31) / 32, i = static_cast<int32_t>(threadIdx.x % 32) * stride;
    const bool before = i < count && call.rows[low + i].first_item <= item;
    const int32_t found = max(1, __popc(__ballot_sync(kFullWarp, before)));
    low += (found - 1) * stride;
    count = min(stride, count - (found - 1) * stride);
  }
  return low;
}

// The references of a run of blocks, in the order of use (keys, values, keys, ...), a lane each: no
// copy waits for one.
struct RefWindow {
  const CodedBlockRef* keys;
  const CodedBlockRef* values;
  int32_t count;  // references in all
  int32_t first = 0;
  CodedBlockRef mine;

  __device__ __forceinline__ void load(int32_t from) {
    first = from;
    const int32_t i = from + static_cast<int32_t>(threadIdx.x % 32);
    mine = i >= count ? CodedBlockRef{} : i % 2 == 0 ? keys[i / 2] : values[i / 2];
  }
  // By the whole warp; i may be less than the one before by at most 2, slots_per_warp.
  __device__ __forceinline__ CodedBlockRef get(int32_t i) const {
    CodedBlockRef ref;
    ref.offset = __shfl_sync(kFullWarp, mine.offset, i - first);
    ref.units = __shfl_sync(kFullWarp, mine.units, i - first);
    return ref;
  }
};

// A warp's ring: blocks are asked for in the order in which they are used.
struct BlockRing {
  const CodedSharedLayout& layout;
  const CodedAttentionGrid& grid;
  uint64_t* barriers;   // of this warp
  uint32_t first_slot;  // of this warp
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t address(int32_t i) const {
    return layout.slot(first_slot + static_cast<uint32_t>(i),
                       static_cast<uint32_t>(grid.slot_bytes));
  }
  // A block that is larger than a slot brings its header only; nothing where the reference leads
  // outside the bytes.
  __device__ __forceinline__ void request(const CodedComponent& c, CodedBlockRef ref, int32_t i) {
    const int64_t from = int64_t{ref.offset} * 16, bytes = int64_t{ref.units} * 16;
    const bool inside = ref.units > 0 && from + bytes <= c.size;
    CopyPieces pieces;
    pieces.count = inside ? 1 : 0;
    pieces.total = !inside ? 0 : bytes > grid.slot_bytes ? 16 : static_cast<uint32_t>(bytes);
    pieces.piece[0] = {static_cast<uint8_t*>(__cvta_shared_to_generic(address(i))), c.bytes + from,
                       pieces.total};
    copy_pieces(barriers + i, pieces);
  }
  __device__ __forceinline__ void wait() { wait_barrier(barriers + slot, parity); }
  __device__ __forceinline__ void pass() {
    if (++slot == grid.slots_per_warp) slot = 0, parity ^= 1;
  }
};

template <int kDimBlocks>
struct CodedState {
  uint32_t q[kDimBlocks][2];  // B operand: dims 2t, 2t + 1 (+ 8) of column t
  float query_sum[2];         // of columns 2t, 2t + 1
  float out[kDimBlocks][4];
  float reference[2], sum[2];  // of columns 2t, 2t + 1; the sum of this lane's tokens
  float base_sum[2];           // sum of base * p
  bool valid;

  __device__ __forceinline__ void begin(const CodedAttention& call, const uint16_t* query) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    float total = 0;
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[f][h] = 0;
        if (g < call.columns) {
          q[f][h] = *reinterpret_cast<const uint32_t*>(query + g * call.head_dim + 16 * f + 8 * h +
                                                       2 * t);
        }
        const float2 x = unpack_halves(q[f][h]);
        total += x.x + x.y;
        out[f][2 * h] = out[f][2 * h + 1] = 0.0f;
      }
    }
    total += __shfl_xor_sync(kFullWarp, total, 1);
    total += __shfl_xor_sync(kFullWarp, total, 2);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      query_sum[c] = __shfl_sync(kFullWarp, total, 4 * (2 * t + c));
      reference[c] = kNoReference;
      sum[c] = base_sum[c] = 0.0f;
    }
    valid = true;
  }

  // Scores into probabilities times 2^-reference, in place of the B operand of P^T. scale and
  // offset bring a score to log2 units; added: the sums of this lane's tokens.
  __device__ __forceinline__ void weigh(float (&s)[kItemTiles][4], int32_t tokens, float scale,
                                        const float (&offset)[2], float (&added)[2],
                                        uint32_t (&p)[kItemTiles][2]) {
    if (tokens < kBlockTokens) {
      const int32_t g = static_cast<int32_t>(threadIdx.x % 32 / 4);
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (16 * o + g + 8 * (i / 2) >= tokens) s[o][i] = -INFINITY;
        }
      }
    }
    float top[2], shift[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = -INFINITY;
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) x = fmaxf(x, fmaxf(s[o][c], s[o][c + 2]));
#pragma unroll
      for (int i = 4; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, i));
      top[c] = fmaxf(reference[c], fmaf(x, scale, offset[c]));
    }
    if (__any_sync(kFullWarp, top[0] > reference[0] || top[1] > reference[1])) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float factor = exp2_fast(reference[c] - top[c]);
        reference[c] = top[c];
        sum[c] *= factor;
        base_sum[c] *= factor;
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) out[f][c] *= factor, out[f][c + 2] *= factor;
      }
    }
    added[0] = added[1] = 0.0f;
    shift[0] = offset[0] - reference[0], shift[1] = offset[1] - reference[1];
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t pair = pack_halves(exp2_fast(fmaf(s[o][2 * h], scale, shift[0])),
                                          exp2_fast(fmaf(s[o][2 * h + 1], scale, shift[1])));
        // The sum is that of the rounded ones, so that the base drops out exactly.
        const float2 rounded = unpack_halves(pair);
        added[0] += rounded.x;
        added[1] += rounded.y;
        p[o][h] = transpose_8x8(pair);
      }
    }
    sum[0] += added[0];
    sum[1] += added[1];
  }

  // out in units of unit, base_sum in steps.
  __device__ __forceinline__ void leave(const CodedAttention& call, float unit, float step,
                                        float* partial) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const bool all_valid = __all_sync(kFullWarp, valid);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) {
        sum[c] += __shfl_xor_sync(kFullWarp, sum[c], i);
        base_sum[c] += __shfl_xor_sync(kFullWarp, base_sum[c], i);
      }
      const int32_t column = 2 * t + c;
      if (column >= call.columns) continue;
      float* to = partial + column * call.head_dim;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        to[16 * f + g] = fmaf(unit, out[f][c], step * base_sum[c]);
        to[16 * f + g + 8] = fmaf(unit, out[f][c + 2], step * base_sum[c]);
      }
      if (g != 0) continue;
      float* states = partial + call.columns * call.head_dim;
      states[2 * column] = reference[c];
      states[2 * column + 1] = all_valid ? sum[c] : -1.0f;
    }
  }
};

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

template <int kCopiesLog>
__device__ __forceinline__ void fill_table(uint32_t address, const DeviceCodebook& c) {
  constexpr uint32_t kCopies = 1u << kCopiesLog;
  const uint32_t entries = 1u << c.max_length;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < entries; i += blockDim.x) {
    const uint32_t x = c.table[i], to = address + 4 * kCopies * i;
    if constexpr (kCopies == 1) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x));
    } else {
      // Eight lanes write at a time: each begins at another copy, so that they fill all banks.
      const uint32_t turn = threadIdx.x * kCopies / 32;
#pragma unroll
      for (uint32_t i4 = 0; i4 < kCopies / 4; ++i4) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         to + 16 * ((i4 + turn) % (kCopies / 4))),
                     "r"(x));
      }
    }
  }
}

inline constexpr int32_t kCodedWarps = 16;

template <int kDimBlocks, int kStreams, int kCopiesLog>
__global__ void __launch_bounds__(kCodedWarps * 32, 1)
    coded_attention_kernel(const __grid_constant__ CodedKernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  const DeviceCodebook &key_book = call.keys.codebook, &value_book = call.values.codebook;
  const auto region = static_cast<uint32_t>(
      table_region_bytes(max(key_book.max_length, value_book.max_length), kCopiesLog));
  const uint32_t start = shared_address(shared);
  const auto slots = static_cast<uint32_t>(kCodedWarps * grid.slots_per_warp);
  const CodedSharedLayout layout =
      coded_shared_layout(start, region, static_cast<uint32_t>(grid.slot_bytes), slots);
  const bool fits = layout.end - start <= static_cast<uint32_t>(grid.shared_bytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* barriers = reinterpret_cast<uint64_t*>(shared) + warp * grid.slots_per_warp;
  if (is_first_lane()) {
    for (int32_t i = 0; i < grid.slots_per_warp; ++i) init_barrier(barriers + i);
  }
  publish_barriers();
  wait_for_previous_kernel();
  if (fits) {
    fill_table<kCopiesLog>(layout.tables, key_book);
    fill_table<kCopiesLog>(layout.tables + region, value_book);
  }
  __syncthreads();

  BlockRing ring{layout, grid, barriers, static_cast<uint32_t>(warp * grid.slots_per_warp)};
  const ExpectedHeader key_header(key_book, call.head_dim), value_header(value_book, call.head_dim);
  CodedWarp<kDimBlocks, kStreams, kCopiesLog> worker{
      call,
      ring,
      key_header,
      value_header,
      SharedTable<kCopiesLog>(layout.tables, key_book.max_length),
      SharedTable<kCopiesLog>(layout.tables + region, value_book.max_length),
      {},
      {}};
  const int32_t global_warp = warp * static_cast<int32_t>(gridDim.x) + blockIdx.x;
  int64_t item = int64_t{global_warp} * grid.items_per_warp;
  const int64_t last = min(item + grid.items_per_warp, int64_t{call.num_items});
  if (item >= last) return;
  int32_t row = find_row(call, static_cast<int32_t>(item));
  while (item < last) {
    int64_t end = last;
    // Rows without items are passed over.
    int32_t next = row + 1;
    while (next < call.num_rows && call.rows[next].first_item <= item) row = next++;
    if (next < call.num_rows) end = min(end, int64_t{call.rows[next].first_item});
    float* partial = static_cast<float*>(call.workspace) +
                     (int64_t{global_warp} + row) * coded_partial_floats(call);
    worker.attend_row(row, static_cast<int32_t>(item), static_cast<int32_t>(end), fits, partial);
    item = end;
    row = next;
  }
}

}  // namespace tierkv
