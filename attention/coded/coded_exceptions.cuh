// SPDX-License-Identifier: Apache-2.0
// Exceptions as one more product, eight of them at a time: A holds the delta of exception e in
// column e and the row it belongs to, B what that row is multiplied by. Lane 4 g + t holds
// exceptions 2t and 2t + 1 of A, and the rows of B that they contract with.
#pragma once

#include "attention/coded/coded_tile.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

inline constexpr int32_t kExceptionStep = 8;

// Small integers as fp16 numbers 1024 + x: two of them are compared in one instruction.
inline constexpr uint32_t kHalfInteger = 0x6400;
__device__ __forceinline__ uint32_t integer_halves(int32_t low, int32_t high) {
  return (kHalfInteger + static_cast<uint32_t>(low)) | (kHalfInteger + static_cast<uint32_t>(high))
                                                           << 16;
}

// Two exceptions of a lane; those that are not there change nothing.
struct ExceptionPair {
  int32_t token[2], dim[2];
  uint32_t deltas;  // two halves, times the unit they are loaded with

  // Not 0 where an index lies outside the block; that exception is left out.
  template <int kHeadDim>
  __device__ __forceinline__ uint32_t load(uint32_t words, int32_t left, int32_t tokens,
                                           float unit = 1 / kDigitScale) {
    uint32_t bad = 0;
    float delta[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int32_t i = 2 * static_cast<int32_t>(fresh_lane() % 4) + j;
      uint32_t word = 0;
      if (i < left) word = load_shared(words + 4 * i);
      if (static_cast<int32_t>(word & 0xffffu) >= tokens * kSliceDims ||
          static_cast<int32_t>(word % kSliceDims) >= kHeadDim) {
        bad = 1, word = 0;
      }
      token[j] = static_cast<int32_t>(word / kSliceDims % (0x10000u / kSliceDims));
      dim[j] = static_cast<int32_t>(word % kSliceDims);
      delta[j] = static_cast<float>(static_cast<int16_t>(word >> 16)) * unit;
    }
    deltas = pack_halves(delta[0], delta[1]);
    return bad;
  }

  // The rows, token or dim, of the two exceptions less this lane's own, as operand() takes them.
  __device__ __forceinline__ static uint32_t row_halves(const int32_t (&rows)[2]) {
    const auto g = static_cast<int32_t>(fresh_lane() / 4);
    return integer_halves(rows[0] + 8 - g, rows[1] + 8 - g);
  }
  // The A operand whose rows are first_row + 0..15.
  __device__ __forceinline__ void operand(uint32_t rows, int32_t first_row,
                                          uint32_t (&a)[2]) const {
    a[0] = deltas & equal_halves(rows, integer_halves(first_row + 8, first_row + 8));
    a[1] = deltas & equal_halves(rows, integer_halves(first_row + 16, first_row + 16));
  }
};

// The rows of a B operand that a lane picks for exception (lane / 4): one that is a low half of
// the operand, and one that is a high half.
struct PickedRows {
  uint32_t halves;
  // Row g of A is that of exception g; the columns of this lane are rows 2t, 2t + 1 (+ 8) of B.
  __device__ __forceinline__ PickedRows(int32_t even, int32_t odd) {
    const int32_t own = 8 - 2 * static_cast<int32_t>(fresh_lane() % 4);
    halves = integer_halves(even + own, odd + own);
  }
  // Part i of the A operand: `weights` in the places of the rows.
  __device__ __forceinline__ void operand(int i, uint32_t weights, uint32_t (&a)[4]) const {
    const int32_t first = 16 * i + 8;
    a[0] = weights & equal_halves(halves, integer_halves(first, first + 1));
    a[2] = weights & equal_halves(halves, integer_halves(first + 8, first + 9));
    a[1] = a[3] = 0;
  }
};

// The rows of eight exceptions in B operand `b`, in order, as the B operand that their deltas meet.
// A product with ones in the places of those rows picks them out. row: of exception (lane / 4);
// it may lie behind the operand.
template <int kParts>
__device__ __forceinline__ uint32_t pick_rows(int32_t row, const uint32_t (&b)[kParts][2]) {
  const PickedRows rows(row, row);
  float picked[4] = {};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    uint32_t a[4];
    rows.operand(i, kOneHalves, a);
    mma_m16n8k16(picked, a, b[i][0], b[i][1]);
  }
  return transpose_8x8(pack_halves(picked[0], picked[1]));
}

// The word of exception (lane / 4) of those at `words`; 0 where there is none.
__device__ __forceinline__ uint32_t exception_of_row(uint32_t words, int32_t left) {
  const uint32_t g = fresh_lane() / 4;
  return static_cast<int32_t>(g) < left ? load_shared(words + g * 4) & 0xffffu : 0;
}

// The B operand of the values: p of this lane's column at the tokens that the exceptions change.
// words: of this step.
__device__ __forceinline__ uint32_t exception_weights(uint32_t words, int32_t left,
                                                      const uint32_t (&p)[kItemTiles][2]) {
  const uint32_t token = exception_of_row(words, left) / kSliceDims;
  return pick_rows(min(static_cast<int32_t>(token), kBlockTokens), p);
}

}  // namespace tierkv
