// SPDX-License-Identifier: Apache-2.0
// One token of a page, by one warp: store, load, requantise into another format, clear. What
// codec/host/page_codec.h does on the host, with the same bytes, for kernels that decide about
// tokens where their pages are.
//
// All functions are called by the 32 lanes of a warp with the same arguments, and nobody else may
// touch the tiles that are written. A call sees what earlier calls of the warp wrote. A token owns
// whole bytes, so its neighbours' codes are never read. One that fails has written nothing.
#pragma once

#include "codec/gpu/pages/lane_token.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// ---- to and from the page ----

__device__ __forceinline__ void store_params(uint8_t* metadata, int32_t group, int32_t in_tile,
                                             QuantParams p) {
  *reinterpret_cast<uint32_t*>(metadata + token_metadata_byte(group, in_tile)) =
      p.scale | static_cast<uint32_t>(p.zero_point) << 16;
}

__device__ __forceinline__ void store_side(const PageRef& page, int32_t slot, Component c,
                                           const LaneSide& side) {
  const PageLayout& layout = *page.layout;
  const TileLayout tile = layout.tile(c);
  const int32_t tile_index = slot / kTileTokens, in_tile = slot % kTileTokens;
  uint8_t* codes = page.bytes + layout.tile_codes_byte(c, tile_index);
  uint8_t* metadata = page.bytes + layout.tile_metadata_byte(c, tile_index);
  const int32_t groups = layout.groups(c);
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, tile.head_dim) || lane_dim(i) >= tile.head_dim) continue;
    store_token_codes(tile, c, in_tile, lane_dim(i), side.codes[i], codes);
    if (groups == 1 && i + lane_index() == 0) {
      store_params(metadata, 0, in_tile, side.params[0][0]);
    } else if (groups > 1 && lane_index() % 8 == 0) {
      const int32_t blocks_per_group = tile.dim_blocks() / groups;
#pragma unroll
      for (int32_t b = 0; b < 2; ++b) {
        const int32_t block = 2 * lane_chunk(i) + b;
        if (block % blocks_per_group != 0) continue;
        store_params(metadata, block / blocks_per_group, in_tile, side.params[i][b]);
      }
    }
  }
}

__device__ __forceinline__ void load_side(const PageRef& page, int32_t slot, Component c,
                                          LaneSide* side) {
  const PageLayout& layout = *page.layout;
  const TileLayout tile = layout.tile(c);
  const int32_t tile_index = slot / kTileTokens, in_tile = slot % kTileTokens;
  const uint8_t* codes = page.bytes + layout.tile_codes_byte(c, tile_index);
  const uint8_t* metadata = page.bytes + layout.tile_metadata_byte(c, tile_index);
  const int32_t groups = layout.groups(c);
  *side = {};
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, tile.head_dim) || lane_dim(i) >= tile.head_dim) continue;
    load_token_codes(tile, c, in_tile, lane_dim(i), codes, side->codes[i]);
    if (groups == 0) continue;
    const int32_t blocks_per_group = tile.dim_blocks() / groups;
#pragma unroll
    for (int32_t b = 0; b < 2; ++b) {
      const int32_t group = (2 * lane_chunk(i) + b) / blocks_per_group;
      const uint32_t word =
          *reinterpret_cast<const uint32_t*>(metadata + token_metadata_byte(group, in_tile));
      side->params[i][b] = {static_cast<uint16_t>(word), static_cast<uint16_t>(word >> 16)};
    }
  }
}

__device__ __forceinline__ void store_scalars(const PageRef& page, int32_t slot, float score,
                                              int32_t position) {
  if (lane_index() != 0 || !page.layout->has_records()) return;
  *reinterpret_cast<float*>(page.bytes + page.layout->score_byte(slot)) = score;
  *reinterpret_cast<int32_t*>(page.bytes + page.layout->position_byte(slot)) = position;
}

__device__ __forceinline__ void store_lane_token(const PageRef& page, int32_t slot,
                                                 const LaneToken& token) {
  store_side(page, slot, Component::kKey, token.k);
  store_side(page, slot, Component::kValue, token.v);
  store_scalars(page, slot, token.score, token.position);
  __syncwarp();
}

