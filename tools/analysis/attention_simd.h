// SPDX-License-Identifier: Apache-2.0
// The inner loops of attention in double, for the best instruction set of the machine.
#pragma once

#include <cstdint>

namespace tierkv::analysis {

// Row lengths of b and c are multiples of this many doubles.
inline constexpr int64_t kDoubleTile = 16;

// A product of matrices with rows of c named by their pointers: c[i][0, n) (+)= sum over j of
// a[i][j] * b[j][0, n).
struct MatrixProduct {
  const double* a = nullptr;  // [rows, depth], rows a_stride apart
  int64_t a_stride = 0;
  const double* b = nullptr;   // [depth, n]
  double* const* c = nullptr;  // [rows] pointers to [n]
  int64_t rows = 0, depth = 0;
  int64_t n = 0;            // a multiple of kDoubleTile
  bool accumulate = false;  // false: c is overwritten
};
void multiply(const MatrixProduct& product);

// s[i] = exp(s[i] - top) for i in [0, n), n a multiple of kDoubleTile, s[i] <= top or minus
// infinity; returns their sum. At most 2 ulp from the exact exponential.
double exponentials(double* s, int64_t n, double top);

}  // namespace tierkv::analysis
