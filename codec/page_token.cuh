// One token of a page, by one warp: append, overwrite, requantise into another format, remove. What
// codec/page_codec.h does on the host, with the same bytes, for kernels that decide about tokens
// where their pages are.
//
// All functions are called by the 32 lanes of a warp with the same arguments, and nobody else may
// touch the tiles that are written. A call sees what earlier calls of the warp wrote. A token owns
// whole bytes, so its neighbours' codes are never read. One that fails has written nothing.
//
// Lane l holds the dims 32 c + l % 8 + 8 j, j < 4, of the chunks c = l / 8 and l / 8 + 4: whole
// bytes in every format, and eight lanes share the extrema of a block of 16 dims.
#pragma once

#include <cstdint>

#include "codec/element.h"
#include "codec/fragment_codes.h"
#include "codec/page_layout.h"
#include "codec/warp.cuh"

namespace tierkv {

inline constexpr int32_t kLaneChunks = 2;  // head_dim 256

// A page on the device.
struct PageRef {
  uint8_t* bytes;
  const PageLayout* layout;  // checked by the caller: is_page_layout()
  DType raw_dtype;
};

// A token to be written.
struct TokenInput {
  const void* k;  // dtype [head_dim], aligned to its elements
  const void* v;
  DType dtype;
  float score;
  int32_t position;
};

// One component of a token, spread over the warp.
struct LaneSide {
  uint32_t codes[kLaneChunks][4];
  QuantParams params[kLaneChunks][2];  // of the chunk's blocks of 16 dims; none for 16 bits
};
struct LaneToken {
  LaneSide k, v;
  float score;
  int32_t position;
};
using LaneValues = float[kLaneChunks][4];

__device__ __forceinline__ int32_t lane_chunk(int32_t i) {
  return lane_index() / 8 + 4 * i;
}
__device__ __forceinline__ int32_t lane_dim(int32_t i) {
  return 32 * lane_chunk(i) + lane_index() % 8;
}

__device__ __forceinline__ void load_lane_values(const void* row, DType dtype, int32_t head_dim,
                                                 LaneValues& x) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      x[i][j] = lane_dim(i) < head_dim ? load_element(row, dtype, lane_dim(i) + 8 * j) : 0.0f;
    }
  }
}

// ---- quantise ----

// Extrema of the sub-groups that the lane's blocks belong to.
struct LaneExtrema {
  float lo[kLaneChunks][2], hi[kLaneChunks][2];
};

__device__ __forceinline__ LaneExtrema block_extrema(const LaneValues& x) {
  LaneExtrema e;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int32_t b = 0; b < 2; ++b) {
      float lo = nan_min(x[i][2 * b], x[i][2 * b + 1]), hi = nan_max(x[i][2 * b], x[i][2 * b + 1]);
#pragma unroll
      for (int32_t lanes = 1; lanes <= 4; lanes *= 2) {
        lo = nan_min(lo, __shfl_xor_sync(kAllLanes, lo, lanes));
        hi = nan_max(hi, __shfl_xor_sync(kAllLanes, hi, lanes));
      }
      e.lo[i][b] = lo, e.hi[i][b] = hi;
    }
  }
  return e;
}

__device__ __forceinline__ LaneExtrema group_extrema(const LaneValues& x, int32_t blocks,
                                                     int32_t blocks_per_group) {
  const LaneExtrema own = block_extrema(x);
  if (blocks_per_group == 1) return own;
  LaneExtrema e = own;
#pragma unroll
  for (int32_t block = 0; block < 8 * kLaneChunks; ++block) {
    if (block >= blocks) continue;
    const int32_t owner = block / 2 % 4 * 8;
    const float lo = __shfl_sync(kAllLanes, own.lo[block / 8][block % 2], owner);
    const float hi = __shfl_sync(kAllLanes, own.hi[block / 8][block % 2], owner);
    const int32_t group = block / blocks_per_group;
#pragma unroll
    for (int32_t i = 0; i < 2 * kLaneChunks; ++i) {
      if ((2 * lane_chunk(i / 2) + i % 2) / blocks_per_group != group) continue;
      e.lo[i / 2][i % 2] = nan_min(e.lo[i / 2][i % 2], lo);
      e.hi[i / 2][i % 2] = nan_max(e.hi[i / 2][i % 2], hi);
    }
  }
  return e;
}

