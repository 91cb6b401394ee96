// SPDX-License-Identifier: Apache-2.0
// The global step: one absolute quantisation step per (layer, kv_head, component), chosen so that
// the error has a stated size (docs/internals/architecture.md, "Quantisation"). A uniform error of
// width `step` has variance step^2 / 12 per coordinate.
#pragma once

#include <cmath>
#include <cstdint>

namespace tierkv {

// Keys: the logit error sm_scale * q . e then has standard deviation k. `metric_trace` is the trace
// of the metric M_K = mean of q q^T (plus 1% of its mean diagonal), the same in every orthonormal
// basis. With sm_scale = 1 / sqrt(D) this is k * sqrt(12 D / tr M_K).
inline double key_step(double k, double metric_trace, double sm_scale) {
  return k * std::sqrt(12.0 / metric_trace) / sm_scale;
}

// Values: the output error relative to the root mean square value norm is then v. `signal` is
// E[|x|^2].
inline double value_step(double v, double signal, int32_t head_dim) {
  return v * std::sqrt(12.0 * signal / head_dim);
}

// The ridge of M_K: 1% of its mean diagonal on every diagonal element multiplies the trace by this.
inline constexpr double kMetricRidge = 0.01;

}  // namespace tierkv
