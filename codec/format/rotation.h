// SPDX-License-Identifier: Apache-2.0
// The fixed Hadamard rotation of tokens in pages (tierkv/basis.h), small enough to be a kernel's
// parameter.
//
// x becomes H (signs x), with H of the head's descending powers of two; back: signs (H y), because
// H is its own inverse. Every operation is rounded once and none is fused: host and device agree to
// the bit with Basis::apply() and Basis::undo().
#pragma once

#include <cstdint>

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

// The library's signs; head_dim is one that pages have.
Rotation hadamard_rotation(int32_t head_dim);

// The power of two of the descending cut of head_dim that channel d lies in: 96 is 64 and 32.
TKV_HD constexpr int32_t hadamard_size(int32_t head_dim, int32_t d) {
  return head_dim == 96 ? (d < 64 ? 64 : 32) : head_dim;
}
TKV_HD float hadamard_scale(int32_t size) {
  return div_rn(1.0f, sqrt_rn(static_cast<float>(size)));
}

}  // namespace tierkv
