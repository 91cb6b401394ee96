// SPDX-License-Identifier: Apache-2.0
// One token of a page, by one warp: its parameters and codes, and the tile it lies in.
//
// All functions are called by the 32 lanes of a warp with the same arguments, and nobody else may
// touch the tiles that are written. A token owns whole bytes: its neighbours' codes are never read.
#pragma once

#include "codec/gpu/pages/lane_token.cuh"
#include "gpu/math.cuh"

namespace tierkv {

__device__ __forceinline__ void store_params(uint8_t* metadata, int32_t group, int32_t in_tile,
                                             QuantParams p) {
  *reinterpret_cast<uint32_t*>(metadata + token_metadata_byte(group, in_tile)) =
      p.scale | static_cast<uint32_t>(p.zero_point) << 16;
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

}  // namespace tierkv
