// SPDX-License-Identifier: Apache-2.0
// What a warp does with raw blocks among coded ones. w: a CodedWarp.
//
// They are rare: their code is short, not fast, and reads them from memory.
#pragma once

#include "attention/coded/coded_tile.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// Scores of the keys of a raw block, added to s.
template <int kSlice, class Worker>
__device__ __forceinline__ void score_raw(Worker& w, const OpenBlock& b, const RawBlock& raw,
                                          float (&s)[kItemTiles][4]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
#pragma unroll 1
  for (int o = 0; o < kItemTiles; ++o) {
    float tile[4];
    Worker::begin_tile(s, tile);
#pragma unroll 1
    for (int f = 0; f < kBlocks && o < tile_count(b.tokens); ++f) {
      uint32_t a[4], q[2] = {0, 0};
#pragma unroll
      for (int z = 0; z < kBlocks; ++z) {
        const uint32_t(&of_slice)[2] = w.state.q[kSlice * kBlocks + z];
        if (z == f) q[0] = of_slice[0], q[1] = of_slice[1];
      }
      raw_fragment(raw, Worker::kSliceDim, Component::kKey, o, f, a);
      mma_m16n8k16(tile, a, q[0], q[1]);
    }
    push_tile(s, tile);
  }
}
// Outputs of the values of one; uses p up.
template <int kSlice, class Worker>
__device__ __forceinline__ void add_raw(Worker& w, const OpenBlock& b, const RawBlock& raw,
                                        uint32_t (&p)[kItemTiles][2]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
#pragma unroll 1
  for (int o = 0; o < tile_count(b.tokens); ++o) {
#pragma unroll 1
    for (int f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      float sum[4] = {};
      raw_fragment(raw, Worker::kSliceDim, Component::kValue, o, f, a);
      mma_m16n8k16(sum, a, p[0][0], p[0][1]);
#pragma unroll
      for (int z = 0; z < kBlocks; ++z) {
        float(&out)[4] = w.state.out[kSlice * kBlocks + z];
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] += z == f ? sum[j] : 0.0f;
      }
    }
    shift_tiles(p);
  }
}

}  // namespace tierkv
