// Raw tiles of a block in its slot, as operands of mma.m16n8k16: masks and shifts, no table.
//
// A code above its block's base is the fp16 subnormal code * 2^-24, exactly; the base is added to
// the sums, times the sum of what codes are multiplied by.
#pragma once

#include "attention/tiers/page_tile.cuh"

namespace tierkv {

template <int32_t kBits, int32_t kDims>
struct RawWords : LaneWords<kBits, kDims> {
  // The A fragment of dim block f.
  template <Component kComponent>
  __device__ __forceinline__ void digits(int32_t f, uint32_t (&a)[4]) const {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = i % 2, col = i / 2;
      const int32_t token = kComponent == Component::kKey ? row : col;
      const int32_t dim = kComponent == Component::kKey ? col : row;
      a[i] = this->pair(f, token, dim) >> code_shift(kBits, 16 * f + 8 * dim);
    }
  }
};

}  // namespace tierkv