// The lane's part of the status.
__device__ __forceinline__ StatusCode quantize_lane(const PageRef& page, Component c,
                                                    const LaneValues& x, LaneSide* side) {
  const TileLayout tile = page.layout->tile(c);
  StatusCode code = StatusCode::kOk;
  const auto raise = [&code](StatusCode other) { code = other > code ? other : code; };
  if (tile.bits == 16) {
#pragma unroll
    for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
      const float value = x[i / 4][i % 4];
      const uint16_t raw = float_to_raw(page.raw_dtype, value);
      if (!is_finite(value)) {
        raise(StatusCode::kNonFinite);
      } else if (!is_finite(raw_to_float(page.raw_dtype, raw))) {
        raise(StatusCode::kOutOfRange);
      }
      side->codes[i / 4][i % 4] = raw;
    }
    return code;
  }
  const int32_t blocks = tile.dim_blocks(), levels = 1 << tile.bits;
  const LaneExtrema e = group_extrema(x, blocks, blocks / page.layout->groups(c));
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int32_t b = 0; b < 2; ++b) {
      const QuantParams p = minmax_params(e.lo[i][b], e.hi[i][b], levels);
      if (lane_dim(i) < tile.head_dim) {
        if (!is_finite(e.lo[i][b]) || !is_finite(e.hi[i][b])) {
          raise(StatusCode::kNonFinite);
        } else if (!params_in_range(p)) {
          raise(StatusCode::kOutOfRange);
        }
      }
      const CodeMaker maker = make_code_maker(p);
#pragma unroll
      for (int32_t j = 2 * b; j < 2 * b + 2; ++j) {
        side->codes[i][j] = biased_code(x[i][j], maker, static_cast<float>(levels - 1)) & 255u;
      }
      side->params[i][b] = p;
    }
  }
  return code;
}

__device__ __forceinline__ void dequantize_lane(const PageRef& page, Component c,
                                                const LaneSide& side, LaneValues& x) {
  const int32_t bits = page.layout->tile(c).bits;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    const uint32_t code = side.codes[i / 4][i % 4];
    const QuantParams p = side.params[i / 4][i % 4 / 2];
    x[i / 4][i % 4] = bits == 16 ? raw_to_float(page.raw_dtype, static_cast<uint16_t>(code))
                                 : dequantize(static_cast<int32_t>(code), half_to_float(p.scale),
                                              half_to_float(p.zero_point));
  }
}

// ---- to and from the page ----

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
    if (lane_dim(i) >= tile.head_dim) continue;
    store_token_codes(tile, c, in_tile, lane_dim(i), side.codes[i], codes);
    if (groups == 0 || lane_index() % 8 != 0) continue;
    const int32_t blocks_per_group = tile.dim_blocks() / groups;