__device__ __forceinline__ void load_lane_token(const PageRef& page, int32_t slot,
                                                LaneToken* token) {
  load_side(page, slot, Component::kKey, &token->k);
  load_side(page, slot, Component::kValue, &token->v);
  token->score = kNoScore;
  token->position = kNoPosition;
  if (page.layout->has_records()) {
    token->score = *reinterpret_cast<const float*>(page.bytes + page.layout->score_byte(slot));
    token->position =
        *reinterpret_cast<const int32_t*>(page.bytes + page.layout->position_byte(slot));
  }
  __syncwarp();
}

// ---- what kernels call; slots are inside their pages ----

// One component of a tile, and with the keys its scores and positions.
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
  if (c == Component::kKey && lane_index() < kTileTokens && layout.has_records()) {
    const int32_t at = tile * kTileTokens + lane_index();
    *reinterpret_cast<float*>(page.bytes + layout.score_byte(at)) = kNoScore;
    *reinterpret_cast<int32_t*>(page.bytes + layout.position_byte(at)) = kNoPosition;
  }
}

// open_slot(): clears the tile when the slot is its first.
__device__ __forceinline__ void open_token_slot(const PageRef& page, int32_t slot) {
  if (slot % kTileTokens != 0) return;
  clear_tile_side(page, slot / kTileTokens, Component::kKey);
  clear_tile_side(page, slot / kTileTokens, Component::kValue);
  __syncwarp();
}

__device__ __forceinline__ bool same_side_format(const PageRef& a, const PageRef& b, Component c) {
  const CodeType type = a.layout->tile(c).type;
  if (type.is_raw() && a.raw_dtype != b.raw_dtype) return false;
  return type == b.layout->tile(c).type && a.layout->groups(c) == b.layout->groups(c);
}

// Extrema of the decoded values of a row in one group: decoding is monotone in the code, so they
// are the values of its least and greatest codes.
__device__ __forceinline__ void decoded_extrema(const LaneSide& side, int32_t head_dim, float* lo,
                                                float* hi) {
  uint32_t least = 255, most = 0;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    if (!has_chunk(i / 4, head_dim) || lane_dim(i / 4) >= head_dim) continue;
    least = min(least, side.codes[i / 4][i % 4]);
    most = max(most, side.codes[i / 4][i % 4]);
  }
  const auto first = static_cast<int32_t>(__reduce_min_sync(kFullWarp, least));
  const auto last = static_cast<int32_t>(__reduce_max_sync(kFullWarp, most));
  const QuantParams p = side.params[0][0];
  const float scale = half_to_float(p.scale), zero_point = half_to_float(p.zero_point);
  const float a = dequantize(first, scale, zero_point), b = dequantize(last, scale, zero_point);
  *lo = nan_min(a, b);  // whatever the sign of a scale that came from elsewhere
  *hi = nan_max(a, b);
}

// Between formats; bit for bit where the format does not change.
__device__ __forceinline__ StatusCode convert_side(const PageRef& from, const PageRef& to,
                                                   Component c, LaneSide* side) {
  if (same_side_format(from, to, c)) return StatusCode::kOk;
  LaneValues x[1];
  float lo[1], hi[1];
  dequantize_lane(from, c, *side, x[0]);
  if (from.layout->groups(c) == 1 && to.layout->groups(c) <= 1) {
    decoded_extrema(*side, to.layout->head_dim(), &lo[0], &hi[0]);
  } else {
    row_extrema(x, to.layout->head_dim(), lo, hi);
  }
  return quantize_lane(to, c, x[0], lo[0], hi[0], side);
}

// move_token(): into a slot that is open; pages of one head_dim.
__device__ __forceinline__ StatusCode move_page_token(const PageRef& from, int32_t from_slot,
                                                      const PageRef& to, int32_t to_slot) {
  LaneToken token;
  load_lane_token(from, from_slot, &token);
  const StatusCode k = convert_side(from, to, Component::kKey, &token.k);
  const StatusCode v = convert_side(from, to, Component::kValue, &token.v);
  const StatusCode code = worst_of_warp(greater(k, v));
  if (code == StatusCode::kOk) store_lane_token(to, to_slot, token);
  return code;
}

// clear_token().
__device__ __forceinline__ void clear_page_token(const PageRef& page, int32_t slot) {
  LaneToken nothing = {};
  nothing.score = kNoScore;
  nothing.position = kNoPosition;
  store_lane_token(page, slot, nothing);
}

}  // namespace tierkv
