// SPDX-License-Identifier: Apache-2.0
// Checks of tierkv/significance.h, and its references.
#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/format/page_layout.h"
#include "codec/format/token_sample.h"
#include "codec/policy/significance.h"
#include "tierkv/layout.h"
#include "tierkv/significance.h"

namespace tierkv {
namespace {

constexpr int32_t kMostHeads = 65535;  // CTAs along one side of a grid

bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}
bool is_empty(const SignificanceCall& p) {
  return p.total_tokens == 0 || p.num_sequences == 0;
}

// What host and device have in common.
Status check(const SignificanceCall& p) {
  if (p.num_sequences < 0 || p.total_tokens < 0) {
    return invalid("num_sequences or total_tokens is negative");
  }
  if (p.num_kv_heads < 1 || p.num_q_heads < 1 || p.num_q_heads % p.num_kv_heads != 0) {
    return invalid("num_q_heads is not a multiple of num_kv_heads");
  }
  if (p.num_q_heads > kMostHeads) return invalid("num_q_heads is above 65535");
  if (!(p.sm_scale > 0 && p.sm_scale <= kMaxSmScale)) {
    return invalid("sm_scale must be positive and at most 2^80");
  }
  if (p.query_stride < 1 || p.query_stride > kMaxQueryStride) {
    return invalid("query_stride must be 1 to 4096");
  }
  if (p.num_sequences == 0 && p.total_tokens > 0) {
    return invalid("num_sequences is 0, but there are tokens");
  }
  if (is_empty(p)) return Status::ok();
  if (p.q == nullptr || p.k == nullptr) return invalid("q or k is null");
  if (p.starts == nullptr && p.num_sequences != 1) {
    return invalid("starts is null with several sequences");
  }
  for (const int64_t stride :
       {p.q_token_stride, p.q_head_stride, p.k_token_stride, p.k_head_stride}) {
    if (stride < p.head_dim) return invalid("a stride is below head_dim");
  }
  return Status::ok();
}

Status check_host(const SignificanceCall& p, const void* out, const char* name) {
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  if (p.dtype < DType::kFloat16 || p.dtype > DType::kFloat32) return invalid("dtype is unknown");
  if (Status s = check(p); !s) return s;
  if (is_empty(p)) return Status::ok();
  if (out == nullptr) return invalid(name);
  if (p.starts == nullptr) return Status::ok();
  const int32_t* end = p.starts + p.num_sequences;
  if (*p.starts != 0 || *end != p.total_tokens || !std::is_sorted(p.starts, end + 1)) {
    return invalid("starts must ascend from 0 to total_tokens");
  }
  return Status::ok();
}

// A sequence of the call; its tokens are numbered from 0.
class HostPrompt {
 public:
  HostPrompt(const SignificanceCall& p, int32_t sequence)
      : p_(p),
        start_(p.starts == nullptr ? 0 : p.starts[sequence]),
        num_tokens_((p.starts == nullptr ? p.total_tokens : p.starts[sequence + 1]) - start_),
        queries_(sample_tokens(num_tokens_, p.query_stride)) {}

  int32_t num_tokens() const { return num_tokens_; }
  const TokenSample& queries() const { return queries_; }
  size_t scalar(int32_t head, int32_t token) const {
    return static_cast<size_t>(head) * p_.total_tokens + start_ + token;
  }
  // [counted queries, head_dim]
  std::vector<float> q(int32_t head) const {
    return rows(p_.q, {p_.q_token_stride, p_.q_head_stride}, head, queries_);
  }
  // [num_tokens, head_dim]
  std::vector<float> k(int32_t head) const {
    return rows(p_.k, {p_.k_token_stride, p_.k_head_stride}, head, {0, 1, num_tokens_});
  }

 private:
  struct Strides {
    int64_t token, head;
  };
  std::vector<float> rows(const void* x, Strides strides, int32_t head,
                          const TokenSample& tokens) const {
    std::vector<float> out(static_cast<size_t>(tokens.count) * p_.head_dim);
    auto* to = out.data();
    for (int32_t i = 0; i < tokens.count; ++i) {
      const int64_t at = (start_ + tokens.position(i)) * strides.token + head * strides.head;
      for (int32_t d = 0; d < p_.head_dim; ++d) *to++ = load_element(x, p_.dtype, at + d);
    }
    return out;
  }

