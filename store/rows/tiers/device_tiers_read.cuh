// SPDX-License-Identifier: Apache-2.0
// The kernels of tiers that cut bodies and read them.
#pragma once

#include "gpu/pdl.cuh"
#include "store/rows/tiers/device_tiers_kernels.cuh"

namespace tierkv::store {

// ---- cut ----

// The slots of token n of a side and of those behind it, `count` at most, that lie in its tile.
__device__ __forceinline__ void clear_rest(const TiersPlace& at, int32_t side, int32_t n,
                                           int32_t count) {
  if (n % kTileTokens == 0 || count == 0) return;
  const PageRef page = at.page(side, n);
  const int32_t slot = n % page.layout->tokens;
  clear_slots(page, slot, slot + least(kTileTokens - n % kTileTokens, count));
}

// A warp a row: what its table row is to hold or, where the tables were cut, its state. Slots
// behind the tokens that stay are then empty again, as in pages that never held more.
template <bool kIsCut>
__global__ void __launch_bounds__(kTiersThreads)
    cut_tiers_kernel(const __grid_constant__ TiersCall c) {
  wait_for_previous_kernel();
  const int32_t row = warp_of_grid(), entry = row / c.view.num_kv_heads;
  if (row >= c.num_rows || (kIsCut && !c.works.has_pages())) return;
  const LayerTokens to = c.works.to[entry];
  if (to.body_end >= c.works.from[entry].body_end) return;
  const TiersPlace at = place_of(c, row);
  const SideTokens stay = count_tiers(at.map(), 0, to.body_end);
  const TiersRow now = *at.state();
  TiersRow left = now;
#pragma unroll 1
  for (int32_t side = 0; side < 2; ++side) {
    left.tokens[side] = stay.of[side];
    if (kIsCut) clear_rest(at, side, left.tokens[side], now.tokens[side] - left.tokens[side]);
  }
  __syncwarp();
  if (lane_index() != 0) return;
  if (kIsCut) {
    *at.state() = left;
  } else {
    target_of(c, row) = units_of(at.of_class(), left);
  }
}

// Slots behind the last tokens of layers that came in; a warp a row.
__global__ void __launch_bounds__(kTiersThreads)
    clear_behind_kernel(const __grid_constant__ DeviceStoreView view,
                        const __grid_constant__ TiersCodes codes, int32_t slot, Positions layers) {
  wait_for_previous_kernel();
  const int32_t row = warp_of_grid(), layer = layers.first + row / view.num_kv_heads;
  if (layer >= layers.end) return;
  const TiersPlace at = {view, codes, slot, layer, row % view.num_kv_heads};
#pragma unroll 1
  for (int32_t side = 0; side < 2; ++side) {
    clear_rest(at, side, at.state()->tokens[side], kTileTokens);
  }
}

// ---- read ----

struct TiersRead : DeviceRead {
  DeviceStoreView view;
  TiersCodes codes;
  SideTokens* groups = nullptr;  // scratch, [num_kv_heads, groups_of_row]
  int32_t groups_of_row = 0;     // up to that of range.end
};

// Tokens of each side before every group of positions; a warp a row.
__global__ void __launch_bounds__(kTiersThreads)
    count_groups_kernel(const __grid_constant__ TiersRead r) {
  wait_for_previous_kernel();
  const int32_t kv_head = warp_of_grid();
  if (kv_head >= r.view.num_kv_heads) return;
  const TiersPlace at = {r.view, r.codes, r.slot, r.layer, kv_head};
  const uint8_t* map = at.map();
  SideTokens before;
#pragma unroll 1
  for (int32_t group = 0; group < r.groups_of_row; ++group) {
    if (lane_index() == 0) r.groups[int64_t{kv_head} * r.groups_of_row + group] = before;
    const int32_t first = group * kGroupPositions;
    const SideTokens here = count_tiers(map, first, least(first + kGroupPositions, r.range.end));
    for (int32_t side = 0; side < 2; ++side) before.of[side] += here.of[side];
  }
}

__device__ __forceinline__ void store_row(const LaneValues& x, DType dtype, int32_t head_dim,
                                          uint16_t* to) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim) || lane_dim(i) >= head_dim) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) store_element(to, dtype, lane_dim(i) + 8 * j, x[i][j]);
  }
}

// Grid of warps: kv_heads of every position.
__global__ void __launch_bounds__(kTiersThreads)
    read_tiers_kernel(const __grid_constant__ TiersRead r) {
  wait_for_previous_kernel();
  const int32_t warp = warp_of_grid(), i = warp / r.view.num_kv_heads;
  if (i >= r.range.count()) return;
  const int32_t position = r.range.first + i, head_dim = r.view.head_dim;
  const TiersPlace at = {r.view, r.codes, r.slot, r.layer, warp - i * r.view.num_kv_heads};
  const uint8_t* map = at.map();
  const BodyTier tier = tier_at(map, position);
  const int32_t side = side_of(tier);
  PageRef page{};
  int32_t slot = 0;
  if (is_kept(tier)) {
    const int32_t index =
        rank_of(map, r.groups + int64_t{at.kv_head} * r.groups_of_row, 0, position, side);
    page = at.page(side, index);
    slot = index % page.layout->tokens;
  } else if (r.pruned != nullptr && lane_index() == 0) {
    r.pruned[at.kv_head * r.pruned_stride + i] = 1;
  }
#pragma unroll 1
  for (int32_t part = 0; part < 2; ++part) {
    const auto component = static_cast<Component>(part);
    LaneValues x = {};
    if (is_kept(tier)) {
      LaneSide codes;
      load_side(page, slot, component, &codes);
      dequantize_lane(page, component, codes, x);
      if (at.has_basis()) {
        rotate_back(r.codes.rotation[part], head_dim, x);
        if (part == 0) add_mean(at.key_mean(), 1.0f, head_dim, x);
      }
    }
    store_row(x, r.dtype, head_dim, r.of(component) + int64_t{warp} * head_dim);
  }
}

}  // namespace tierkv::store
