// SPDX-License-Identifier: Apache-2.0
// Half a tile of one component in the registers of a warp: eight tokens, and the fixed rotation and
// the reflection of their channels with the host's bits.
//
// Lane l holds the token l / 4 of the half. Its channels are 16 b + 8 dh + 2 (l % 4) + par, as
// x[4 b + 2 dh + par]: what the lane holds of a key's fragment (fragment_codes.h). So the words of
// keys are used as they are loaded, those of values after an exchange of rows and columns, and all
// but two steps of the rotation stay in the lane.
#pragma once

#include <cstdint>

#include "codec/format/fragment_codes.h"
#include "codec/format/page_layout.h"
#include "codec/format/rotation.h"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kHalfTokens = kTileTokens / 2;

template <int32_t kDim>
using HalfRows = float[kDim / 4];

template <CodeType kType, int32_t kDim>
inline constexpr int32_t kTileWords = TileLayout{kType, kDim}.words_per_lane();

// Bytes from a row to the next in shared memory: a warp's accesses touch every bank once.
template <int32_t kDim>
inline constexpr int32_t kRowPitch = 2 * kDim + 16;

// ---- words of a tile ----

template <int32_t kWords>
__device__ __forceinline__ void load_tile_words(const uint8_t* codes, uint32_t (&words)[kWords]) {
#pragma unroll
  for (int32_t i = 0; i + 4 <= kWords; i += 4) {
    const auto x = *reinterpret_cast<const uint4*>(codes + lane_word_byte(kWords, i, lane_index()));
    words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
  }
  if constexpr ((kWords & 2) != 0) {
    constexpr int32_t kFirst = kWords & ~3;
    const auto x =
        *reinterpret_cast<const uint2*>(codes + lane_word_byte(kWords, kFirst, lane_index()));
    words[kFirst] = x.x, words[kFirst + 1] = x.y;
  }
  if constexpr ((kWords & 1) != 0) {
    words[kWords - 1] = *reinterpret_cast<const uint32_t*>(
        codes + lane_word_byte(kWords, kWords - 1, lane_index()));
  }
}
template <int32_t kWords>
__device__ __forceinline__ void store_tile_words(const uint32_t (&words)[kWords], uint8_t* codes) {
#pragma unroll
  for (int32_t i = 0; i + 4 <= kWords; i += 4) {
    *reinterpret_cast<uint4*>(codes + lane_word_byte(kWords, i, lane_index())) = {
        words[i], words[i + 1], words[i + 2], words[i + 3]};
  }
  if constexpr ((kWords & 2) != 0) {
    constexpr int32_t kFirst = kWords & ~3;
    *reinterpret_cast<uint2*>(codes + lane_word_byte(kWords, kFirst, lane_index())) = {
        words[kFirst], words[kFirst + 1]};
  }
  if constexpr ((kWords & 1) != 0) {
    *reinterpret_cast<uint32_t*>(codes + lane_word_byte(kWords, kWords - 1, lane_index())) =
        words[kWords - 1];
  }
}

// The words of a value's tile as a key's, or back: rows and columns of every fragment change places
// (code_position()). Its own inverse.
template <CodeType kType, int32_t kWords>
__device__ __forceinline__ void exchange_words(uint32_t (&words)[kWords]) {
#pragma unroll
  for (uint32_t& word : words) word = transpose_8x8(word);
  if constexpr (kType.is_raw()) {
#pragma unroll
    for (int32_t i = 0; i < kWords; i += 4) {
      const uint32_t word = words[i + 1];
      words[i + 1] = words[i + 2];
      words[i + 2] = word;
    }
  }
}

// ---- rotation ----

// What the two channels of x[4 b + 2 dh] and its neighbour are multiplied by, and their part of a
// vector: entry 4 (2 b + dh) + l % 4 of a table in shared memory.
struct alignas(16) ChannelPair {
  float factor[2];
  float vector[2];
};
// What the vector of a table is: added before the rotation, or the normal of a reflection behind
// it.
enum class ChannelVector { kAddend, kNormal };
template <int32_t kDim>
inline constexpr int32_t kTableBytes = kDim / 2 * static_cast<int32_t>(sizeof(ChannelPair));

