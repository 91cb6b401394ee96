// SPDX-License-Identifier: Apache-2.0
// One token of a page, by one warp: its parameters and codes, and the tile it lies in.
//
// Pages have no records: those of a device never do.
//
// All functions are called by the 32 lanes of a warp with the same arguments, and nobody else may
// touch the tiles that are written. A token owns whole bytes: its neighbours' codes are never read.
#pragma once

#include "codec/gpu/pages/lane_token.cuh"
#include "gpu/math.cuh"

namespace tierkv {

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

// open_slot(): clears the tile when the slot is its first.
__device__ __forceinline__ void open_token_slot(const PageRef& page, int32_t slot) {
  if (slot % kTileTokens != 0) return;
  clear_tile_side(page, slot / kTileTokens, Component::kKey);
  clear_tile_side(page, slot / kTileTokens, Component::kValue);
  __syncwarp();
}

}  // namespace tierkv
