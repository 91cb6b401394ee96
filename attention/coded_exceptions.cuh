// Exceptions as one more product, eight of them at a time: A holds the delta of exception e in
// column e and the row it belongs to, B what that row is multiplied by. Lane 4 g + t holds
// exceptions 2t and 2t + 1 of A, and the rows of B that they contract with.
#pragma once

#include "attention/coded_tile.cuh"

namespace tierkv {

inline constexpr int32_t kExceptionStep = 8;

// Two exceptions of a lane; those that are not there change nothing.
struct ExceptionPair {
  int32_t token[2], dim[2];
  uint32_t deltas;  // two halves, times 2^-18

  // Not 0 where an index lies outside the block; that exception is left out.
  template <int kHeadDim>
  __device__ __forceinline__ uint32_t load(uint32_t words, int32_t left, int32_t tokens) {
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
      delta[j] = static_cast<float>(static_cast<int16_t>(word >> 16)) / kDigitScale;
    }
    deltas = pack_halves(delta[0], delta[1]);
    return bad;
  }

  // The A operand whose rows are first_row + 0..15 of `rows`: token or dim.
  __device__ __forceinline__ void operand(const int32_t (&rows)[2], int32_t first_row,
                                          uint32_t (&a)[2]) const {
    const int32_t g = static_cast<int32_t>(fresh_lane() / 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int32_t row = first_row + 8 * r;
      const uint32_t low = rows[0] - g == row ? deltas & 0xffffu : 0u;
      const uint32_t high = rows[1] - g == row ? deltas & 0xffff0000u : 0u;
      a[r] = low | high;
    }
  }
};

// The B operand of the keys: q of this lane's column, from `query` on, at the channels that the
// exceptions change.
__device__ __forceinline__ uint32_t exception_queries(const ExceptionPair& pair,
                                                      const uint16_t* query) {
  return query[pair.dim[0]] | static_cast<uint32_t>(query[pair.dim[1]]) << 16;
}

// The B operand of the values: p of this lane's column at the tokens that the exceptions change.
__device__ __forceinline__ uint32_t exception_weights(const ExceptionPair& pair,
                                                      const uint32_t (&p)[kItemTiles][2]) {
  const auto column = static_cast<int32_t>(fresh_lane() / 4);
  uint32_t half[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    // p of (token, column) lies in lane 4 column + (token % 8) / 2, register token / 8.
    const int32_t token = pair.token[j], lane = 4 * column + token % 8 / 2;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 2 * kItemTiles; ++i) {
      const uint32_t x = __shfl_sync(kFullWarp, p[i / 2][i % 2], lane);
      found = i == token / 8 ? x : found;
    }
    half[j] = token % 2 ? found >> 16 : found & 0xffffu;
  }
  return half[0] | half[1] << 16;
}

}  // namespace tierkv
