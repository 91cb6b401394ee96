// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/baselines/eviction.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tools/analysis/query_weights.h"

namespace tierkv::analysis {
namespace {

constexpr int64_t kPooledTokens = 7;  // SnapKV's kernel

// Softmax weights of the newest `window` queries, summed over them and the group's heads.
Status votes(const LayerData& data, int32_t kv_head, const CacheLayout& layout, int64_t window,
             std::vector<double>* out) {
  const auto positions = static_cast<int64_t>(data.positions.size());
  const int64_t n = std::min(window, data.tokens);
  if (positions < n || data.positions[positions - n] != data.tokens - n) {
    return Status(StatusCode::kNotFound,
                  "q of the newest " + std::to_string(n) + " positions is not there");
  }
  out->assign(data.tokens, 0.0);
  constexpr int64_t kAtOnce = 8;  // positions, so that long rows do not take much memory
  for (int64_t i = 0; i < n; i += kAtOnce) {
    const QueryTile tile =
        make_tile(data, kv_head, layout, positions - n + i, std::min(kAtOnce, n - i));
    QueryWeights attention(tile, data.k[kv_head]);
    for (int64_t q = 0; q < tile.count(); ++q) {
      int64_t seen = 0;
      const double* w = attention.weights(q, &seen);
      double sum = 0;
      for (int64_t t = 0; t < seen; ++t) sum += w[t];
      for (int64_t t = 0; t < seen; ++t) (*out)[t] += w[t] / sum;
    }
  }
  return Status::ok();
}

// Mean over kPooledTokens neighbours; what lies outside counts as 0.
std::vector<double> pooled(const std::vector<double>& x, int64_t n) {
  std::vector<double> out(n);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t first = std::max<int64_t>(0, t - kPooledTokens / 2);
    const int64_t last = std::min<int64_t>(n - 1, t + kPooledTokens / 2);
    for (int64_t i = first; i <= last; ++i) out[t] += x[i];
    out[t] /= kPooledTokens;
  }
  return out;
}

}  // namespace

Status check_eviction(const Scheme& scheme, const datasets::DumpInfo& info, int32_t seq,
                      int32_t layer) {
  if (scheme.eviction == Eviction::kH2o) return check_significance(info, seq, layer);
  if (scheme.eviction != Eviction::kSnapKv) return Status::ok();
  const datasets::SequenceInfo& s = info.sequences[seq];
  if (s.layers[layer].num_queries >= std::min<int64_t>(scheme.policy.window_tokens, s.num_tokens)) {
    return Status::ok();
  }
  return Status(StatusCode::kNotFound,
                info.path + ": /seq/" + s.id + "/layer/" + std::to_string(layer) +
                    ": snapkv needs q of the newest " +
                    std::to_string(scheme.policy.window_tokens) + " positions");
}

Status plan_eviction(const Scheme& scheme, const LayerData& data, int32_t kv_head,
                     const CacheLayout& layout, RowPlan* plan) {
  const int64_t tokens = data.tokens;
  const int64_t kept =
      std::max<int64_t>(1, std::llround(scheme.keep * static_cast<double>(tokens)));
  const bool h2o = scheme.eviction == Eviction::kH2o;
  const int64_t recent = h2o ? kept / 2 : std::min<int64_t>(scheme.policy.window_tokens, kept);
  std::vector<double> scores;
  if (h2o) {
    for (int64_t t = 0; t < tokens; ++t) {
      scores.push_back(static_cast<double>(data.significance[kv_head][t]) *
                       static_cast<double>(tokens - 1 - t));
    }
  } else {
    if (Status s = votes(data, kv_head, layout, scheme.policy.window_tokens, &scores); !s) return s;
    scores = pooled(scores, tokens - recent);
  }
  plan->tokens = tokens;
  plan->body_begin = 0;
  plan->body_end = plan->key_body_end = tokens - recent;
  plan->tiers.assign(tokens, Tier::kWindow);
  std::fill(plan->tiers.begin(), plan->tiers.begin() + plan->body_end, Tier::kPruned);
  std::vector<int64_t> order(plan->body_end);
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  for (int64_t i = 0; i < kept - recent; ++i) plan->tiers[order[i]] = Tier::kHigh;
  plan->count = {recent, kept - recent, 0, tokens - kept};
  return Status::ok();
}

}  // namespace tierkv::analysis
