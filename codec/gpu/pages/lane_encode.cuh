// SPDX-License-Identifier: Apache-2.0
// One token of a page, by one warp: its parameters and codes, from registers and back, and the tile
// it lies in. Pages have no records: those of a device never do.
//
// All functions are called by the 32 lanes of a warp with the same arguments, and nobody else may
// touch the tiles that are written. A token owns whole bytes: its neighbours' codes are never read.
#pragma once

#include "codec/gpu/pages/lane_token.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// kDim: the head_dim, where it is known when compiling; else 0.
template <int32_t kDim>
__device__ __forceinline__ TileLayout tile_of(const PageRef& page, Component c) {
  TileLayout tile = page.layout->tile(c);
  if constexpr (kDim != 0) tile.head_dim = kDim;
  return tile;
}

// The parameters of a token's component.
__device__ __forceinline__ uint32_t* params_at(const PageRef& page, Component c, int32_t tile,
                                               int32_t in_tile) {
  return reinterpret_cast<uint32_t*>(page.bytes + page.layout->tile_metadata_byte(c, tile) +
                                     token_metadata_byte(0, in_tile));
}

__device__ __forceinline__ void load_side(const PageRef& page, int32_t slot, Component c,
                                          LaneSide* side) {
  const PageLayout& layout = *page.layout;
  const TileLayout tile = layout.tile(c);
  const int32_t tile_index = slot / kTileTokens, in_tile = slot % kTileTokens;
  const uint8_t* codes = page.bytes + layout.tile_codes_byte(c, tile_index);
  *side = {};
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, tile.head_dim) || lane_dim(i) >= tile.head_dim) continue;
    load_token_codes(tile, c, in_tile, lane_dim(i), codes, side->codes[i]);
  }
  if (layout.groups(c) == 0) return;
  const uint32_t word = *params_at(page, c, tile_index, in_tile);
  side->params = {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
}

// One component of a tile.
__device__ __forceinline__ void clear_tile_side(const PageRef& page, int32_t tile, Component c) {
  const PageLayout& layout = *page.layout;
  auto* codes = reinterpret_cast<uint4*>(page.bytes + layout.tile_codes_byte(c, tile));
  auto* metadata = reinterpret_cast<uint4*>(page.bytes + layout.tile_metadata_byte(c, tile));
#pragma unroll 1
  for (int32_t i = lane_index(); i < layout.tile(c).bytes() / 16; i += 32) {
    codes[i] = {0, 0, 0, 0};
  }
#pragma unroll 1
  for (int32_t i = lane_index(); i < tile_metadata_bytes(layout.groups(c)) / 16; i += 32) {
    metadata[i] = {0, 0, 0, 0};
  }
}

// Clears the tile when the slot is its first.
__device__ __forceinline__ void open_token_slot(const PageRef& page, int32_t slot) {
  if (slot % kTileTokens != 0) return;
  clear_tile_side(page, slot / kTileTokens, Component::kKey);
  clear_tile_side(page, slot / kTileTokens, Component::kValue);
  __syncwarp();
}

__device__ __forceinline__ float squared_norm(const LaneValues& x, int32_t head_dim) {
  float sum[4] = {};  // of the partials lane % 8 + 8 j
#pragma unroll
  for (int32_t chunk = 0; chunk < 4 * kLaneChunks; ++chunk) {
    if (32 * chunk >= head_dim) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float y = x[chunk / 4][j];
      const float square = __shfl_sync(kFullWarp, mul_rn(y, y), lane_index() % 8 + chunk % 4 * 8);
      sum[j] = add_rn(sum[j], square);
    }
  }
  float all = add_rn(add_rn(sum[0], sum[2]), add_rn(sum[1], sum[3]));
#pragma unroll
  for (int32_t lanes = 4; lanes > 0; lanes /= 2) {
    all = add_rn(all, __shfl_xor_sync(kFullWarp, all, lanes));
  }
  return all;
}

// quantize_norm(): the lane's part of the status.
__device__ __forceinline__ StatusCode quantize_norm_lane(const LaneValues& x, int32_t head_dim,
                                                         LaneSide* side) {
  const QuantParams p = norm_params(squared_norm(x, head_dim), head_dim);
  const float scale = half_to_float(p.scale), zero_point = half_to_float(p.zero_point);
  StatusCode code = params_in_range(p) ? StatusCode::kOk : StatusCode::kOutOfRange;
  bool finite = true;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      finite &= lane_dim(i) >= head_dim || is_finite(x[i][j]);
      side->codes[i][j] =
          static_cast<uint32_t>(minmax_code(x[i][j], scale, zero_point, kNormLevels));
    }
  }
  side->params = p;
  return __all_sync(kFullWarp, finite) ? code : StatusCode::kNonFinite;
}

// Min-max codes of a whole head; the lane's part of the status.
__device__ __forceinline__ StatusCode quantize_minmax_lane(const LaneValues& x, CodeType type,
                                                           int32_t head_dim, LaneSide* side) {
  float lo, hi;
  row_extrema(x, head_dim, &lo, &hi);
  const QuantParams p = minmax_params(lo, hi, type.levels());
  const CodeMaker maker = make_code_maker(p);
  const float top = static_cast<float>(type.levels() - 1);
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) side->codes[i][j] = biased_code(x[i][j], maker, top) & 255u;
  }
  side->params = p;
  return params_status(lo, hi, p);
}

// In coordinates; the lane's part of the status.
template <int32_t kDim = 0>
__device__ __forceinline__ StatusCode encode_side(const PageRef& page, Component c, StepRule rule,
                                                  const LaneValues& x, LaneSide* side) {
  const TileLayout tile = tile_of<kDim>(page, c);
  *side = {};
  if (tile.type.is_raw()) return take_raw_codes(page, tile.head_dim, x, side);
  if (rule == StepRule::kNorm) return quantize_norm_lane(x, tile.head_dim, side);
  return quantize_minmax_lane(x, tile.type, tile.head_dim, side);
}

// Stores one token's side.
template <int32_t kDim = 0>
__device__ __forceinline__ void store_whole_side(const PageRef& page, int32_t slot, Component c,
                                                 const LaneSide& side) {
  const PageLayout& layout = *page.layout;
  const TileLayout tile = tile_of<kDim>(page, c);
  const int32_t tile_index = slot / kTileTokens, in_tile = slot % kTileTokens;
  uint8_t* codes = page.bytes + layout.tile_codes_byte(c, tile_index);
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, tile.head_dim) || lane_dim(i) >= tile.head_dim) continue;
    store_token_codes(tile, c, in_tile, lane_dim(i), side.codes[i], codes);
  }
  if (layout.groups(c) == 0 || lane_index() != 0) return;
  *params_at(page, c, tile_index, in_tile) =
      side.params.scale | static_cast<uint32_t>(side.params.zero_point) << 16;
}

}  // namespace tierkv
