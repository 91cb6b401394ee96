// SPDX-License-Identifier: Apache-2.0
// What one lane does with the values of its tensor-core fragments: quantise them and pack the codes
// into the words of a tile. Shared by the kernels and their host tests.
//
// A lane holds eight values of a dim block, x[th][dh][par]: token half, dim half, and which of the
// pair of one register (keys: neighbouring dims, values: neighbouring tokens). They are the four
// registers of the A operand, r = th + 2 dh for keys and r = dh + 2 th for values, so the codes of
// a word never come from another lane, and codes below 16 bits are packed the same way for both.
#pragma once

#include <cmath>
#include <cstdint>

#include "codec/format/page_layout.h"
#include "codec/format/quantize.h"
#include "tierkv/half.h"

namespace tierkv {

// div_rn(1, x).
TKV_HD float reciprocal_rn(float x) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

// The tokens of a lane's values in a tile, and the dims in their block.
TKV_HD constexpr int32_t fragment_token(Component c, int32_t lane, int32_t th, int32_t par) {
  return (c == Component::kKey ? lane / 4 : 2 * (lane % 4) + par) + 8 * th;
}
TKV_HD constexpr int32_t fragment_dim(Component c, int32_t lane, int32_t dh, int32_t par) {
  return (c == Component::kKey ? 2 * (lane % 4) + par : lane / 4) + 8 * dh;
}

// The stored parameters of a group, ready for many values.
struct alignas(16) CodeMaker {
  float scale;
  float reciprocal;  // round(1 / scale); 0 where the scale is 0
  float zero_point;
  float unused;
};
TKV_HD CodeMaker make_code_maker(QuantParams p) {
  const float scale = half_to_float(p.scale);
  return {scale, scale == 0.0f ? 0.0f : reciprocal_rn(scale), half_to_float(p.zero_point), 0.0f};
}

// 2^22 + 2^23: adding it rounds a small number to an integer, half to even, which then is the low
// bits.
inline constexpr float kRoundingBias = 12582912.0f;

// minmax_code() without a division, in the low byte; the bits above are not defined. top = levels -
// 1.
//
// Equal because the result is decided by how a = x - zero_point compares with the ties T = (k +
// 1/2) scale, k < 255, which are floats: 11 + 9 bits. (1) a = T: the remainder a - q scale is exact
// (few units in the last place of q, times 11 bits), so one correction moves q to k + 1/2 within
// 2^-22 units: q rounds to k + 1/2. (2) a != T: relative to T it is off by at least 2^-23 / m(T),
// where m is the significand, and q rounds onto k + 1/2 only within 2^-24 / m(k + 1/2); the ratio
// is at least 2 / m(scale) > 1 + 2^-11, far above the error of q. The true division meets no tie
// either, by the same ratio. Clamping before rounding is the same, the bounds being integers.
TKV_HD uint32_t biased_code(float x, const CodeMaker& m, float top) {
  const float a = add_rn(x, -m.zero_point);
  float q = mul_rn(a, m.reciprocal);
  q = fma_rn(fma_rn(-q, m.scale, a), m.reciprocal, q);
  q = fminf(fmaxf(q, 0.0f), top);
  return float_bits(add_rn(q, kRoundingBias));
}

// The low bytes of four words, b0 lowest.
TKV_HD uint32_t join_bytes(uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(__byte_perm(b0, b1, 0x0040), __byte_perm(b2, b3, 0x0040), 0x5410);
#else
  return (b0 & 255u) | (b1 & 255u) << 8 | (b2 & 255u) << 16 | (b3 & 255u) << 24;
#endif
}

struct BlockCodes {
  uint32_t at[2][2][2];  // [th][dh][par], the code in the low byte
};

// 4 bits: word f.
TKV_HD uint32_t pack_word_4(const BlockCodes& c) {
  uint32_t b[2][2];  // [par][th]
  for (int32_t par = 0; par < 2; ++par) {
    for (int32_t th = 0; th < 2; ++th) b[par][th] = c.at[th][0][par] + (c.at[th][1][par] << 4);
  }
  return join_bytes(b[0][0], b[0][1], b[1][0], b[1][1]);
}
// 2 bits: word f / 2, from the blocks f = 2 w and 2 w + 1.
TKV_HD uint32_t pack_word_2(const BlockCodes& even, const BlockCodes& odd) {
  uint32_t b[2][2];
  for (int32_t par = 0; par < 2; ++par) {
    for (int32_t th = 0; th < 2; ++th) {
      b[par][th] = even.at[th][0][par] + (even.at[th][1][par] << 2) + (odd.at[th][0][par] << 4) +
                   (odd.at[th][1][par] << 6);
    }
  }
  return join_bytes(b[0][0], b[0][1], b[1][0], b[1][1]);
}

// The word of a code of fewer than 16 bits.
TKV_HD constexpr int32_t fragment_code_word(int32_t bits, int32_t block, int32_t th) {
  return bits == 8 ? 2 * block + th : bits == 4 ? block : block / 2;
}

}  // namespace tierkv
