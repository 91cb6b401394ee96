#include "codec/significance.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace tierkv {
namespace {

// p[i] = softmax over i <= j of sm_scale * q . k_i.
void causal_softmax(const SignificanceInput& in, const float* q, int64_t j,
                    std::vector<double>* p) {
  double top = -INFINITY, sum = 0;
  for (int64_t i = 0; i <= j; ++i) {
    double dot = 0;
    for (int32_t d = 0; d < in.head_dim; ++d)
      dot += static_cast<double>(q[d]) * in.k[i * in.head_dim + d];
    (*p)[i] = in.sm_scale * dot;
    top = std::max(top, (*p)[i]);
  }
  for (int64_t i = 0; i <= j; ++i) sum += (*p)[i] = std::exp((*p)[i] - top);
  for (int64_t i = 0; i <= j; ++i) (*p)[i] /= sum;
}

}  // namespace

StatusCode compute_significance(const SignificanceInput& in, float* significance) {
  if (in.q == nullptr || in.k == nullptr || significance == nullptr || in.heads < 1 ||
      in.tokens < 1 || in.head_dim < 1) {
    return StatusCode::kInvalidArgument;
  }
  const int64_t n = in.tokens;
  std::vector<double> sum(n, 0.0), p(n), best(n);
  for (int64_t j = 1; j < n; ++j) {
    std::fill(best.begin(), best.begin() + j, 0.0);
    for (int32_t h = 0; h < in.heads; ++h) {
      causal_softmax(in, in.q + (h * n + j) * in.head_dim, j, &p);
      for (int64_t i = 0; i < j; ++i) best[i] = std::max(best[i], p[i]);
    }
    for (int64_t i = 0; i < j; ++i) sum[i] += best[i];
  }
  for (int64_t i = 0; i < n; ++i) {
    significance[i] =
        i + 1 < n ? static_cast<float>(sum[i] / static_cast<double>(n - 1 - i)) : 0.0f;
  }
  return StatusCode::kOk;
}

}  // namespace tierkv
