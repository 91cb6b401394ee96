// SPDX-License-Identifier: Apache-2.0
// What the columns of a row see of its window: of several queries each sees the tokens up to its
// own.
#pragma once

#include "attention/coded/coded_tile.cuh"

namespace tierkv {

// Of columns 2t and 2t + 1 of the pass.
struct ColumnSight {
  int32_t tokens[2];  // of the window, from the oldest on

  __device__ __forceinline__ ColumnSight(const CodedKernelParams& params, int32_t window_tokens) {
#pragma unroll
    for (int32_t c = 0; c < 2; ++c) {
      const int32_t column = 2 * static_cast<int32_t>(threadIdx.x % 4) + c;
      tokens[c] = window_tokens - params.queries.hidden(0, params.first_column + column);
    }
  }

  // Scores of 64 tokens from `first` of the window on.
  __device__ __forceinline__ void hide(int32_t first, float (&s)[kItemTiles][4]) const {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row + 16 * o + 8 * (i / 2) >= tokens[i % 2]) s[o][i] = -INFINITY;
      }
    }
  }
};

}  // namespace tierkv
