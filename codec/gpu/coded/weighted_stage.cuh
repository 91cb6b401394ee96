// SPDX-License-Identifier: Apache-2.0
// A block's tokens in shared memory, a tile at a time: the rows as they are, the exponents of the
// tokens, what keys are divided by.
#pragma once

#include "codec/gpu/coded/weighted_codes.cuh"
#include "gpu/copies.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// What a warp has in shared memory of a block.
struct EncodeWarp {
  WeightedBlockJob job;
  int8_t exponents[kBlockTokens];
  float inverse_factors[kBlockTokens];  // 1 / f(e)
};
inline constexpr int32_t kEncodeWarpBytes = (sizeof(EncodeWarp) + 15) / 16 * 16;

// Key channels 2 i and 2 i + 1.
struct alignas(16) KeyChannels {
  float mean[2], inverse[2];
};

TKV_HD constexpr int32_t stage_pitch(int32_t head_dim) {
  return 2 * head_dim + 16;
}
TKV_HD constexpr int32_t stage_bytes(int32_t head_dim) {
  return kTileTokens * stage_pitch(head_dim);
}
TKV_HD constexpr int32_t key_channel_bytes(int32_t head_dim) {
  return head_dim / 2 * static_cast<int32_t>(sizeof(KeyChannels));
}
// Bytes of a warp that makes codes.
TKV_HD constexpr int32_t tile_warp_bytes(int32_t head_dim) {
  return kEncodeWarpBytes + key_channel_bytes(head_dim) + stage_bytes(head_dim);
}
struct TileMemory {
  EncodeWarp* warp;
  KeyChannels* channels;
  uint8_t* stage;

  // of: tile_warp_bytes(), 16-byte aligned.
  __device__ __forceinline__ TileMemory(uint8_t* of, int32_t head_dim)
      : warp(reinterpret_cast<EncodeWarp*>(of)),
        channels(reinterpret_cast<KeyChannels*>(of + kEncodeWarpBytes)),
        stage(of + kEncodeWarpBytes + key_channel_bytes(head_dim)) {}
};

template <int32_t kDims>
struct SlicesOf {
  static constexpr int32_t kCount = (kDims + kSliceDims - 1) / kSliceDims;
  static constexpr int32_t kSlice = kCount == 1 ? kDims : kSliceDims;
  static constexpr int32_t kBlocks = kSlice / kDimBlock;
};

// A tile's rows; behind the block's last token, that token's again. The next tile's are asked for.
template <int32_t kDims>
__device__ __forceinline__ void stage_tile(const WeightedBlockJob& job, int32_t tile,
                                           uint8_t* stage) {
  const uint16_t* const x = job.x;
  const int64_t stride = job.token_stride;
  const int32_t last = job.tokens - 1, first = tile * kTileTokens, lane = lane_index();
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0 && stride % 8 == 0) {
    constexpr int32_t kPieces = kDims / 8;  // of a row
#pragma unroll
    for (int32_t i = 0; i < kTileTokens * kPieces / kWarpLanes; ++i) {
      const int32_t piece = i * kWarpLanes + lane;
      const int32_t row = piece / kPieces, column = piece % kPieces;
      copy_async_16(stage + row * stage_pitch(kDims) + 16 * column,
                    x + min(first + row, last) * stride + 8 * column, true);
    }
    const int32_t next = first + kTileTokens + lane;
    if (lane < kTileTokens && next <= last) {
      prefetch_bytes(reinterpret_cast<const uint8_t*>(x + next * stride), 2 * kDims);
    }
  } else {
    for (int32_t row = 0; row < kTileTokens; ++row) {
#pragma unroll
      for (int32_t k = 0; k < kDims; k += kWarpLanes) {
        reinterpret_cast<uint16_t*>(stage + row * stage_pitch(kDims))[k + lane] =
            __ldg(x + min(first + row, last) * stride + k + lane);
      }
    }
  }
  wait_copies();
  __syncwarp();
}

__device__ __forceinline__ float2 unpack_elements(bool is_bfloat16, uint32_t word) {
  return is_bfloat16 ? unpack_bfloats(word) : unpack_halves(word);
}

// Exponents of the values of a staged tile, whose exponents are those of importance so far; those
// of coded tokens are decided. Half a warp takes a token: the partial sums 2 (l % 16) and 2 (l %
// 16) + 1 of sum_of_squares().
template <int32_t kDims>
__device__ __forceinline__ void find_value_exponents(const WeightedBlockJob& job, int32_t tile,
                                                     const uint8_t* stage, int8_t* exponents,
                                                     WeightedFaults& faults) {
  const bool is_bfloat16 = job.dtype == DType::kBFloat16;
  const int32_t half = lane_index() / 16, column = lane_index() % 16;
  const auto row_of = [&](int32_t j) { return j % 4 + j / 4 * 8 + half * 4; };
  float mine = 0;
  const int32_t rounds = (tile + 1) * kTileTokens <= job.coded ? 0 : kTileTokens / 2;
#pragma unroll 2
  for (int32_t j = 0; j < rounds; ++j) {
    const uint8_t* words = stage + row_of(j) * stage_pitch(kDims) + 4 * column;
    float sum[2] = {};
#pragma unroll
    for (int32_t k = 0; k < kDims / kWarpLanes; ++k) {
      const float2 y =
          unpack_elements(is_bfloat16, *reinterpret_cast<const uint32_t*>(words + 64 * k));
      sum[0] = add_rn(sum[0], mul_rn(y.x, y.x));
      sum[1] = add_rn(sum[1], mul_rn(y.y, y.y));
    }
#pragma unroll
    for (int32_t lanes = 8; lanes > 0; lanes /= 2) {
      sum[0] = add_rn(sum[0], __shfl_xor_sync(kFullWarp, sum[0], lanes));
      sum[1] = add_rn(sum[1], __shfl_xor_sync(kFullWarp, sum[1], lanes));
    }
    const float total = add_rn(sum[0], sum[1]);
    const int32_t t = tile * kTileTokens + row_of(j);
    if (!is_finite(total) && t >= job.coded && t < job.tokens) {
      for (int32_t k = 0; k < kDims / kWarpLanes; ++k) {
        const float2 y =
            unpack_elements(is_bfloat16, *reinterpret_cast<const uint32_t*>(words + 64 * k));
        faults.non_finite |= !is_finite(y.x) || !is_finite(y.y);
      }
    }
    if (column == j) mine = total;
  }
  const int32_t t = tile * kTileTokens + row_of(column);
  if (column >= kTileTokens / 2 || t >= job.tokens) return;
  const bool known = job.decided[t][2] != 0;
  const int32_t e =
      known ? static_cast<int8_t>(job.decided[t][1]) : value_exponent(mine, kDims, exponents[t]);
  exponents[t] = static_cast<int8_t>(e);
}

// Means and inverse scales of a key's channels.
template <int32_t kDims>
__device__ __forceinline__ void fill_key_channels(const WeightedBlockJob& job,
                                                  KeyChannels* channels) {
#pragma unroll
  for (int32_t i = lane_index(); i < kDims / 2; i += kWarpLanes) {
    KeyChannels c;
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      const int32_t d = 2 * i + h;
      c.mean[h] = job.means == nullptr ? 0.0f : half_to_float(__ldg(job.means + d));
      c.inverse[h] = QuickCode::inverse_of(__ldg(job.scales + d));
    }
    channels[i] = c;
  }
}

}  // namespace tierkv