  const SignificanceCall& p_;
  int32_t start_, num_tokens_;
  TokenSample queries_;
};

Status score_row(const SignificanceCall& p, const HostPrompt& prompt, int32_t kv_head, float* out) {
  const TokenSample& queries = prompt.queries();
  const std::vector<float> k = prompt.k(kv_head);
  std::vector<float> q;
  std::vector<int32_t> positions(queries.count);
  for (int32_t i = 0; i < queries.count; ++i) positions[i] = queries.position(i);
  AttentionRow row;
  row.group_size = p.num_q_heads / p.num_kv_heads;
  for (int32_t h = 0; h < row.group_size; ++h) {
    const std::vector<float> one = prompt.q(kv_head * row.group_size + h);
    q.insert(q.end(), one.begin(), one.end());
  }
  row.q = q.data(), row.k = k.data();
  row.q_positions = positions.data();
  row.num_queries = queries.count, row.num_tokens = prompt.num_tokens();
  row.head_dim = p.head_dim, row.sm_scale = p.sm_scale;
  std::vector<double> significance(row.num_tokens);
  if (Status s = exact_significance(row, significance.data(), nullptr); !s) return s;
  std::copy(significance.begin(), significance.end(), out + prompt.scalar(kv_head, 0));
  return Status::ok();
}

// The log-sum-exp of a query over the keys 0 .. last; not finite where a score is not.
double log_sum_exp(const float* q, const std::vector<float>& k, int32_t last,
                   const SignificanceCall& p) {
  std::vector<double> s(last + 1);
  for (int32_t t = 0; t <= last; ++t) {
    const float* key = k.data() + static_cast<size_t>(t) * p.head_dim;
    double sum = 0;
    for (int32_t d = 0; d < p.head_dim; ++d) sum += static_cast<double>(q[d]) * key[d];
    s[t] = sum * p.sm_scale;
    if (!std::isfinite(s[t])) return s[t];
  }
  const double top = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (const double x : s) sum += std::exp(x - top);
  return top + std::log(sum);
}

Status lse_row(const SignificanceCall& p, const HostPrompt& prompt, int32_t head, float* out) {
  const std::vector<float> q = prompt.q(head);
  const std::vector<float> k = prompt.k(head / (p.num_q_heads / p.num_kv_heads));
  for (int32_t i = 0; i < prompt.queries().count; ++i) {
    const int32_t position = prompt.queries().position(i);
    const double lse = log_sum_exp(q.data() + static_cast<size_t>(i) * p.head_dim, k, position, p);
    if (!std::isfinite(lse)) {
      return Status(StatusCode::kNonFinite, "an attention score is not finite");
    }
    out[prompt.scalar(head, position)] = static_cast<float>(lse);
  }
  return Status::ok();
}

// run_row(p, prompt, head, out) for the heads of every sequence.
template <class RunRow>
Status run_host(const SignificanceCall& p, int32_t heads, const RunRow& run_row, float* out) {
  for (int32_t i = 0; i < p.num_sequences && p.total_tokens > 0; ++i) {
    const HostPrompt prompt(p, i);
    for (int32_t head = 0; head < heads; ++head) {
      if (Status s = run_row(p, prompt, head, out); !s) return s;
    }
  }
  return Status::ok();
}

}  // namespace

Status SignificanceCall::validate() const {
  if (max_tokens < 0 || max_tokens > total_tokens || (max_tokens == 0 && total_tokens > 0)) {
    return invalid("max_tokens is out of range");
  }
  if (num_sequences > 65535) return unsupported("num_sequences above 65535");
  if (!is_known_head_dim(head_dim)) {
    return unsupported("head_dim must be 64, 96, 128 or 256");
  }
  if (!is_raw_dtype(dtype)) {
    return unsupported("dtype must be float16 or bfloat16");
  }
  if (Status s = check(*this); !s) return s;
  if (num_q_heads / num_kv_heads > kMaxScoreGroup) {
    return unsupported("more than 16 query heads for a kv_head");
  }
  if (is_empty(*this)) return Status::ok();
  if (starts == nullptr && max_tokens != total_tokens) return invalid("max_tokens is out of range");
  if (!is_aligned(q) || !is_aligned(k)) return invalid("q or k is not aligned to 16 bytes");
  for (const int64_t stride : {q_token_stride, q_head_stride, k_token_stride, k_head_stride}) {
    if (stride % 8 != 0) return invalid("a stride is no multiple of 8");
  }
  return Status::ok();
}

Status prompt_significance_host(const SignificanceCall& p, float* significance) {
  if (Status s = check_host(p, significance, "significance is null"); !s) return s;
  return run_host(p, p.num_kv_heads, score_row, significance);
}

Status prompt_lse_host(const SignificanceCall& p, float* lse) {
  if (Status s = check_host(p, lse, "lse is null"); !s) return s;
  return run_host(p, p.num_q_heads, lse_row, lse);
}

}  // namespace tierkv
