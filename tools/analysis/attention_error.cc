#include "tools/analysis/attention_error.h"

#include <algorithm>
#include <cmath>

// The two inner loops are compiled for several instruction sets; sanitizers cannot instrument the
// dispatch.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && \
    !defined(__SANITIZE_ADDRESS__)
#define TKV_MULTIVERSION __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define TKV_MULTIVERSION
#endif

namespace tierkv::analysis {
namespace {

constexpr double kNotSeen = -std::numeric_limits<double>::infinity();

// s[t] = sum_d q[d] * kt[d][t] for a whole block.
TKV_MULTIVERSION
void block_logits(const double* q, const double* kt, int32_t head_dim, double* s) {
  constexpr int32_t n = BlockAttention::kMaxBlock;
  for (int32_t t = 0; t < n; ++t) s[t] = 0;
  for (int32_t d = 0; d < head_dim; ++d) {
    const double qd = q[d];
    const double* row = kt + static_cast<int64_t>(d) * n;
    for (int32_t t = 0; t < n; ++t) s[t] += qd * row[t];
  }
}

// o[d] += w[t] * v[t][d].
TKV_MULTIVERSION
void add_values(const double* w, int32_t tokens, const double* v, int32_t head_dim, double* o) {
  for (int32_t t = 0; t < tokens; ++t) {
    const double wt = w[t];
    if (wt == 0) continue;
    const double* row = v + static_cast<int64_t>(t) * head_dim;
    for (int32_t d = 0; d < head_dim; ++d) o[d] += wt * row[d];
  }
}

}  // namespace

SoftmaxState::SoftmaxState(int64_t queries, int32_t head_dim)
    : head_dim_(head_dim), m_(queries, kNotSeen), l_(queries, 0.0), o_(queries * head_dim, 0.0) {}

void SoftmaxState::absorb(int64_t q, const double* s, int32_t tokens, const double* v) {
  double top = m_[q];
  for (int32_t t = 0; t < tokens; ++t) top = std::max(top, s[t]);
  if (top == kNotSeen) return;
  double* o = o_.data() + q * head_dim_;
  if (top > m_[q]) {
    const double shrink = std::exp(m_[q] - top);
    l_[q] *= shrink;
    for (int32_t d = 0; d < head_dim_; ++d) o[d] *= shrink;
    m_[q] = top;
  }
  double w[BlockAttention::kMaxBlock];
  for (int32_t t = 0; t < tokens; ++t) {
    w[t] = s[t] == kNotSeen ? 0.0 : std::exp(s[t] - top);
    l_[q] += w[t];
  }
  add_values(w, tokens, v, head_dim_, o);
}

void SoftmaxState::merge(const SoftmaxState& other) {
  for (size_t q = 0; q < m_.size(); ++q) {
    const double top = std::max(m_[q], other.m_[q]);
    if (top == kNotSeen) continue;
    const double a = std::exp(m_[q] - top), b = std::exp(other.m_[q] - top);
    m_[q] = top;
    l_[q] = l_[q] * a + other.l_[q] * b;
    for (int32_t d = 0; d < head_dim_; ++d) {
      double& o = o_[q * head_dim_ + d];
      o = o * a + other.o_[q * head_dim_ + d] * b;
    }
  }
}

void SoftmaxState::output(int64_t q, double* out) const {
  for (int32_t d = 0; d < head_dim_; ++d) out[d] = l_[q] > 0 ? o_[q * head_dim_ + d] / l_[q] : 0.0;
}

BlockAttention::BlockAttention(const QueryTile& tile)
    : tile_(tile),
      k_transposed_(static_cast<size_t>(tile.head_dim) * kMaxBlock),
      v_(static_cast<size_t>(tile.head_dim) * kMaxBlock),
      logits_(tile.count() * kMaxBlock) {}

void BlockAttention::load(const float* k, const float* v, int32_t tokens) {
  const int32_t d = tile_.head_dim;
  tokens_ = tokens;
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t i = 0; i < d; ++i) {
      k_transposed_[static_cast<size_t>(i) * kMaxBlock + t] = tile_.sm_scale * k[t * d + i];
      v_[static_cast<size_t>(t) * d + i] = v[t * d + i];
    }
  }
  for (int64_t q = 0; q < tile_.count(); ++q) {
    block_logits(tile_.q.data() + q * d, k_transposed_.data(), d, logits_.data() + q * kMaxBlock);
  }
}

void BlockAttention::add_to(SoftmaxState* state, const Visibility* visible) {
  const auto n = static_cast<int64_t>(tile_.positions.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t p = tile_.positions[i];
    bool seen[kMaxBlock], any = false;
    for (int32_t t = 0; t < tokens_; ++t) {
      seen[t] = p >= visible[t].first && p <= visible[t].last;
      any |= seen[t];
    }
    if (!any) continue;
    for (int32_t h = 0; h < tile_.heads; ++h) {
      const int64_t q = h * n + i;
      double s[kMaxBlock];
      for (int32_t t = 0; t < tokens_; ++t) s[t] = seen[t] ? logits_[q * kMaxBlock + t] : kNotSeen;
      state->absorb(q, s, tokens_, v_.data());
    }
  }
}

}  // namespace tierkv::analysis
