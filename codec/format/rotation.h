// SPDX-License-Identifier: Apache-2.0
// The fixed Hadamard rotation of tokens in pages (tierkv/basis.h), small enough to be a kernel's
// parameter, and the reflection of keys behind it.
//
// x becomes H (signs x), with H of the head's descending powers of two; back: signs (H y), because
// H is its own inverse. Every operation is rounded once and none is fused: host and device agree to
// the bit with Basis::apply() and Basis::undo().
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/quantize.h"
#include "tierkv/half.h"

namespace tierkv {

struct Rotation {
  bool is_on = false;
  uint32_t negative[8] = {};  // bit d % 32 of word d / 32: the sign of channel d is -1

  TKV_HD float with_sign(int32_t d, float x) const {
    return (negative[d / 32] >> (d % 32) & 1u) != 0 ? -x : x;
  }
};

// +1 or -1 per channel: bit 63 of the i-th output of splitmix64 with the library's fixed seed; set
// means -1.
std::vector<float> hadamard_signs(int32_t head_dim);
// The same; head_dim is one that pages have.
Rotation hadamard_rotation(int32_t head_dim);

// The power of two of the descending cut of head_dim that channel d lies in: 96 is 64 and 32.
TKV_HD constexpr int32_t hadamard_size(int32_t head_dim, int32_t d) {
  return head_dim == 96 ? (d < 64 ? 64 : 32) : head_dim;
}
// A step of the transform for two channels.
TKV_HD void hadamard_pair(float& a, float& b) {
  const float sum = add_rn(a, b);
  b = add_rn(a, -b);
  a = sum;
}
TKV_HD float hadamard_scale(int32_t size) {
  return div_rn(1.0f, sqrt_rn(static_cast<float>(size)));
}

// H x on the host, of any head_dim: the transform of each power of two that it is the sum of,
// descending. Orthonormal and its own inverse. In float these are the roundings of a kernel.
template <class T>
void hadamard(T* x, int32_t head_dim) {
  for (int32_t n = 1 << 30; n > 0; n /= 2) {
    if ((head_dim & n) == 0) continue;
    for (int32_t half = 1; half < n; half *= 2) {
      for (int32_t i = 0; i < n; i += 2 * half) {
        for (int32_t j = i; j < i + half; ++j) {
          const T a = x[j], b = x[j + half];
          x[j] = a + b, x[j + half] = a - b;
        }
      }
    }
    const T scale = 1 / std::sqrt(static_cast<T>(n));
    for (int32_t i = 0; i < n; ++i) *x++ *= scale;
  }
}

// ---- reflection ----

// The product of a normal and a row in the order that warps share: of the channels c 32 + 8 j + r a
// chain over j, then pairs of chunks c (4, 2 and 1 apart), then pairs of r. Adding 0 makes a zero
// positive: a chunk that head_dim does not have may be left out or be a zero.
TKV_HD float reflection_product(const float* normal, const float* x, int32_t head_dim) {
  float partial[8][8] = {};  // c, r
  for (int32_t d = 0; d < head_dim; ++d) {
    float& sum = partial[d / 32][d % 8];
    sum = d % 32 < 8 ? mul_rn(normal[d], x[d]) : fma_rn(normal[d], x[d], sum);
  }
  for (int32_t apart = 4; apart > 0; apart /= 2) {
    for (int32_t i = 0; i < 8 * apart; ++i) {
      float& sum = partial[i / 8][i % 8];
      sum = add_rn(sum, partial[i / 8 + apart][i % 8]);
    }
  }
  for (int32_t apart = 4; apart > 0; apart /= 2) {
    for (int32_t r = 0; r < apart; ++r)
      partial[0][r] = add_rn(partial[0][r], partial[0][r + apart]);
  }
  return add_rn(partial[0][0], 0.0f);
}
// A channel of x - 2 normal (normal . x).
TKV_HD float reflected(float x, float normal, float product) {
  return fma_rn(mul_rn(-2.0f, product), normal, x);
}
// The Householder reflection of a row; its own inverse, as the normal has length 1 or is 0. Null:
// nothing changes.
TKV_HD void reflect(const float* normal, int32_t head_dim, float* x) {
  if (normal == nullptr) return;
  const float product = reflection_product(normal, x, head_dim);
  for (int32_t d = 0; d < head_dim; ++d) x[d] = reflected(x[d], normal[d], product);
}

}  // namespace tierkv
