// SPDX-License-Identifier: Apache-2.0
// Attention over rows of raw blocks (CodedAttention::raw_blocks): items, queries, partials and what
// joins them are those of coded rows. Bound: memory.
#pragma once

#include "attention/coded/coded_items.cuh"
#include "attention/coded/coded_state.cuh"
#include "gpu/constants.h"
#include "gpu/pdl.cuh"

namespace tierkv {

template <int kDimBlocks>
struct RawRowsWarp {
  static constexpr int32_t kHeadDim = kDimBlocks * kDimBlock;
  static constexpr int32_t kTileBytes = TileLayout{kRawCodes, kHeadDim}.bytes();
  const CodedKernelParams& params;
  const CodedAttention& call = params.call;
  CodedState<kDimBlocks> state{};

  // Items [begin, end) of all, those of row r.
  __device__ __forceinline__ void attend_row(int32_t r, int32_t begin, int32_t end,
                                             float* partial) {
    const CodedRow& row = call.rows[r];
    const int32_t from = begin - row.first_item, to = end - row.first_item;
    const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
    const bool named = from >= 0 && to <= blocks && row.coded_tokens >= 0 && row.sink_tokens >= 0 &&
                       row.first_block >= 0 && int64_t{row.first_block} + blocks <= call.num_blocks;
    state.load_queries(
        call, static_cast<const uint16_t*>(call.q) + int64_t{r} * params.row_columns * kHeadDim);
    state.begin();
    state.bad = static_cast<uint32_t>(!named);
    float scale = call.sm_scale * kLog2E;
    if (params.units != nullptr) scale *= params.units[r];
#pragma unroll 1
    for (int32_t b = from; named && b < to; ++b) {
      const int32_t first = max(b * kBlockTokens, row.sink_tokens);
      const int32_t last = min((b + 1) * kBlockTokens, row.coded_tokens + row.sink_tokens);
      attend_block(row.first_block + b, last - first, scale);
    }
    state.leave(call, partial);
  }

 private:
  // Null where the block is not what it must be.
  __device__ __forceinline__ const uint8_t* tiles_of(const CodedComponent& c, int32_t block,
                                                     int32_t tokens) const {
    const CodedBlockRef ref = c.blocks[block];
    const int64_t bytes = kBlockTokens + int64_t{tile_count(tokens)} * kTileBytes;
    if (int64_t{ref.units} * kBlockAlignment != bytes) return nullptr;
    if (int64_t{ref.offset} * kBlockAlignment + bytes > c.size) return nullptr;
    return c.bytes + int64_t{ref.offset} * kBlockAlignment + kBlockTokens;
  }
  // Tile o, for score_tile() and add_tile().
  __device__ __forceinline__ static auto tile(const uint8_t* tiles, int o) {
    return [from = tiles + o * kTileBytes + threadIdx.x % 32 * 16](int f, uint32_t(&a)[4]) {
      const uint4 x = *reinterpret_cast<const uint4*>(from + f * (kWarpLanes * 16));
      a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    };
  }
  __device__ __forceinline__ void attend_block(int32_t block, int32_t tokens, float scale) {
    const uint8_t* keys = tiles_of(call.keys, block, tokens);
    const uint8_t* values = tiles_of(call.values, block, tokens);
    if (keys == nullptr || values == nullptr) {
      state.bad = 1;
      return;
    }
    float s[kItemTiles][4] = {};
    uint32_t p[kItemTiles][2];
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      if (o >= tile_count(tokens)) break;
      score_tile(state.q, tile(keys, o), s[o]);
    }
    state.weigh(s, tokens, scale, p);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      if (o >= tile_count(tokens)) break;
      state.add_tile(tile(values, o), p[o]);
    }
  }
};

template <int kDimBlocks>
__global__ void __launch_bounds__(32 * coded_warps(kDimBlocks * kDimBlock), 1)
    raw_rows_kernel(const __grid_constant__ CodedKernelParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  RawRowsWarp<kDimBlocks> worker{params};
  WarpItems items{params.call};
  const ItemShares shares = item_shares(params);
  const auto cta = static_cast<int32_t>(blockIdx.x), warp = static_cast<int32_t>(threadIdx.x / 32);
  if (!items.begin(shares.begin(cta, warp), shares.begin(cta, warp + 1))) return;
  const int32_t number = shares.number(cta, warp);
  do {
    worker.attend_row(items.row, items.first, items.end,
                      static_cast<float*>(params.call.workspace) +
                          (int64_t{number} + items.row) * coded_partial_floats(params.call));
  } while (items.next_row());
}

}  // namespace tierkv
