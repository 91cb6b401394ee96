// SPDX-License-Identifier: Apache-2.0
#include "codec/policy/significance.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/format/errors.h"

namespace tierkv {
namespace {

// Keys as [head_dim][num_tokens], so that the sum over dims runs over contiguous tokens.
std::vector<double> transposed_keys(const AttentionRow& row) {
  std::vector<double> kt(static_cast<size_t>(row.head_dim) * row.num_tokens);
  for (int64_t i = 0; i < row.num_tokens; ++i) {
    for (int64_t d = 0; d < row.head_dim; ++d)
      kt[d * row.num_tokens + i] = row.k[i * row.head_dim + d];
  }
  return kt;
}

// p[i] = max(p[i], softmax over tokens 0..n-1 of sm_scale q . k). False when a score is not finite.
bool accumulate_max_softmax(const AttentionRow& row, const std::vector<double>& kt, const float* q,
                            int64_t n, std::vector<double>* scratch, std::vector<double>* p) {
  std::vector<double>& s = *scratch;
  std::fill_n(s.begin(), n, 0.0);
  for (int64_t d = 0; d < row.head_dim; ++d) {
    const double x = static_cast<double>(q[d]) * row.sm_scale;
    const double* k = kt.data() + d * row.num_tokens;
    for (int64_t i = 0; i < n; ++i) s[i] += x * k[i];
  }
  if (!std::all_of(s.begin(), s.begin() + n, [](double x) { return std::isfinite(x); }))
    return false;
  const double top = *std::max_element(s.begin(), s.begin() + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += s[i] = std::exp(s[i] - top);
  for (int64_t i = 0; i < n; ++i) (*p)[i] = std::max((*p)[i], s[i] / sum);
  return true;
}

}  // namespace

Status AttentionRow::validate() const {
  if (num_tokens < 0 || num_queries < 0) return invalid("num_tokens or num_queries is negative");
  if (head_dim < 1) return invalid("head_dim must be positive");
  if (group_size < 1) return invalid("group_size must be positive");
  if (!std::isfinite(sm_scale) || sm_scale <= 0)
    return invalid("sm_scale must be positive and finite");
  if (num_queries > 0 && q == nullptr) return invalid("q is null");
  if (num_tokens > 0 && k == nullptr) return invalid("k is null");
  if (q_positions == nullptr) {
    if (num_queries != num_tokens)
      return invalid("q_positions is null and queries are not one per token");
    return Status::ok();
  }
  for (int32_t j = 0; j < num_queries; ++j) {
    if (q_positions[j] < 0 || q_positions[j] >= num_tokens) {
      return invalid("a query position is outside the tokens");
    }
  }
  return Status::ok();
}

Status exact_significance(const AttentionRow& row, double* significance, int32_t* counts) {
  if (Status s = row.validate(); !s) return s;
  if (row.num_tokens == 0) return Status::ok();
  if (significance == nullptr) return invalid("significance is null");
  const std::vector<double> kt = transposed_keys(row);
  const size_t n = static_cast<size_t>(row.num_tokens);
  std::vector<double> sums(n, 0.0), scratch(n), p(n);
  std::vector<int32_t> observed(n, 0);
  for (int64_t j = 0; j < row.num_queries; ++j) {
    const int64_t position = row.q_positions == nullptr ? j : row.q_positions[j];
    std::fill_n(p.begin(), position + 1, 0.0);
    for (int64_t h = 0; h < row.group_size; ++h) {
      const float* q = row.q + (h * row.num_queries + j) * row.head_dim;
      if (!accumulate_max_softmax(row, kt, q, position + 1, &scratch, &p)) {
        return Status(StatusCode::kNonFinite, "an attention score is not finite");
      }
    }
    for (int64_t i = 0; i < position; ++i) {
      sums[i] += p[i];
      ++observed[i];
    }
  }
  for (size_t i = 0; i < n; ++i) {
    significance[i] = observed[i] == 0 ? 0.0 : sums[i] / observed[i];
    if (counts != nullptr) counts[i] = observed[i];
  }
  return Status::ok();
}

}  // namespace tierkv