// The addend without effect: x + 0 would lose the sign of a zero.
inline constexpr float kNoAddend = -0.0f;

// The table of a warp: signs, times the scale of the rotation where `has_scale`; the vector times
// `vector_factor`.
template <int32_t kDim>
__device__ __forceinline__ void fill_channel_table(const Rotation& r, bool has_scale,
                                                   const float* vector, float vector_factor,
                                                   ChannelPair* table) {
#pragma unroll
  for (int32_t first = 0; first < kDim / 2; first += 32) {
    const int32_t dim = 2 * (first + lane_index());
    if (kDim % 64 != 0 && dim >= kDim) continue;
    const float size = r.is_on && has_scale ? hadamard_scale(hadamard_size(kDim, dim)) : 1.0f;
    ChannelPair pair;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      pair.factor[i] = r.with_sign(dim + i, size);
      pair.vector[i] = vector == nullptr ? kNoAddend : vector_factor * vector[dim + i];
    }
    table[first + lane_index()] = pair;
  }
}

// The sums and differences of H, without its scale. Partners are 1 channel apart in the lane, 2 and
// 4 in other lanes, 8 and more in the lane. Adding the product with 1 or -1 rounds once, as an
// addition does.
template <int32_t kDim>
__device__ __forceinline__ void hadamard_sums(HalfRows<kDim>& x) {
  constexpr int32_t kValues = kDim / 4;
#pragma unroll
  for (int32_t i = 0; i < kValues; i += 2) hadamard_pair(x[i], x[i + 1]);
#pragma unroll
  for (int32_t lanes = 1; lanes < 4; lanes *= 2) {
    const float sign = (lane_index() & lanes) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (float& mine : x) {
      mine = fma_rn(mine, sign, __shfl_xor_sync(kFullWarp, mine, lanes));
    }
  }
#pragma unroll
  for (int32_t step = 2; step < kValues; step *= 2) {
#pragma unroll
    for (int32_t i = 0; i < kValues; ++i) {
      if ((i & step) != 0 || hadamard_size(kDim, 4 * (i & ~3)) <= 4 * step) continue;
      hadamard_pair(x[i], x[i + step]);
    }
  }
}

// reflect() of rotation.h by the normals of a table. A lane has the r of 2 (l % 4) + par and all
// chunks: value 8 c + 2 j + par is the channel 32 c + 8 j + r. __syncwarp() makes the compiler load
// the table anew, for which registers would not do.
template <int32_t kDim>
__device__ __forceinline__ void reflect_half(const ChannelPair* table, HalfRows<kDim>& x) {
  constexpr int32_t kChunks = kDim / 32;
  float partial[kChunks][2];  // c, par
  __syncwarp();
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const ChannelPair& pair = table[4 * i + lane_index() % 4];
#pragma unroll
    for (int32_t par = 0; par < 2; ++par) {
      float& sum = partial[i / 4][par];
      const float y = x[2 * i + par];
      sum = i % 4 == 0 ? mul_rn(pair.vector[par], y) : fma_rn(pair.vector[par], y, sum);
    }
  }
#pragma unroll
  for (int32_t par = 0; par < 2; ++par) {
#pragma unroll
    for (int32_t apart = 4; apart > 0; apart /= 2) {
#pragma unroll
      for (int32_t c = 0; c + apart < kChunks; ++c) {
        if (c < apart) partial[c][par] = add_rn(partial[c][par], partial[c + apart][par]);
      }
    }
#pragma unroll
    for (int32_t lanes = 2; lanes > 0; lanes /= 2) {
      float& sum = partial[0][par];
      sum = add_rn(sum, __shfl_xor_sync(kFullWarp, sum, lanes));
    }
  }
  const float product = add_rn(add_rn(partial[0][0], partial[0][1]), 0.0f);
  __syncwarp();
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const ChannelPair& pair = table[4 * i + lane_index() % 4];
#pragma unroll
    for (int32_t par = 0; par < 2; ++par) {
      x[2 * i + par] = reflected(x[2 * i + par], pair.vector[par], product);
    }
  }
  __syncwarp();
}

}  // namespace tierkv
