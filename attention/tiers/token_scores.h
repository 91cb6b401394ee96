// SPDX-License-Identifier: Apache-2.0
// The scores that a launch of the decode kernel leaves behind, from which, once every head's
// log-sum-exp is known, the probabilities of its tokens follow: significance needs the largest over
// the heads of a group.
//
// Of each row of the launch and each of its tiles (numbered as in attention/work/work.h):
//   references  float [columns]                     log2 units; what the scores are relative to
//   codes       uint16_t [8][columns / 2][2][2]     score = kLeastScore + code / 2^10
// with the row's columns rounded up to an even number. Codes lie as the kernel's lanes hold them:
// by token % 8, pair of columns, token / 8 and column of the pair. A code of 16 bits spans 64
// powers of two in steps of 2^-10, so a probability is right to 2^-11.5 of itself, from the largest
// that a score can stand for (online softmax: a weight times the scale of its values stays below
// 2^14, so a score below 38) down to 2^-26; what lies below is 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/core/columns.h"
#include "attention/core/online_softmax.h"
#include "tierkv/page.h"

namespace tierkv {

inline constexpr float kLeastScore = -26.0f;
inline constexpr float kScoreSteps = 1024.0f;  // of a power of two
inline constexpr uint32_t kNoProbability = 0;

// The rounded number of steps above kLeastScore, as an integer: negative below it, for -infinity
// too. The fma rounds to a multiple of the least positive float, whose bits count these multiples,
// so that no conversion is needed.
TKV_HD int32_t score_steps(float score) {
  constexpr float kUnit = 0x1p-149f;
  return static_cast<int32_t>(
      float_bits(std::fma(score, kScoreSteps * kUnit, -kLeastScore * kScoreSteps * kUnit)));
}
TKV_HD uint32_t score_code(float score) {
  const int32_t steps = score_steps(score);
  return steps < 0 ? 0u : steps > 0xffff ? 0xffffu : static_cast<uint32_t>(steps);
}
// Of two columns; the first in the low half.
TKV_HD uint32_t score_code_pair(float first, float second) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.pack.sat.u16.s32 %0, %1, %2;"
      : "=r"(pair)
      : "r"(score_steps(second)), "r"(score_steps(first)));
  return pair;
#else
  return score_code(first) | score_code(second) << 16;
#endif
}

// Floats from one tile's references to the next one's: whole 16 bytes, so that any run of tiles can
// be copied in bulk.
TKV_HD constexpr int32_t reference_columns(int32_t columns) {
  return (columns + 3) & ~3;
}

// Where the scores of a launch lie; all pointers in device memory.
struct TokenScores {
  uint16_t* codes = nullptr;    // [rows][stride_tiles][8][columns / 2][2][2]
  float* references = nullptr;  // [rows][stride_tiles][reference_columns(columns)]
  int32_t stride_tiles = 0;     // tiles of a row beyond these are left out
  int32_t columns = 0;          // of a row, even

  TKV_HD int64_t tile(int32_t row, int32_t tile) const {
    return static_cast<int64_t>(row) * stride_tiles + tile;
  }
  TKV_HD float* tile_references(int64_t tile) const {
    return references + tile * reference_columns(columns);
  }
  TKV_HD uint16_t* tile_codes(int64_t tile) const { return codes + tile * kTileTokens * columns; }
  // Of a token of a tile; the next column's lies behind an even one's.
  TKV_HD uint16_t* code(int64_t tile, int32_t token, int32_t column) const {
    return tile_codes(tile) + (token % 8 * columns + column / 2 * 2) * 2 + token / 8 * 2 +
           column % 2;
  }
};

TKV_HD constexpr int32_t score_columns(int32_t of_row) {
  return (of_row + 1) & ~1;
}
TKV_HD constexpr int64_t score_tile_bytes(int32_t columns) {
  return static_cast<int64_t>(columns) * kTileTokens * 2 + reference_columns(columns) * 4;
}

// Memory of `bytes` bytes as the scores of `rows` rows of a launch.
inline TokenScores token_scores(void* memory, size_t bytes, int64_t rows, int32_t of_row) {
  TokenScores s;
  s.columns = score_columns(of_row);
  const int64_t tiles = static_cast<int64_t>(bytes) / score_tile_bytes(s.columns) / rows;
  s.stride_tiles = static_cast<int32_t>(tiles < INT32_MAX ? tiles : INT32_MAX);
  s.codes = static_cast<uint16_t*>(memory);
  s.references =
      reinterpret_cast<float*>(s.codes + rows * s.stride_tiles * kTileTokens * s.columns);
  return s;
}

// In log2 units, relative to the reference of its tile.
TKV_HD float score_of_code(uint32_t code) {
  return kLeastScore + static_cast<float>(code) * (1.0f / kScoreSteps);
}

// The probability that a column gave a token; lse is the column's, natural.
TKV_HD float score_probability(uint32_t code, float reference, float lse) {
  if (code == kNoProbability || lse == -INFINITY) return 0.0f;
  const float p = exp2_fast(score_of_code(code) + (reference - lse * kLog2E));
  return p < 1.0f ? p : 1.0f;
}

}  // namespace tierkv