#pragma unroll
    for (int32_t b = 0; b < 2; ++b) {
      const int32_t block = 2 * lane_chunk(i) + b;
      if (block % blocks_per_group != 0) continue;
      *reinterpret_cast<uint32_t*>(metadata +
                                   token_metadata_byte(block / blocks_per_group, in_tile)) =
          side.params[i][b].scale | static_cast<uint32_t>(side.params[i][b].zero_point) << 16;
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
    if (lane_dim(i) >= tile.head_dim) continue;
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

__device__ __forceinline__ void store_lane_token(const PageRef& page, int32_t slot,
                                                 const LaneToken& token) {
  store_side(page, slot, Component::kKey, token.k);
  store_side(page, slot, Component::kValue, token.v);
  if (lane_index() == 0) {
    *reinterpret_cast<float*>(page.bytes + page.layout->score_byte(slot)) = token.score;
    *reinterpret_cast<int32_t*>(page.bytes + page.layout->position_byte(slot)) = token.position;
  }
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

// open_slot(): clears the tile when the slot is its first.
__device__ __forceinline__ void open_token_slot(const PageRef& page, int32_t slot) {
  if (slot % kTileTokens != 0) return;
  const PageLayout& layout = *page.layout;
  const int32_t tile = slot / kTileTokens;
  for (int32_t c = 0; c < 2; ++c) {
    const auto component = static_cast<Component>(c);
    auto* codes = reinterpret_cast<uint4*>(page.bytes + layout.tile_codes_byte(component, tile));
    for (int32_t i = lane_index(); i < layout.tile(component).bytes() / 16; i += 32) {
      codes[i] = {0, 0, 0, 0};
    }
    auto* metadata =
        reinterpret_cast<uint4*>(page.bytes + layout.tile_metadata_byte(component, tile));
    for (int32_t i = lane_index(); i < tile_metadata_bytes(layout.groups(component)) / 16;
         i += 32) {
      metadata[i] = {0, 0, 0, 0};
    }
  }
  if (lane_index() < kTileTokens) {
    const int32_t at = slot + lane_index();
    *reinterpret_cast<float*>(page.bytes + layout.score_byte(at)) = kNoScore;
    *reinterpret_cast<int32_t*>(page.bytes + layout.position_byte(at)) = kNoPosition;
  }
  __syncwarp();
}

__device__ __forceinline__ StatusCode worst_of_warp(StatusCode code) {
  return static_cast<StatusCode>(__reduce_max_sync(kAllLanes, static_cast<int32_t>(code)));
}

// overwrite_token(): kNonFinite, kOutOfRange, kInvalidArgument as there, the greatest of them.
__device__ __forceinline__ StatusCode overwrite_page_token(const PageRef& page, int32_t slot,
                                                           const TokenInput& input) {
  const int32_t head_dim = page.layout->head_dim();
  LaneValues k, v;
  load_lane_values(input.k, input.dtype, head_dim, k);
  load_lane_values(input.v, input.dtype, head_dim, v);
  LaneToken token;
  token.score = input.score;
  token.position = input.position;
  StatusCode code = input.position < 0 ? StatusCode::kInvalidArgument : StatusCode::kOk;
  const auto raise = [&code](StatusCode other) { code = other > code ? other : code; };
  if (!is_finite(input.score)) raise(StatusCode::kNonFinite);
  raise(quantize_lane(page, Component::kKey, k, &token.k));
  raise(quantize_lane(page, Component::kValue, v, &token.v));
  code = worst_of_warp(code);
  if (code == StatusCode::kOk) store_lane_token(page, slot, token);
  return code;
}

// append_tokens() of one token into slot `slot` of a page of as many tokens. (A tile that was
// opened for a token that failed stays open: it holds no token.)
__device__ __forceinline__ StatusCode append_page_token(const PageRef& page, int32_t slot,
                                                        const TokenInput& input) {
  open_token_slot(page, slot);
  return overwrite_page_token(page, slot, input);
}

__device__ __forceinline__ bool same_side_format(const PageRef& a, const PageRef& b, Component c) {
  const int32_t bits = a.layout->tile(c).bits;
  if (bits == 16 && a.raw_dtype != b.raw_dtype) return false;
  return bits == b.layout->tile(c).bits && a.layout->groups(c) == b.layout->groups(c);
}

// Between formats; bit for bit where the format does not change.
__device__ __forceinline__ StatusCode convert_side(const PageRef& from, const PageRef& to,
                                                   Component c, LaneSide* side) {
  if (same_side_format(from, to, c)) return StatusCode::kOk;
  LaneValues x;
  dequantize_lane(from, c, *side, x);
  return quantize_lane(to, c, x, side);
}

// move_token(): into a slot that is open; pages of one head_dim.
__device__ __forceinline__ StatusCode move_page_token(const PageRef& from, int32_t from_slot,
                                                      const PageRef& to, int32_t to_slot) {
  LaneToken token;
  load_lane_token(from, from_slot, &token);
  const StatusCode k = convert_side(from, to, Component::kKey, &token.k);
  const StatusCode v = convert_side(from, to, Component::kValue, &token.v);
  const StatusCode code = worst_of_warp(k > v ? k : v);
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
