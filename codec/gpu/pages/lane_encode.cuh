// SPDX-License-Identifier: Apache-2.0
// Tokens of pages by the lanes of a warp (lane_token.cuh): from coordinates to codes and back, into
// the tile that each lies in and from there. Quantised as codec/format/quantize.h says.
//
// A token owns whole bytes: its neighbours' codes are never read, and nobody else may touch its
// tile where that is cleared. Pages have no records: those of a device never do.
#pragma once

#include "codec/format/fragment_codes.h"
#include "codec/format/page_layout.h"
#include "codec/gpu/pages/lane_token.cuh"

namespace tierkv {

// A page on the device.
struct PageRef {
  uint8_t* bytes;
  const PageLayout* layout;  // checked by the caller: is_page_layout()
  DType raw_dtype;
};

// One component of a token as store_codes() stores it. Raw: eight elements; of 8 bits four pairs of
// bytes; of 4 bits four bytes; of 2 bits two.
struct LaneCodes {
  uint32_t words[4] = {};
  uint32_t params = 0;  // scale, zero point; none of raw elements
};

// ---- quantise ----

template <int32_t kDim>
__device__ __forceinline__ void token_extrema(const LaneValues& x, float* lo, float* hi) {
  *lo = has_dims<kDim>() ? x[0] : INFINITY;
  *hi = has_dims<kDim>() ? x[0] : -INFINITY;
#pragma unroll
  for (int32_t i = 1; i < kLaneDims; ++i) {
    if (!has_dims<kDim>()) continue;
    *lo = nan_min(*lo, x[i]);
    *hi = nan_max(*hi, x[i]);
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < kTokenLanes<kDim>; lanes *= 2) {
    *lo = nan_min(*lo, __shfl_xor_sync(kFullWarp, *lo, lanes));
    *hi = nan_max(*hi, __shfl_xor_sync(kFullWarp, *hi, lanes));
  }
}

// sum_of_squares(): lane l has the partials 8 (l % 4) + i of the chunk of 32 dims l / 4.
template <int32_t kDim>
__device__ __forceinline__ float squared_norm(const LaneValues& x) {
  LaneValues sum;
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) {
    const float square = mul_rn(x[i], x[i]);
    sum[i] = square;
#pragma unroll
    for (int32_t chunk = 1; chunk < kDim / 32; ++chunk) {
      const float before = __shfl_up_sync(kFullWarp, sum[i], 4);
      if (lane_of_token<kDim>() / 4 == chunk) sum[i] = add_rn(before, square);
    }
#pragma unroll
    for (int32_t lanes = 2; lanes > 0; lanes /= 2) {
      sum[i] = add_rn(sum[i], __shfl_xor_sync(kFullWarp, sum[i], lanes));
    }
  }
#pragma unroll
  for (int32_t apart = kLaneDims / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int32_t i = 0; i < apart; ++i) sum[i] = add_rn(sum[i], sum[i + apart]);
  }
  const int32_t first = token_of_lane<kDim>() * kTokenLanes<kDim>;
  return __shfl_sync(kFullWarp, sum[0], first + kDim / 8 - 4);
}

// Raw elements, the lane's own. False in a lane with one that the type does not hold.
__device__ __forceinline__ bool take_raw(const LaneValues& x, DType dtype, LaneCodes* codes) {
  float most = 0;
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; i += 2) {
    codes->words[i / 2] =
        dtype == DType::kFloat16 ? pack_halves(x[i], x[i + 1]) : pack_bfloats(x[i], x[i + 1]);
    if (is_finite(x[i])) most = fmaxf(most, fabsf(x[i]));
    if (is_finite(x[i + 1])) most = fmaxf(most, fabsf(x[i + 1]));
  }
  return is_finite(raw_to_float(dtype, float_to_raw(dtype, most)));
}

