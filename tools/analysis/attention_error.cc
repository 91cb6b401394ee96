// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/attention_error.h"

#include <algorithm>
#include <cmath>

#include "tools/analysis/attention_simd.h"

namespace tierkv::analysis {
namespace {

constexpr double kNotSeen = -std::numeric_limits<double>::infinity();

int64_t padded(int32_t head_dim) {
  return (head_dim + kDoubleTile - 1) / kDoubleTile * kDoubleTile;
}

}  // namespace

SoftmaxState::SoftmaxState(int64_t queries, int32_t head_dim)
    : head_dim_(head_dim),
      stride_(padded(head_dim)),
      m_(queries, kNotSeen),
      l_(queries, 0.0),
      o_(queries * stride_, 0.0) {}

bool SoftmaxState::weigh(int64_t q, double* s, int32_t n) {
  const double top = *std::max_element(s, s + n);
  if (top == kNotSeen) return false;
  if (top > m_[q]) {
    const double shrink = std::exp(m_[q] - top);
    double* o = o_.data() + q * stride_;
    l_[q] *= shrink;
    for (int64_t d = 0; d < stride_; ++d) o[d] *= shrink;
    m_[q] = top;
  }
  l_[q] += exponentials(s, n, m_[q]);
  return true;
}

void SoftmaxState::merge(const SoftmaxState& other) {
  for (size_t q = 0; q < m_.size(); ++q) {
    const double top = std::max(m_[q], other.m_[q]);
    if (top == kNotSeen) continue;
    const double a = std::exp(m_[q] - top), b = std::exp(other.m_[q] - top);
    m_[q] = top;
    l_[q] = l_[q] * a + other.l_[q] * b;
    for (int64_t d = 0; d < stride_; ++d) {
      double& o = o_[q * stride_ + d];
      o = o * a + other.o_[q * stride_ + d] * b;
    }
  }
}

void SoftmaxState::output(int64_t q, double* out) const {
  for (int32_t d = 0; d < head_dim_; ++d) out[d] = l_[q] > 0 ? o_[q * stride_ + d] / l_[q] : 0.0;
}

BlockAttention::BlockAttention(const QueryTile& tile)
    : tile_(tile),
      value_stride_(padded(tile.head_dim)),
      k_transposed_(static_cast<size_t>(tile.head_dim) * kMaxBlock),
      v_(static_cast<size_t>(value_stride_) * kMaxBlock),
      logits_(tile.count() * kMaxBlock),
      weights_(logits_.size()),
      rows_(tile.count()) {}

void BlockAttention::load(const float* k, const float* v, int32_t tokens) {
  const int32_t d = tile_.head_dim;
  tokens_ = tokens;
  for (int32_t i = 0; i < d; ++i) {
    double* row = k_transposed_.data() + static_cast<size_t>(i) * kMaxBlock;
    for (int32_t t = 0; t < tokens; ++t) row[t] = tile_.sm_scale * k[t * d + i];
  }
  for (int32_t t = 0; t < tokens; ++t) {
    std::copy(v + t * d, v + (t + 1) * d, v_.data() + t * value_stride_);
  }
  for (int64_t q = 0; q < tile_.count(); ++q) rows_[q] = logits_.data() + q * kMaxBlock;
  MatrixProduct product;
  product.a = tile_.q.data();
  product.a_stride = d;
  product.b = k_transposed_.data();
  product.c = rows_.data();
  product.rows = tile_.count();
  product.depth = d;
  product.n = kMaxBlock;
  multiply(product);
}

void BlockAttention::add_to(SoftmaxState* state, const Visibility* visible) {
  const auto n = static_cast<int64_t>(tile_.positions.size());
  int64_t count = 0;  // queries that see any of the block
  for (int64_t i = 0; i < n; ++i) {
    const int64_t p = tile_.positions[i];
    double mask[kMaxBlock];
    bool any = false;
    for (int32_t t = 0; t < tokens_; ++t) {
      const bool seen = p >= visible[t].first && p <= visible[t].last;
      mask[t] = seen ? 0.0 : kNotSeen;
      any |= seen;
    }
    if (!any) continue;
    std::fill(mask + tokens_, mask + kMaxBlock, kNotSeen);
    for (int32_t h = 0; h < tile_.heads; ++h) {
      const int64_t q = h * n + i;
      const double* logits = logits_.data() + q * kMaxBlock;
      double* w = weights_.data() + count * kMaxBlock;
      for (int32_t t = 0; t < kMaxBlock; ++t) w[t] = logits[t] + mask[t];
      if (state->weigh(q, w, kMaxBlock)) rows_[count++] = state->sums(q);
    }
  }
  MatrixProduct product;
  product.a = weights_.data();
  product.a_stride = kMaxBlock;
  product.b = v_.data();
  product.c = rows_.data();
  product.rows = count;
  product.depth = tokens_;
  product.n = value_stride_;
  product.accumulate = true;
  multiply(product);
}

}  // namespace tierkv::analysis
