// SPDX-License-Identifier: Apache-2.0
// Arrays of stored elements to and from single precision, with SIMD: the bits of tierkv/half.h,
// element by element.
#pragma once

#include <cstdint>

#include "tierkv/layout.h"

namespace tierkv {

// out [n] = the elements at `in` (any alignment), exactly.
void elements_to_float(DType type, const void* in, int64_t n, float* out);

// out [n] elements of `type` (any alignment) = x rounded to nearest even. Returns the first index
// whose value is not finite, before or after rounding, or n; `out` is written up to there at least.
int64_t float_to_elements(DType type, const float* x, int64_t n, void* out);

}  // namespace tierkv