// Lanes 2 b + h of a token hold the elements 8 h + r of the dim blocks b, and exchange them: lane
// 2 r + h then has the elements of block i for i. Blocks beyond eight stay where they are; of 64
// dims, which have four, lane 2 r + h has those of block i % 4 and of r + i / 4 * 4. So a store
// writes neighbours in memory.
template <int32_t kDim>
__device__ __forceinline__ void exchange_raw(uint32_t (&words)[4]) {
#pragma unroll
  for (int32_t bit = kDim > 64 ? 2 : 1; bit > 0; --bit) {
    const int32_t lanes = 2 << bit, apart = 1 << (bit - 1);
    const bool is_second = (lane_index() & lanes) != 0;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if ((i & apart) != 0) continue;
      uint32_t &first = words[i], &second = words[i + apart];
      const uint32_t other = __shfl_xor_sync(kFullWarp, is_second ? first : second, lanes);
      (is_second ? first : second) = other;
    }
  }
  const bool is_second = (lane_index() & 2) != 0;
#pragma unroll
  for (int32_t i = 0; i < 4; i += 2) {
    uint32_t &first = words[i], &second = words[i + 1];
    const uint32_t lows = __byte_perm(first, second, 0x5410);
    const uint32_t highs = __byte_perm(first, second, 0x7632);
    const uint32_t others = __shfl_xor_sync(kFullWarp, is_second ? lows : highs, 2);
    const uint32_t low = is_second ? others : lows, high = is_second ? highs : others;
    first = __byte_perm(low, high, 0x5410);
    second = __byte_perm(low, high, 0x7632);
  }
}

// Codes of at most 8 bits. The lanes 2 i and 2 i + 1 hold the halves of a dim block, four lanes the
// two blocks that share bytes of 2-bit codes: they exchange codes, so that each has whole bytes.
__device__ __forceinline__ void take_codes(const LaneValues& x, int32_t bits, QuantParams p,
                                           LaneCodes* codes) {
  const CodeMaker maker = make_code_maker(p);
  const auto top = static_cast<float>((1 << bits) - 1);
  uint32_t code[kLaneDims];
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) code[i] = biased_code(x[i], maker, top);
  const uint32_t first = join_bytes(code[0], code[1], code[2], code[3]);
  const uint32_t last = join_bytes(code[4], code[5], code[6], code[7]);
  const bool is_odd = lane_index() % 2 != 0;
  const uint32_t other = __shfl_xor_sync(kFullWarp, is_odd ? first : last, 1);
  const uint32_t low = is_odd ? other : first, high = is_odd ? last : other;
  const uint32_t shift = bits == 2 ? 2 : 4;
  const uint32_t four = low | high << shift;
  const bool is_second = lane_index() / 2 % 2 != 0;
  const uint32_t others = __shfl_xor_sync(kFullWarp, is_second ? four : four >> 16, 2);
  const uint32_t even = is_second ? others : four, odd = is_second ? four >> 16 : others;
  if (bits == 8) {
    codes->words[0] = __byte_perm(low, high, 0x5140);
    codes->words[1] = __byte_perm(low, high, 0x7362);
  } else {
    codes->words[0] = bits == 4 ? four : even | odd << 4;
  }
  codes->params = p.scale | static_cast<uint32_t>(p.zero_point) << 16;
}

// How a component of a token is written.
struct LaneFormat {
  CodeType type;
  StepRule rule;
  DType raw_dtype;
};

// In coordinates. Formats of the warp's tokens may differ. The status is the same in all lanes of a
// token; where it is not kOk the codes are not defined.
template <int32_t kDim>
__device__ __forceinline__ StatusCode encode_lane(const LaneFormat& format, const LaneValues& x,
                                                  LaneCodes* codes) {
  const bool is_raw = format.type.is_raw(), is_norm = !is_raw && format.rule == StepRule::kNorm;
  const bool is_minmax = !is_raw && !is_norm;
  float not_finite = 0;  // or NaN
#pragma unroll
  for (const float y : x) not_finite = fma_rn(y, 0.0f, not_finite);
  const bool is_sound = !any_of_token<kDim>(!is_finite(not_finite));
  QuantParams p;
  if (__any_sync(kFullWarp, is_norm)) {
    const float squares = squared_norm<kDim>(x);
    if (is_norm) p = norm_params(squares, kDim);
  }
  if (__any_sync(kFullWarp, is_minmax)) {
    float lo, hi;
    token_extrema<kDim>(x, &lo, &hi);
    if (is_minmax) p = minmax_params(lo, hi, format.type.levels());
  }
  *codes = {};
  if (__any_sync(kFullWarp, !is_raw)) take_codes(x, is_raw ? 8 : format.type.bits(), p, codes);
  bool is_held = params_in_range(p) || !is_sound;
  if (is_raw) is_held = take_raw(x, format.raw_dtype, codes);
  if (__any_sync(kFullWarp, is_raw)) {
    LaneCodes exchanged = *codes;
    exchange_raw<kDim>(exchanged.words);
    if (is_raw) *codes = exchanged;
  }
  if (any_of_token<kDim>(!is_held)) return StatusCode::kOutOfRange;
  return is_sound ? StatusCode::kOk : StatusCode::kNonFinite;
}

