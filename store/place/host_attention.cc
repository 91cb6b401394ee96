// SPDX-License-Identifier: Apache-2.0
// Attention of a store in host memory: the plain softmax, in double, over all that a row holds.
#include <algorithm>
#include <cmath>
#include <string>

#include "codec/format/element.h"
#include "store/place/host_place.h"

namespace tierkv::store {
namespace {

Status check_queries(const LayerAttend& call, int64_t values, int32_t num_q_heads) {
  const auto* q = static_cast<const uint16_t*>(call.q);
  for (int64_t i = 0; i < values; ++i) {
    if (is_finite(raw_to_float(call.dtype, q[i]))) continue;
    return Status(StatusCode::kNonFinite, "q: value " + std::to_string(i) + " is not finite");
  }
  for (int32_t h = 0; call.sinks != nullptr && h < num_q_heads; ++h) {
    const float x = call.sinks[h];
    if (is_finite(x) || x == -INFINITY) continue;
    return Status(StatusCode::kNonFinite, "sinks: that of q head " + std::to_string(h));
  }
  return Status::ok();
}

// The tokens that a query may see.
struct RowTokens {
  std::vector<float> k, v;  // [tokens, head_dim]
  std::vector<uint8_t> pruned;
};

// Probabilities [seen] of the row's first tokens, and the lse.
double softmax(const RowTokens& row, const std::vector<double>& q, double sink,
               std::vector<double>* p) {
  double largest = sink;
  for (size_t i = 0; i < p->size(); ++i) {
    double dot = row.pruned[i] != 0 ? -INFINITY : 0;
    for (size_t d = 0; d < q.size(); ++d)
      dot += q[d] * static_cast<double>(row.k[i * q.size() + d]);
    (*p)[i] = dot;
    largest = std::fmax(largest, dot);
  }
  if (largest == -INFINITY) {
    std::fill(p->begin(), p->end(), 0.0);
    return largest;
  }
  double sum = std::exp(sink - largest);
  for (double& x : *p) sum += x = std::exp(x - largest);
  for (double& x : *p) x /= sum;
  return largest + std::log(sum);
}

// A query counts for the tokens before its own. `scores` are those from position `first` on.
void count_query(const std::vector<float>& probabilities, int32_t first, int32_t position,
                 std::vector<RawScore>* scores) {
  for (int32_t p = first; p < position; ++p) {
    RawScore& score = (*scores)[p - first];
    if (score.count < 0) continue;
    score.sum = std::fmin(score.sum + probabilities[p], kMostSum);
    score.count = least(score.count + 1, kMostCounted);
  }
}

}  // namespace

Status HostPlace::attend(const LayerAttend& call, const LayerMoves& moves) {
  const CacheLayout& shape = config_.layout;
  const auto count = static_cast<int64_t>(moves.size());
  const int64_t values = count * call.q_len * shape.num_q_heads * shape.head_dim;
  if (Status s = check_queries(call, values, shape.num_q_heads); !s) return s;
  const int64_t heads = shape.num_kv_heads;
  std::vector<std::vector<RawScore>> scores(count * heads);
  for (int64_t row = 0; row < count * heads; ++row) {
    const int64_t i = row / heads;
    attend_row(call, moves[i], i, static_cast<int32_t>(row % heads), &scores[row]);
  }
  for (int64_t row = 0; call.count_query && row < count * heads; ++row) {
    const LayerMove& move = moves[row / heads];
    int32_t p = ring_first(layout_.laws, move.from);
    for (const RawScore& score : scores[row]) {
      write_score(layout_, raw_row(move, static_cast<int32_t>(row % heads)), p++, score);
    }
  }
  return Status::ok();
}

void HostPlace::attend_row(const LayerAttend& call, const LayerMove& move, int64_t entry,
                           int32_t kv_head, std::vector<RawScore>* scores) const {
  const CacheLayout& shape = config_.layout;
  const int32_t dim = shape.head_dim, group = shape.group_size(), tokens = move.from.tokens;
  RowTokens row;
  row.k.resize(int64_t{tokens} * dim);
  row.v.resize(row.k.size());
  row.pruned.resize(tokens);
  const int32_t ring = ring_first(layout_.laws, move.from);
  for (int32_t p = ring; call.count_query && p < tokens; ++p) {
    scores->push_back(read_score(layout_, raw_row(move, kv_head), p));
  }
  read_row(move, kv_head, {0, tokens}, row.k.data(), row.v.data(), row.pruned.data());
  std::vector<double> q(dim), p;
  for (int32_t j = 0; j < call.q_len; ++j) {
    const int32_t position = tokens - call.q_len + j;
    std::vector<float> largest(tokens, 0.0f);
    p.resize(position + 1);
    for (int32_t g = 0; g < group; ++g) {
      const int32_t head = kv_head * group + g;
      const int64_t line = (entry * call.q_len + j) * shape.num_q_heads + head;
      const auto* from = static_cast<const uint16_t*>(call.q) + line * dim;
      for (int32_t d = 0; d < dim; ++d) {
        q[d] = static_cast<double>(raw_to_float(call.dtype, from[d])) * shape.sm_scale;
      }
      const double lse = softmax(
          row, q, call.sinks == nullptr ? -INFINITY : static_cast<double>(call.sinks[head]), &p);
      for (int32_t d = 0; d < dim; ++d) {
        double sum = 0;
        for (size_t i = 0; i < p.size(); ++i) {
          sum += p[i] * static_cast<double>(row.v[i * static_cast<size_t>(dim) + d]);
        }
        static_cast<uint16_t*>(call.out)[line * dim + d] =
            output_to_raw(call.dtype, static_cast<float>(sum));
      }
      if (call.lse != nullptr) call.lse[line] = static_cast<float>(lse);
      for (size_t i = 0; i < p.size(); ++i) {
        largest[i] = std::fmax(largest[i], static_cast<float>(p[i]));
      }
    }
    if (call.probabilities != nullptr) {
      const int64_t to = (j * int64_t{call.sequences.count} + entry) * shape.num_kv_heads + kv_head;
      float* const line = call.probabilities + to * call.stride;
      std::fill(std::copy(largest.begin(), largest.end(), line), line + call.stride, 0.0f);
    }
    if (call.count_query) count_query(largest, ring, position, scores);
  }
}

Status HostPlace::find_significance(const LayerAppend& call, const LayerMoves& moves,
                                    std::vector<float>* significance) const {
  const int64_t per_sequence = int64_t{config_.layout.num_kv_heads} * call.tokens;
  significance->resize(moves.size() * per_sequence);
  for (size_t i = 0; i < moves.size(); ++i) {
    const SignificanceCall p = chunk_queries(config_.layout, call, i);
    Status s = prompt_significance_host(p, significance->data() + i * per_sequence);
    if (!s) return s.with_context("q");
  }
  return Status::ok();
}

}  // namespace tierkv::store
