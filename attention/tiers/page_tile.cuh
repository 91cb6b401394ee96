// SPDX-License-Identifier: Apache-2.0
// A tile of codes in shared memory, as operands of mma.m16n8k16: loading a lane's words and
// unpacking a fragment.
//
// Codes become fp16 subnormals, code * 2^-24 * 2^code_shift: the low ten bits of a half with a zero
// exponent are linear and tensor cores take subnormals at full speed, so unpacking is one mask (and
// a shift for the odd bytes), exact. The factors depend on dims alone; they fold into q (keys) and
// into the output rows (values). See warp_attention.cuh.
#pragma once

#include "codec/format/page_layout.h"
#include "gpu/barrier.cuh"
#include "gpu/math.cuh"

namespace tierkv {

inline constexpr CodeType kNoType = CodeType::uniform(0);  // before the first tokens of a row

// What the codes of an unpacked fragment must be multiplied by, as a power of two:
// 2^unpacked_exponent(...).
__device__ constexpr int32_t unpacked_exponent(CodeType type, int32_t dim) {
  return type.is_raw() ? 0 : 24 - code_shift(type.bits(), dim);
}

// The words of one lane of a tile.
template <CodeType kType, int32_t kHeadDim>
struct LaneWords {
  static constexpr int32_t kBits = kType.bits();
  static constexpr TileLayout kTile{kType, kHeadDim};
  static constexpr int32_t kCount = kTile.words_per_lane();
  uint32_t word[kCount];

  __device__ __forceinline__ void load(const uint8_t* tile, int32_t lane) {
#pragma unroll
    for (int32_t a = 0; a < lane_accesses(kCount); ++a) {
      const int32_t words = access_words(kCount, a);
      const int32_t first = words == 1 ? kCount - 1 : 4 * a;
      const uint8_t* from = tile + lane_word_byte(kCount, first, lane);
      if (words == 4) {
        const auto x = load_arrived<uint4>(from);
        word[first] = x.x, word[first + 1] = x.y, word[first + 2] = x.z, word[first + 3] = x.w;
      } else if (words == 2) {
        const auto x = load_arrived<uint2>(from);
        word[first] = x.x, word[first + 1] = x.y;
      } else {
        word[first] = load_arrived<uint32_t>(from);
      }
    }
  }

  // Two codes of a block (dims 16 * block ..): of the token half and dim half named, as halves.
  __device__ __forceinline__ uint32_t pair(int32_t block, int32_t token_half,
                                           int32_t dim_half) const {
    if constexpr (kBits == 8) {
      const uint32_t w = word[2 * block + token_half];
      return dim_half ? odd_bytes(w) : w & 0x00ff00ffu;
    } else {
      const uint32_t w = word[kBits == 4 ? block : block / 2];
      const uint32_t mask = ((1u << kBits) - 1) * 0x00010001u
                            << code_shift(kBits, 16 * block + 8 * dim_half);
      return (token_half ? w >> 8 : w) & mask;
    }
  }

  // The A fragment of a block: rows are tokens for keys, dims for values.
  template <Component kComponent>
  __device__ __forceinline__ void fragment(int32_t block, uint32_t (&a)[4]) const {
    if constexpr (kType.is_raw()) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) a[i] = word[4 * block + i];
    } else {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t row_half = i & 1, col_half = i >> 1;
        a[i] = kComponent == Component::kKey ? pair(block, row_half, col_half)
                                             : pair(block, col_half, row_half);
      }
    }
  }
};

// Scale and zero point of tokens g and g + 8 of a tile, g = lane / 4.
struct TileMetadata {
  float scale[2];
  float zero_point[2];

  __device__ __forceinline__ void load(const uint8_t* metadata, int32_t lane) {
    const auto x = load_arrived<uint2>(metadata + token_metadata_byte(0, lane / 4));
    const float2 low = unpack_halves(x.x), high = unpack_halves(x.y);
    scale[0] = low.x, zero_point[0] = low.y;
    scale[1] = high.x, zero_point[1] = high.y;
  }
  __device__ __forceinline__ void set(float s, float z) {
    scale[0] = scale[1] = s;
    zero_point[0] = zero_point[1] = z;
  }
};

}  // namespace tierkv
