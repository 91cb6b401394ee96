// Where the elements of a matrix lie as the B operand of mma.m16n8k16, split into 16-bit parts.
//
// A row's matrix is [head_dim / 16 steps][head_dim / 8 tiles][parts][32 lanes][2 words]. Steps are
// 16 rows of the matrix (contracted), tiles 8 columns. Which rows and columns is free as long as A
// and the results agree, and is chosen so that a lane reads 16 bytes of a vector and writes 16
// bytes of its image: lane 4g + t has elements 32 s + 8 t .. + 7 of the steps 2s and 2s + 1, and
// columns 16 m + 4 t .. + 3 of the tiles 2m and 2m + 1.
#pragma once

#include <cstdint>

#include "tierkv/half.h"
#include "tierkv/layout.h"

namespace tierkv {

// Parts of a value: fp16 (hi + lo) carries 22 bits, three of bf16 24. A product with 16-bit input
// is then exact but for the sum.
TKV_HD constexpr int32_t basis_parts(bool bfloat16) {
  return bfloat16 ? 3 : 2;
}

// The row of the matrix in a half (0, 1) of a word (0, 1) of a lane.
TKV_HD constexpr int32_t part_row(int32_t step, int32_t lane, int32_t word, int32_t half) {
  return 32 * (step / 2) + 8 * (lane % 4) + 4 * (step % 2) + 2 * word + half;
}
TKV_HD constexpr int32_t part_column(int32_t tile, int32_t lane) {
  const int32_t n = lane / 4;
  return 16 * (tile / 2) + 4 * (n / 2) + 2 * (tile % 2) + n % 2;
}

}  // namespace tierkv
