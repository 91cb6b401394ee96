// SPDX-License-Identifier: Apache-2.0
// Checksums of a container's chunks in device memory: XXH3 of 64 bits, as xxh3() of
// codec/file/container_format.h finds it. Bound: memory.
//
// XXH3 adds up stripes of 64 bytes in 8 lanes of 64 bits, and scrambles the lanes behind every 16
// stripes. What a stripe adds depends on its bytes alone. So one kernel sums blocks of 16 stripes,
// a warp each, and then a warp a chunk goes through the sums of its blocks.
#pragma once

#include <cstdint>

#include "codec/format/xxh3_keys.h"
#include "gpu/pdl.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kChecksumBlock = 1024, kChecksumStripe = 64, kChecksumLanes = 8;
inline constexpr int32_t kChecksumWarps = 8;  // of a CTA that sums

struct ChecksumChunk {
  int64_t first = 0, bytes = 0;  // multiples of 16
  int64_t first_block = 0;       // where the sums of its blocks lie

  TKV_HD bool is_short() const { return bytes <= kXxh3ShortBytes; }
  // There is one more, which may be empty.
  TKV_HD int64_t full_blocks() const { return (bytes - 1) / kChecksumBlock; }
};

struct ChecksumCall {
  const uint8_t* bytes = nullptr;         // aligned to 16
  const ChecksumChunk* chunks = nullptr;  // [count]
  uint64_t* sums = nullptr;               // [blocks][kChecksumLanes]
  uint64_t* checksums = nullptr;          // [count]; 0 of a chunk that is_short()
  Xxh3Keys keys;
};

__device__ __forceinline__ uint64_t multiply_parts(uint64_t x) {
  return (x & 0xffffffffu) * (x >> 32);
}

// A CTA takes blocks of the chunk blockIdx.y. A lane takes 16 bytes of two stripes: lanes i and i +
// 1 of the sum, i twice the lane's place in a stripe.
inline __global__ void __launch_bounds__(32 * kChecksumWarps)
    sum_blocks_kernel(const __grid_constant__ ChecksumCall c) {
  wait_for_previous_kernel();
  const ChecksumChunk chunk = c.chunks[blockIdx.y];
  if (chunk.is_short()) return;
  const int32_t lane = lane_index(), warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t stripe = lane / 4, i = 2 * (lane % 4);
  uint64_t keys[2][2];
  for (int32_t half = 0; half < 2; ++half) {
    for (int32_t j = 0; j < 2; ++j) keys[half][j] = c.keys.stripes[stripe + 8 * half + i + j];
  }
  const int64_t full = chunk.full_blocks();
  const auto step = static_cast<int64_t>(gridDim.x) * kChecksumWarps;
  for (int64_t b = static_cast<int64_t>(blockIdx.x) * kChecksumWarps + warp; b <= full; b += step) {
    const int64_t at = b * kChecksumBlock;
    const auto stripes = static_cast<int32_t>(b < full ? kChecksumBlock / kChecksumStripe
                                                       : (chunk.bytes - 1 - at) / kChecksumStripe);
    uint64_t sum[2] = {0, 0};
    for (int32_t half = 0; half < 2; ++half) {
      if (stripe + 8 * half >= stripes) continue;
      const uint4 x =
          *reinterpret_cast<const uint4*>(c.bytes + chunk.first + at + 512 * half + 16 * lane);
      const uint64_t low = x.x | static_cast<uint64_t>(x.y) << 32;
      const uint64_t high = x.z | static_cast<uint64_t>(x.w) << 32;
      sum[0] += multiply_parts(low ^ keys[half][0]) + high;
      sum[1] += multiply_parts(high ^ keys[half][1]) + low;
    }
    for (int32_t mask = 4; mask < 32; mask *= 2) {
      for (uint64_t& x : sum) x += __shfl_xor_sync(kFullWarp, x, mask);
    }
    uint64_t* const to = c.sums + (chunk.first_block + b) * kChecksumLanes + i;
    if (stripe == 0) to[0] = sum[0], to[1] = sum[1];
  }
}

// The product's halves, exclusive-ored.
__device__ __forceinline__ uint64_t fold_product(uint64_t a, uint64_t b) {
  return (a * b) ^ __umul64hi(a, b);
}

// A CTA of one warp per chunk. Four lanes keep each lane of the sum, with equal values.
inline __global__ void __launch_bounds__(32)
    chunk_checksum_kernel(const __grid_constant__ ChecksumCall c) {
  wait_for_previous_kernel();
  constexpr uint64_t kStart[kChecksumLanes] = {
      0xc2b2ae3du,           0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
      0x85ebca77c2b2ae63ull, 0x85ebca77u,           0x27d4eb2f165667c5ull, 0x9e3779b1u};
  // Sums are loaded while those before them are scrambled, which takes about as long.
  constexpr int32_t kOfLoad = 32 / kChecksumLanes, kLoads = 8, kAtOnce = kLoads * kOfLoad;
  const ChecksumChunk chunk = c.chunks[blockIdx.x];
  const int32_t lane = lane_index(), i = lane % kChecksumLanes;
  if (chunk.is_short()) {
    if (lane == 0) c.checksums[blockIdx.x] = 0;
    return;
  }
  const int64_t full = chunk.full_blocks();
  const uint64_t* sums = c.sums + chunk.first_block * kChecksumLanes;
  uint64_t next[kLoads];
  const auto load = [&](int64_t b) {
#pragma unroll
    for (int32_t j = 0; j < kLoads; ++j) {
      const int64_t block = b + j * kOfLoad;
      next[j] = block + lane / kChecksumLanes <= full ? sums[block * kChecksumLanes + lane] : 0;
    }
  };
  uint64_t x = 0;
  for (int32_t j = 0; j < kChecksumLanes; ++j) x = i == j ? kStart[j] : x;
  const uint64_t scramble = c.keys.stripes[16 + i];
  load(0);
  for (int64_t b = 0; b <= full; b += kAtOnce) {
    uint64_t now[kLoads];
#pragma unroll
    for (int32_t j = 0; j < kLoads; ++j) now[j] = next[j];
    load(b + kAtOnce);
#pragma unroll
    for (int32_t j = 0; j < kAtOnce; ++j) {
      x += __shfl_sync(kFullWarp, now[j / kOfLoad], j % kOfLoad * kChecksumLanes + i);
      if (b + j < full) x = (x ^ x >> 47 ^ scramble) * 0x9e3779b1u;
    }
  }
  // The last 64 bytes once more, whatever has been summed of them.
  const uint64_t last = *reinterpret_cast<const uint64_t*>(c.bytes + chunk.first + chunk.bytes -
                                                           kChecksumStripe + 8 * i);
  x += multiply_parts(last ^ c.keys.last[i]) + __shfl_xor_sync(kFullWarp, last, 1);
  x ^= c.keys.merge[i];
  uint64_t hash = fold_product(x, __shfl_xor_sync(kFullWarp, x, 1));
  hash += __shfl_xor_sync(kFullWarp, hash, 2);
  hash += __shfl_xor_sync(kFullWarp, hash, 4);
  hash += static_cast<uint64_t>(chunk.bytes) * 0x9e3779b185ebca87ull;
  hash = (hash ^ hash >> 37) * 0x165667919e3779f9ull;
  if (lane == 0) c.checksums[blockIdx.x] = hash ^ hash >> 32;
}

}  // namespace tierkv
