// One token of a page, by one warp: append, overwrite, requantise into another format, remove. What
// codec/host/page_codec.h does on the host, with the same bytes, for kernels that decide about
// tokens where their pages are.
//
// All functions are called by the 32 lanes of a warp with the same arguments, and nobody else may
// touch the tiles that are written. A call sees what earlier calls of the warp wrote. A token owns
// whole bytes, so its neighbours' codes are never read. One that fails has written nothing.
#pragma once

#include <cstdint>

#include "codec/gpu/pages/lane_token.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// A token to be written.
struct TokenInput {
  const void* k;  // dtype [head_dim], aligned to its elements
  const void* v;
  DType dtype;
  float score;
  int32_t position;
};

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
  if (lane_index() != 0) return;
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
  token->score = *reinterpret_cast<const float*>(page.bytes + page.layout->score_byte(slot));
  token->position =
      *reinterpret_cast<const int32_t*>(page.bytes + page.layout->position_byte(slot));
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
  if (c == Component::kKey && lane_index() < kTileTokens) {
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

__device__ __forceinline__ StatusCode scalars_status(const TokenInput& input) {
  if (!is_finite(input.score)) return StatusCode::kNonFinite;
  return input.position < 0 ? StatusCode::kInvalidArgument : StatusCode::kOk;
}

// The greatest status in all lanes.
__device__ __forceinline__ StatusCode quantize_token(const PageRef& page, const TokenInput& input,
                                                     const LaneValues (&x)[2], LaneToken* token) {
  float lo[2], hi[2];
  row_extrema(x, page.layout->head_dim(), lo, hi);
  StatusCode code = scalars_status(input);
  code = greater(code, quantize_lane(page, Component::kKey, x[0], lo[0], hi[0], &token->k));
  code = greater(code, quantize_lane(page, Component::kValue, x[1], lo[1], hi[1], &token->v));
  token->score = input.score;
  token->position = input.position;
  return worst_of_warp(code);
}

// append_tokens() of one token into slot `slot` of a page of as many tokens: kNonFinite,
// kOutOfRange, kInvalidArgument as there, the greatest of them. (A tile that was opened for a token
// that is refused stays open: it holds no token.)
__device__ __forceinline__ StatusCode append_page_token(const PageRef& page, int32_t slot,
                                                        const TokenInput& input) {
  LaneValues x[2];  // asked for before anything waits for the page
  load_lane_values(input.k, input.dtype, page.layout->head_dim(), x[0]);
  load_lane_values(input.v, input.dtype, page.layout->head_dim(), x[1]);
  open_token_slot(page, slot);
  LaneToken token;
  const StatusCode code = quantize_token(page, input, x, &token);
  if (code == StatusCode::kOk) store_lane_token(page, slot, token);
  return code;
}

// append_page_token() by two warps, one for each component; the key's writes score and position.
// Half the time of one warp. What a warp refuses the other may have written: the token is not in
// use, and the status is the greater of the two.
__device__ __forceinline__ StatusCode append_page_side(const PageRef& page, int32_t slot,
                                                       Component c, const TokenInput& input) {
  const int32_t head_dim = page.layout->head_dim();
  LaneValues x[1];
  load_lane_values(c == Component::kKey ? input.k : input.v, input.dtype, head_dim, x[0]);
  if (slot % kTileTokens == 0) clear_tile_side(page, slot / kTileTokens, c);
  float lo[1], hi[1];
  row_extrema(x, head_dim, lo, hi);
  LaneSide side;
  StatusCode code = c == Component::kKey ? scalars_status(input) : StatusCode::kOk;
  code = worst_of_warp(greater(code, quantize_lane(page, c, x[0], lo[0], hi[0], &side)));
  __syncwarp();
  if (code != StatusCode::kOk) return code;
  store_side(page, slot, c, side);
  if (c == Component::kKey) store_scalars(page, slot, input.score, input.position);
  return code;
}

// overwrite_token(): likewise, over whatever the slot held.
__device__ __forceinline__ StatusCode overwrite_page_token(const PageRef& page, int32_t slot,
                                                           const TokenInput& input) {
  LaneValues x[2];
  load_lane_values(input.k, input.dtype, page.layout->head_dim(), x[0]);
  load_lane_values(input.v, input.dtype, page.layout->head_dim(), x[1]);
  LaneToken token;
  const StatusCode code = quantize_token(page, input, x, &token);
  if (code == StatusCode::kOk) store_lane_token(page, slot, token);
  return code;
}

__device__ __forceinline__ bool same_side_format(const PageRef& a, const PageRef& b, Component c) {
  const int32_t bits = a.layout->tile(c).bits;
  if (bits == 16 && a.raw_dtype != b.raw_dtype) return false;
  return bits == b.layout->tile(c).bits && a.layout->groups(c) == b.layout->groups(c);
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
  const auto first = static_cast<int32_t>(__reduce_min_sync(kAllLanes, least));
  const auto last = static_cast<int32_t>(__reduce_max_sync(kAllLanes, most));
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

// remove_token(): the tier's last token moves into the hole. Pages of one format.
__device__ __forceinline__ void remove_page_token(const PageRef& page, int32_t slot,
                                                  const PageRef& last, int32_t last_slot) {
  if (page.bytes != last.bytes || slot != last_slot) {
    LaneToken token;
    load_lane_token(last, last_slot, &token);
    store_lane_token(page, slot, token);
  }
  clear_page_token(last, last_slot);
}

}  // namespace tierkv
