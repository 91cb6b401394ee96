// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/attention_simd.h"

#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tools/analysis/attention_simd.cc"
#include <hwy/foreach_target.h>

#include <hwy/highway.h>

#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace tierkv::analysis {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<double, kDoubleTile / 2>;

// kRows rows of c, two vectors at a time: their sums stay in registers over the whole depth.
template <int kRows>
HWY_INLINE void multiply_rows(const MatrixProduct& p, int64_t first) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t j = 0; j < p.n; j += 2 * lanes) {
    hn::Vec<D> left[kRows], right[kRows];
    for (int r = 0; r < kRows; ++r) {
      const double* c = p.c[first + r] + j;
      left[r] = p.accumulate ? hn::LoadU(d, c) : hn::Zero(d);
      right[r] = p.accumulate ? hn::LoadU(d, c + lanes) : hn::Zero(d);
    }
    const double* a = p.a + first * p.a_stride;
    for (int64_t i = 0; i < p.depth; ++i) {
      const hn::Vec<D> b0 = hn::LoadU(d, p.b + i * p.n + j);
      const hn::Vec<D> b1 = hn::LoadU(d, p.b + i * p.n + j + lanes);
      for (int r = 0; r < kRows; ++r) {
        const hn::Vec<D> x = hn::Set(d, a[r * p.a_stride + i]);
        left[r] = hn::MulAdd(x, b0, left[r]);
        right[r] = hn::MulAdd(x, b1, right[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      hn::StoreU(left[r], d, p.c[first + r] + j);
      hn::StoreU(right[r], d, p.c[first + r] + j + lanes);
    }
  }
}

void multiply(const MatrixProduct& p) {
  constexpr int kRows = 6;  // 12 sums, two of b and one of a: 16 registers
  int64_t row = 0;
  for (; row + kRows <= p.rows; row += kRows) multiply_rows<kRows>(p, row);
  for (; row < p.rows; ++row) multiply_rows<1>(p, row);
}

double exponentials(double* s, int64_t n, double top) {
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const hn::Vec<D> shift = hn::Set(d, top), lowest = hn::Set(d, -800.0);  // exp(-800) is 0
  hn::Vec<D> sum = hn::Zero(d);
  for (int64_t i = 0; i < n; i += lanes) {
    const hn::Vec<D> x = hn::Sub(hn::LoadU(d, s + i), shift);
    const hn::Vec<D> e = hn::IfThenElseZero(hn::Gt(x, lowest), hn::Exp(d, hn::Max(x, lowest)));
    hn::StoreU(e, d, s + i);
    sum = hn::Add(sum, e);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

}  // namespace HWY_NAMESPACE
}  // namespace tierkv::analysis
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv::analysis {

HWY_EXPORT(multiply);
HWY_EXPORT(exponentials);

void multiply(const MatrixProduct& product) {
  HWY_DYNAMIC_DISPATCH(multiply)(product);
}
double exponentials(double* s, int64_t n, double top) {
  return HWY_DYNAMIC_DISPATCH(exponentials)(s, n, top);
}

}  // namespace tierkv::analysis
#endif  // HWY_ONCE
