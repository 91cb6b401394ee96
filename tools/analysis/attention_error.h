// SPDX-License-Identifier: Apache-2.0
// Attention of a set of queries over a row that is handed in block by block, in double, in several
// forms at once: exact, as stored (plain) and with the window moving with each query (online).
// Partial softmax states are merged at the end, so the row never exists decoded as a whole.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace tierkv::analysis {

// Query positions that one token may be seen by: p in [first, last].
struct Visibility {
  int64_t first = 0;
  int64_t last = std::numeric_limits<int64_t>::max();
};

// Unnormalised softmax state of every query: m (running maximum), l (sum of weights), o (weighted
// sum of values). Law: absorb(blocks A then B) == merge(absorb(A), absorb(B)) up to rounding.
class SoftmaxState {
 public:
  SoftmaxState(int64_t queries, int32_t head_dim);
  // Turns the logits s [n] of query q (minus infinity: not seen; n a multiple of kDoubleTile) into
  // weights that its sums() may be increased by; false, and s untouched, where it sees none.
  bool weigh(int64_t q, double* s, int32_t n);
  // Weighted sum of values of query q, head_dim doubles, padded to kDoubleTile with zeros.
  double* sums(int64_t q) { return o_.data() + q * stride_; }
  void merge(const SoftmaxState& other);
  // Output of query q into out [head_dim]; zeros when it saw nothing.
  void output(int64_t q, double* out) const;

 private:
  int32_t head_dim_;
  int64_t stride_;
  std::vector<double> m_, l_, o_;
};

// q [heads, positions.size(), head_dim] of one kv_head's group.
struct QueryTile {
  int32_t heads = 0;
  int32_t head_dim = 0;
  double sm_scale = 1;
  std::vector<double> q;
  std::vector<int64_t> positions;  // strictly increasing

  int64_t count() const { return heads * static_cast<int64_t>(positions.size()); }
};

// Logits of one block of at most kMaxBlock tokens for every query of a tile, computed once and used
// by several states.
class BlockAttention {
 public:
  static constexpr int32_t kMaxBlock = 64;
  explicit BlockAttention(const QueryTile& tile);
  // k, v [tokens, head_dim] as decoded.
  void load(const float* k, const float* v, int32_t tokens);
  // Adds the loaded block to `state`; token t is seen by the queries at positions in visible[t].
  void add_to(SoftmaxState* state, const Visibility* visible);

 private:
  const QueryTile& tile_;
  int32_t tokens_ = 0;
  int64_t value_stride_;              // head_dim padded to kDoubleTile
  std::vector<double> k_transposed_;  // [head_dim, kMaxBlock]
  std::vector<double> v_;             // [kMaxBlock, value_stride_], zeros behind head_dim
  std::vector<double> logits_;        // [count, kMaxBlock]
  std::vector<double> weights_;       // [count, kMaxBlock] of the queries that see the block
  std::vector<double*> rows_;         // [count] scratch
};

}  // namespace tierkv::analysis
