// SPDX-License-Identifier: Apache-2.0
// A tile of codes out of streams of pairs: what nearly all weighted blocks are.
#pragma once

#include "codec/format/weighted_block_format.h"
#include "codec/gpu/coded/coded_decode.cuh"

namespace tierkv {

// Two codes from an entry of kPair, 16 bits each.
struct PairBase {
  uint32_t both;
  // Neither sum carries: 0x8000 keeps the low one positive until it is taken off again.
  __device__ __forceinline__ explicit PairBase(int32_t base)
      : both(static_cast<uint32_t>(base) * 0x10001u + 0x8000u) {}
  __device__ __forceinline__ uint32_t codes(uint32_t entry) const {
    return ((entry >> 6 & 0x1f001fu) + both) ^ 0x8000u;
  }
};

// decode_tile() of a slice of kPair.
template <bool kKey, class BaseOf>
__device__ __forceinline__ void decode_pair_tile(TableReader& reader, int32_t dims,
                                                 const BaseOf& base_of, int16_t* codes) {
  constexpr auto kComponent = kKey ? Component::kKey : Component::kValue;
  const int32_t blocks = dim_block_count(dims);
  const PairPosition lane = pair_position(kComponent, 0, 0, 0, lane_index());
  for (int32_t i = 0; i < blocks; ++i) {
    const int32_t f = dim_block_at(weighted_order(kComponent), blocks, i);
    const PairBase base(base_of(f));
    int16_t* const to = codes + lane.token * kTileStride + lane.dim + f * kDimBlock;
    uint32_t e[kPairsPerFragment];
    if (reader.streams == 1) {
      reader.stream[0].step(reader.table, &e[0], &e[1]);
      reader.stream[0].step(reader.table, &e[2], &e[3]);
    } else {
      reader.stream[0].step(reader.table, &e[0], &e[2]);
      reader.stream[1].step(reader.table, &e[1], &e[3]);
    }
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition at = pair_position(kComponent, 0, 0, r, 0);
      const uint32_t pair = base.codes(e[r]);
      int16_t* const first = to + at.token * kTileStride + at.dim;
      if constexpr (kKey) {
        *reinterpret_cast<uint32_t*>(first) = pair;
      } else {
        first[0] = static_cast<int16_t>(pair);
        first[kTileStride] = static_cast<int16_t>(pair >> 16);
      }
    }
  }
}

}  // namespace tierkv
