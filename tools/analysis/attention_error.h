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
  // Adds tokens with logits s [tokens] (minus infinity: not seen) and values v [tokens, head_dim]
  // to query q.
  void absorb(int64_t q, const double* s, int32_t tokens, const double* v);
  void merge(const SoftmaxState& other);
  // Output of query q into out [head_dim]; zeros when it saw nothing.
  void output(int64_t q, double* out) const;

 private:
  int32_t head_dim_;
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
  std::vector<double> k_transposed_;  // [head_dim, kMaxBlock]
  std::vector<double> v_;             // [kMaxBlock, head_dim]
  std::vector<double> logits_;        // [count, kMaxBlock]
};

}  // namespace tierkv::analysis