// ---- tiles ----

// The parameters of a token's component.
__device__ __forceinline__ uint32_t* params_at(const PageRef& page, Component c, int32_t tile,
                                               int32_t in_tile) {
  return reinterpret_cast<uint32_t*>(page.bytes + page.layout->tile_metadata_byte(c, tile) +
                                     token_metadata_byte(0, in_tile));
}

// Where the codes of neighbouring dims lie, the first an even one, all of one half of a dim block.
template <int32_t kDim, CodeType kType>
struct NeighbouringCodes {
  static constexpr TileLayout kTile = {kType, kDim};
  CodePosition first;
  bool is_key;
  int32_t lane_bytes;  // from the word of a lane of the tensor cores to that of the next

  __device__ __forceinline__ NeighbouringCodes(Component c, int32_t in_tile, int32_t dim)
      : first(code_position(kTile, c, in_tile, dim)), is_key(c == Component::kKey) {
    lane_bytes = 16;
    if constexpr (kTile.words_per_lane() % 4 != 0) {
      const int32_t next = code_position(kTile, c, in_tile, is_key ? dim ^ 2 : dim + 1).byte;
      const int32_t lanes = !is_key ? 4 : dim % 4 == 0 ? 1 : -1;
      lane_bytes = (next - first.byte) / lanes;
    }
  }
  // The code of dim `dim + i`.
  __device__ __forceinline__ CodePosition at(int32_t i) const {
    return {first.byte + lane_bytes * (is_key ? i / 2 : 4 * i),
            first.bit + (is_key ? i % 2 * 16 : 0)};
  }
  __device__ __forceinline__ int32_t byte(int32_t i) const { return at(i).byte + at(i).bit / 8; }
};

// Elements after exchange_raw().
template <int32_t kDim>
__device__ __forceinline__ void store_raw(Component c, int32_t in_tile, const LaneCodes& codes,
                                          uint8_t* tile) {
  constexpr int32_t kBlocks = kDim / kDimBlock < 8 ? kDim / kDimBlock : 8;
  const int32_t lane = lane_of_token<kDim>();
  const int32_t dim = lane / 16 * 128 + lane % 2 * 8 + lane / 2 % 8;
  const CodePosition p = code_position({kRawCodes, kDim}, c, in_tile, dim);
  uint8_t* const first = tile + p.byte + p.bit / 8;
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) {
    if (kBlocks == 6 && i >= kBlocks) continue;
    const int32_t four_dims = c == Component::kKey ? 2 * 16 : 16 * 16;
    uint8_t* const to = first + i % kBlocks * 512 + i / kBlocks * four_dims;
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(codes.words[i / 2] >> 16 * (i % 2));
  }
}

template <int32_t kDim, CodeType kType>
__device__ __forceinline__ void store_codes(Component c, int32_t in_tile, const LaneCodes& codes,
                                            uint8_t* tile) {
  constexpr int32_t kBits = kType.bits();
  const int32_t lane = lane_of_token<kDim>();
  const int32_t dim = kBits == 2 ? lane / 4 * 32 + lane % 2 * 4 + lane / 2 % 2 * 2
                                 : lane / 2 * kDimBlock + lane % 2 * 4;
  const NeighbouringCodes<kDim, kType> to(c, in_tile, dim);
#pragma unroll
  for (int32_t i = 0; i < (kBits == 2 ? 2 : 4); ++i) {
    uint8_t* const at = tile + to.byte(i);
    if constexpr (kBits == 8) {
      *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(codes.words[i / 2] >> 16 * (i % 2));
    } else {
      *at = static_cast<uint8_t>(codes.words[0] >> 8 * i);
    }
  }
}

