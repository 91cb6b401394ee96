// SPDX-License-Identifier: Apache-2.0
// The mergeable state of a softmax-weighted sum: all that split attention needs.
//
// A SoftmaxState stands for a set of scored tokens. With scores s_i in log2 units (logit * log2(e))
// and vectors x_i,
//   2^reference * sum          = sum_i 2^s_i
//   2^reference * accumulator  = sum_i 2^s_i x_i        (kept beside the state, a float per dim)
// so output = accumulator / sum and lse = ln(2) * (reference + log2(sum)). The reference is free:
// any value that keeps sum and accumulator inside fp32 stands for the same set.
//
// Law: join() is commutative and associative up to rounding, with SoftmaxState{} (no tokens) as its
// identity; accumulators are added, each times share(part, whole).
//
// Sources: Milakov and Gimelshein 2018 (online softmax); FlashInfer's state.cuh.
#pragma once

#include <cmath>

#include "gpu/constants.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr float kNoReference = -INFINITY;  // of a state without tokens
inline constexpr float kLargestFloat = 0x1.fffffep127f;

// 2^x and log2(x), 2 ulp on the device; 2^-infinity = 0.
TKV_HD float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
TKV_HD float log2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}

struct SoftmaxState {
  float reference = kNoReference;
  float sum = 0.0f;

  TKV_HD bool is_empty() const { return sum == 0.0f; }
};

// The factor that brings the accumulator of `part` to the reference of `whole`, a state joined from
// it among others.
TKV_HD float share(SoftmaxState part, SoftmaxState whole) {
  return part.is_empty() ? 0.0f : exp2_fast(part.reference - whole.reference);
}

TKV_HD SoftmaxState join(SoftmaxState a, SoftmaxState b) {
  if (a.is_empty()) return b;
  if (b.is_empty()) return a;
  SoftmaxState whole;
  whole.reference = a.reference > b.reference ? a.reference : b.reference;
  whole.sum = a.sum * exp2_fast(a.reference - whole.reference) +
              b.sum * exp2_fast(b.reference - whole.reference);
  return whole;
}

// Natural logarithm of the sum of e^logit; -infinity without tokens.
TKV_HD float natural_lse(SoftmaxState s) {
  return s.is_empty() ? -INFINITY : kLn2 * (s.reference + log2_fast(s.sum));
}

// Factor of the accumulator in the output; 0 without tokens, whose output is 0.
TKV_HD float output_scale(SoftmaxState s) {
  return s.is_empty() ? 0.0f : 1.0f / s.sum;
}

// The state of a finished partial result whose output was already divided by its sum. Its reference
// is finite where lse is.
TKV_HD SoftmaxState state_of_lse(float lse) {
  if (lse == -INFINITY) return SoftmaxState{};
  const float reference = lse * kLog2E;
  return {reference > kLargestFloat    ? kLargestFloat
          : reference < -kLargestFloat ? -kLargestFloat
                                       : reference,
          1.0f};
}

// What becomes of a state whose head has a learned sink, a logit in its denominator without a value
// (-infinity: none): the factor of the accumulator in the output, and the natural log-sum-exp.
struct FinishedState {
  float scale;
  float lse;
};
TKV_HD FinishedState finish(SoftmaxState s, float sink) {
  if (sink == -INFINITY) return {output_scale(s), natural_lse(s)};
  const SoftmaxState whole = join(s, state_of_lse(sink));
  return {share(s, whole) * output_scale(whole), natural_lse(whole)};
}

}  // namespace tierkv
