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

// Extrema of whole rows, of kCount rows at a time so that their shuffles overlap.
template <int32_t kCount>
__device__ __forceinline__ void row_extrema(const LaneValues (&x)[kCount], int32_t head_dim,
                                            float (&lo)[kCount], float (&hi)[kCount]) {
#pragma unroll
  for (int32_t n = 0; n < kCount; ++n) {
    lo[n] = INFINITY;
    hi[n] = -INFINITY;
#pragma unroll
    for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
      if (lane_dim(i / 4) >= head_dim) continue;
      lo[n] = nan_min(lo[n], x[n][i / 4][i % 4]);
      hi[n] = nan_max(hi[n], x[n][i / 4][i % 4]);
    }
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) {
#pragma unroll
    for (int32_t n = 0; n < kCount; ++n) {
      lo[n] = nan_min(lo[n], __shfl_xor_sync(kAllLanes, lo[n], lanes));
      hi[n] = nan_max(hi[n], __shfl_xor_sync(kAllLanes, hi[n], lanes));
    }
  }
}

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
  int32_t first[2 * kLaneChunks];  // block of the sub-group of each of the lane's blocks
#pragma unroll
  for (int32_t i = 0; i < 2 * kLaneChunks; ++i) {
    const int32_t block = 2 * lane_chunk(i / 2) + i % 2;
    first[i] = block - block % blocks_per_group;
  }
#pragma unroll
  for (int32_t block = 0; block < 8 * kLaneChunks; ++block) {
    if (block >= blocks) continue;
    const int32_t owner = block / 2 % 4 * 8;
    const float lo = __shfl_sync(kAllLanes, own.lo[block / 8][block % 2], owner);
    const float hi = __shfl_sync(kAllLanes, own.hi[block / 8][block % 2], owner);
#pragma unroll
    for (int32_t i = 0; i < 2 * kLaneChunks; ++i) {
      if (block < first[i] || block >= first[i] + blocks_per_group) continue;
      e.lo[i / 2][i % 2] = nan_min(e.lo[i / 2][i % 2], lo);
      e.hi[i / 2][i % 2] = nan_max(e.hi[i / 2][i % 2], hi);
    }
  }
  return e;
}

__device__ __forceinline__ StatusCode params_status(float lo, float hi, QuantParams p) {
  if (!is_finite(lo) || !is_finite(hi)) return StatusCode::kNonFinite;
  return params_in_range(p) ? StatusCode::kOk : StatusCode::kOutOfRange;
}

__device__ __forceinline__ StatusCode take_raw_codes(const PageRef& page, const LaneValues& x,
                                                     LaneSide* side) {
  StatusCode code = StatusCode::kOk;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    const float value = x[i / 4][i % 4];
    const uint16_t raw = float_to_raw(page.raw_dtype, value);
    if (!is_finite(value)) {
      code = greater(code, StatusCode::kNonFinite);
    } else if (!is_finite(raw_to_float(page.raw_dtype, raw))) {
      code = greater(code, StatusCode::kOutOfRange);
    }
    side->codes[i / 4][i % 4] = raw;
  }
  return code;
}

// One component, given the extrema of the row. The lane's part of the status.
__device__ __forceinline__ StatusCode quantize_lane(const PageRef& page, Component c,
                                                    const LaneValues& x, float lo, float hi,
                                                    LaneSide* side) {
  const TileLayout tile = page.layout->tile(c);
  if (tile.bits == 16) return take_raw_codes(page, x, side);
  const int32_t levels = 1 << tile.bits, groups = page.layout->groups(c);
  const float top = static_cast<float>(levels - 1);
  if (groups == 1) {
    const QuantParams p = minmax_params(lo, hi, levels);
    const CodeMaker maker = make_code_maker(p);
#pragma unroll
    for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
      side->codes[i / 4][i % 4] = biased_code(x[i / 4][i % 4], maker, top) & 255u;
      side->params[i / 4][i % 4 / 2] = p;
    }
    return params_status(lo, hi, p);
  }
  const int32_t blocks = tile.dim_blocks();
  const LaneExtrema e = group_extrema(x, blocks, blocks / groups);
  StatusCode code = StatusCode::kOk;
#pragma unroll
  for (int32_t i = 0; i < 2 * kLaneChunks; ++i) {
    const float group_lo = e.lo[i / 2][i % 2], group_hi = e.hi[i / 2][i % 2];
    const QuantParams p = minmax_params(group_lo, group_hi, levels);
    const CodeMaker maker = make_code_maker(p);
    if (lane_dim(i / 2) < tile.head_dim) {
      code = greater(code, params_status(group_lo, group_hi, p));
    }
#pragma unroll
    for (int32_t j = 2 * (i % 2); j < 2 * (i % 2) + 2; ++j) {
      side->codes[i / 2][j] = biased_code(x[i / 2][j], maker, top) & 255u;
    }
    side->params[i / 2][i % 2] = p;
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
    if (lane_dim(i) >= tile.head_dim) continue;
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

// The greatest status in all lanes.
__device__ __forceinline__ StatusCode quantize_token(const PageRef& page, const TokenInput& input,
                                                     const LaneValues (&x)[2], LaneToken* token) {
  float lo[2], hi[2];
  row_extrema(x, page.layout->head_dim(), lo, hi);
  StatusCode code = input.position < 0 ? StatusCode::kInvalidArgument : StatusCode::kOk;
  if (!is_finite(input.score)) code = StatusCode::kNonFinite;
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

// Between formats; bit for bit where the format does not change.
__device__ __forceinline__ StatusCode convert_side(const PageRef& from, const PageRef& to,
                                                   Component c, LaneSide* side) {
  if (same_side_format(from, to, c)) return StatusCode::kOk;
  LaneValues x[1];
  float lo[1], hi[1];
  dequantize_lane(from, c, *side, x[0]);
  row_extrema(x, to.layout->head_dim(), lo, hi);
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