// Stores one component of a token, by the lanes of the token alone.
template <int32_t kDim>
__device__ __forceinline__ void store_lane_codes(const PageRef& page, int32_t slot, Component c,
                                                 const LaneCodes& codes) {
  const PageLayout& layout = *page.layout;
  const int32_t tile = slot / kTileTokens, in_tile = slot % kTileTokens;
  const CodeType type = layout.tile(c).type;
  uint8_t* to = page.bytes + layout.tile_codes_byte(c, tile);
  if (type == kRawCodes) return store_raw<kDim>(c, in_tile, codes, to);
  if (!has_dims<kDim>()) return;
  if (lane_of_token<kDim>() == 0) *params_at(page, c, tile, in_tile) = codes.params;
  if (type == kCodes8) return store_codes<kDim, kCodes8>(c, in_tile, codes, to);
  if (type == kCodes4) return store_codes<kDim, kCodes4>(c, in_tile, codes, to);
  return store_codes<kDim, kCodes2>(c, in_tile, codes, to);
}

// One component of a tile, by the lanes of a token.
template <int32_t kDim>
__device__ __forceinline__ void clear_tile_side(const PageRef& page, int32_t tile, Component c) {
  const PageLayout& layout = *page.layout;
  auto* codes = reinterpret_cast<uint4*>(page.bytes + layout.tile_codes_byte(c, tile));
  auto* metadata = reinterpret_cast<uint4*>(page.bytes + layout.tile_metadata_byte(c, tile));
#pragma unroll 1
  for (int32_t i = lane_of_token<kDim>(); i < layout.tile(c).bytes() / 16; i += kTokenLanes<kDim>) {
    codes[i] = {0, 0, 0, 0};
  }
#pragma unroll 1
  for (int32_t i = lane_of_token<kDim>(); i < tile_metadata_bytes(layout.groups(c)) / 16;
       i += kTokenLanes<kDim>) {
    metadata[i] = {0, 0, 0, 0};
  }
}
template <int32_t kDim>
__device__ __forceinline__ void clear_tile(const PageRef& page, int32_t tile) {
  clear_tile_side<kDim>(page, tile, Component::kKey);
  clear_tile_side<kDim>(page, tile, Component::kValue);
}
template <int32_t kDim>
__device__ __forceinline__ void clear_slot(const PageRef& page, int32_t slot) {
  store_lane_codes<kDim>(page, slot, Component::kKey, {});
  store_lane_codes<kDim>(page, slot, Component::kValue, {});
}

template <int32_t kDim, CodeType kType>
__device__ __forceinline__ void load_codes(const PageRef& page, Component c, int32_t in_tile,
                                           const uint8_t* tile, uint32_t params, LaneValues& x) {
  const float scale = half_to_float(static_cast<uint16_t>(params));
  const float zero_point = half_to_float(static_cast<uint16_t>(params >> 16));
  const NeighbouringCodes<kDim, kType> from(c, in_tile, lane_dim<kDim>());
#pragma unroll
  for (int32_t i = 0; i < kLaneDims; ++i) {
    const uint32_t code = load_code(tile, from.at(i), kType.bits());
    x[i] = kType.is_raw() ? raw_to_float(page.raw_dtype, static_cast<uint16_t>(code))
                          : dequantize(static_cast<int32_t>(code), scale, zero_point);
  }
}

// One component of a token in coordinates; zeros where the token is not there.
template <int32_t kDim>
__device__ __forceinline__ void decode_lane(const PageRef& page, int32_t slot, Component c,
                                            bool is_there, LaneValues& x) {
#pragma unroll
  for (float& y : x) y = 0.0f;
  if (!is_there || !has_dims<kDim>()) return;
  const int32_t tile = slot / kTileTokens, in_tile = slot % kTileTokens;
  const CodeType type = page.layout->tile(c).type;
  const uint8_t* from = page.bytes + page.layout->tile_codes_byte(c, tile);
  if (type == kRawCodes) return load_codes<kDim, kRawCodes>(page, c, in_tile, from, 0, x);
  const uint32_t params = *params_at(page, c, tile, in_tile);
  if (type == kCodes8) return load_codes<kDim, kCodes8>(page, c, in_tile, from, params, x);
  if (type == kCodes4) return load_codes<kDim, kCodes4>(page, c, in_tile, from, params, x);
  return load_codes<kDim, kCodes2>(page, c, in_tile, from, params, x);
}

}  // namespace tierkv
