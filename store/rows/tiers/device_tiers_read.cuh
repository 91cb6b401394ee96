// SPDX-License-Identifier: Apache-2.0
// The kernels of tiers that cut bodies and read them.
#pragma once

#include "gpu/pdl.cuh"
#include "store/rows/tiers/device_tiers_kernels.cuh"

namespace tierkv::store {

// ---- cut ----

// The slots of token n of a side and of those behind it, `count` at most, that lie in its tile. By
// a warp, whose tokens' lanes take turns.
template <int32_t kDim>
__device__ __forceinline__ void clear_rest(const TiersPlace& at, int32_t side, int32_t n,
                                           int32_t count) {
  if (n % kTileTokens == 0 || count == 0) return;
  int32_t slot;
  const PageRef page = at.page(side, n, &slot);
  const int32_t end = slot + least(kTileTokens - n % kTileTokens, count);
#pragma unroll 1
  for (int32_t i = slot + token_of_lane<kDim>(); i < end; i += kWarpTokens<kDim>) {
    clear_slot<kDim>(page, i);
  }
}

// A warp a row: what its table row is to hold or, where the tables were cut, its state. Slots
// behind the tokens that stay are then empty again, as in pages that never held more.
template <bool kIsCut, int32_t kDim>
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
    if (kIsCut) clear_rest<kDim>(at, side, left.tokens[side], now.tokens[side] - left.tokens[side]);
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
template <int32_t kDim>
__global__ void __launch_bounds__(kTiersThreads)
    clear_behind_kernel(const __grid_constant__ DeviceStoreView view,
                        const __grid_constant__ TiersCodes codes, int32_t slot, Positions layers) {
  wait_for_previous_kernel();
  const int32_t row = warp_of_grid(), layer = layers.first + row / view.num_kv_heads;
  if (layer >= layers.end) return;
  const TiersPlace at = place_of(view, codes, slot, layer, row % view.num_kv_heads);
#pragma unroll 1
  for (int32_t side = 0; side < 2; ++side) {
    clear_rest<kDim>(at, side, at.state()->tokens[side], kTileTokens);
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
  const TiersPlace at = place_of(r.view, r.codes, r.slot, r.layer, kv_head);
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

template <int32_t kDim>
__device__ __forceinline__ void store_row(LaneValues& x, DType dtype, uint16_t* row) {
  if (!has_dims<kDim>()) return;
  uint32_t words[4];
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; i += 2) {
    words[i / 2] = dtype == DType::kFloat16
                       ? pack_halves(saturate_to_half_range(x[i]), saturate_to_half_range(x[i + 1]))
                       : pack_bfloats(x[i], x[i + 1]);
  }
  store_eight(row + lane_dim<kDim>(), words);
}

// Grid of warps: kv_heads of every position.
template <int32_t kDim>
__global__ void __launch_bounds__(kTiersThreads, 6)
    read_tiers_kernel(const __grid_constant__ TiersRead r) {
  wait_for_previous_kernel();
  const int32_t n = warp_of_grid() * kWarpTokens<kDim> + token_of_lane<kDim>();
  const bool is_asked = n < r.range.count() * r.view.num_kv_heads;
  const int32_t i = is_asked ? n / r.view.num_kv_heads : 0;
  const int32_t kv_head = is_asked ? n - i * r.view.num_kv_heads : 0;
  const int32_t position = r.range.first + i;
  const TiersPlace at = place_of(r.view, r.codes, r.slot, r.layer, kv_head);
  const uint8_t* map = at.map();
  const BodyTier tier = is_asked ? tier_at(map, position) : BodyTier::kNoTier;
  const int32_t side = side_of(tier);
  const int32_t index = rank_of<kTokenLanes<kDim>>(
      map, r.groups + int64_t{kv_head} * r.groups_of_row, 0, position, side);
  int32_t slot;
  const PageRef page = at.page(side, index, &slot, is_kept(tier));
  if (!is_kept(tier) && is_asked && r.pruned != nullptr && lane_of_token<kDim>() == 0) {
    r.pruned[kv_head * r.pruned_stride + i] = 1;
  }
  const bool any_basis = __any_sync(kFullWarp, at.has_basis());
#pragma unroll 1
  for (int32_t part = 0; part < 2; ++part) {
    const auto component = static_cast<Component>(part);
    LaneValues x, y;
    decode_lane<kDim>(page, slot, component, is_kept(tier), x);
    if (any_basis) {
#pragma unroll
      for (int32_t d = 0; d < kLaneDims; ++d) y[d] = x[d];
      rotate_back<kDim>(r.codes.rotation[part], y);
      const float* key_mean = part == 0 ? at.key_mean() : nullptr;
      LaneValues mean;
      load_lane_floats<kDim>(key_mean, mean);
#pragma unroll
      for (int32_t d = 0; d < kLaneDims; ++d) {
        if (is_kept(tier) && at.has_basis())
          x[d] = key_mean == nullptr ? y[d] : add_rn(y[d], mean[d]);
      }
    }
    if (is_asked) store_row<kDim>(x, r.dtype, r.of(component) + int64_t{n} * kDim);
  }
}

}  // namespace tierkv::store
