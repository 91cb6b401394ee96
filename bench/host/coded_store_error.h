// Attention error of what a coded store holds of a dump, against the exact cache: mean over layers,
// query heads and dumped queries of norm(o - o') / norm(o), where each query sees the window move
// with it (attention_rel_error_online of docs/reference/presets-and-metrics.md): tokens newer than
// its position less the window are exact, all others as the store holds them. The up to 63 tokens
// that a store holds raw behind the window are so here, too.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/host/parallel.h"
#include "datasets/dump.h"
#include "store/coded/coded_fixed.h"
#include "store/coded/coded_host.h"
#include "tools/analysis/attention_error.h"

namespace tierkv {

struct ErrorSum {
  double error = 0;
  int64_t queries = 0;
  Status status = Status::ok();
};

// Block `block` of a row as the store holds it, [kBlockTokens, head_dim], means added.
inline Status stored_block(const CodedHostStore& store, int32_t row, Component c, int32_t block,
                           float* out) {
  const CodedView& s = store.view();
  const SequenceInfo& info = s.infos[row / s.rows_per_sequence()];
  std::vector<uint16_t> y(static_cast<size_t>(kBlockTokens) * s.head_dim);
  std::vector<int16_t> codes(y.size());
  const bool coded = (block + 1) * kBlockTokens <= info.window_first;
  if (!coded) {
    const int32_t end = std::min((block + 1) * kBlockTokens, info.num_tokens);
    for (int32_t p = block * kBlockTokens; p < end; ++p) {
      get_raw_token(s, row, info, c, p, &y[int64_t{p % kBlockTokens} * s.head_dim]);
    }
  } else if (is_fixed_block(s, row, block)) {
    if (Status r = read_block_values(s, store.books(), row, c, block, y.data()); !r) return r;
  } else if (Status r = read_block(s, store.books(), row, c, block, codes.data()); !r) {
    return r;
  }
  const bool steps = coded && !is_fixed_block(s, row, block);
  for (size_t i = 0; i < y.size(); ++i) {
    const float value = steps ? s.step(c, row) * codes[i] : half_to_float(y[i]);
    out[i] = value + s.means(c, row)[i % s.head_dim];
  }
  return Status::ok();
}

inline analysis::QueryTile query_tile(const CacheLayout& layout, const std::vector<float>& q,
                                      const std::vector<int32_t>& positions) {
  analysis::QueryTile tile;
  tile.heads = layout.group_size();
  tile.head_dim = layout.head_dim;
  tile.sm_scale = layout.sm_scale;
  tile.q.assign(q.begin(), q.end());
  tile.positions.assign(positions.begin(), positions.end());
  return tile;
}

// One row: (sequence, layer, kv_head) of the dump, in slot `sequence` of the store.
inline ErrorSum row_error(const datasets::DumpReader& dump, const CodedHostStore& store,
                          int32_t sequence, int32_t within) {
  const CacheLayout& layout = dump.info().layout;
  const int32_t heads = layout.num_kv_heads, dim = layout.head_dim, group = layout.group_size();
  const int32_t layer = within / heads, head = within % heads;
  const int64_t window = store.view().window_tokens;
  ErrorSum sum;
  RowData rows[2];
  std::vector<float> q;
  std::vector<int32_t> positions;
  sum.status = dump.read_row(sequence, layer, head, Component::kKey, &rows[0]);
  if (sum.status) sum.status = dump.read_row(sequence, layer, head, Component::kValue, &rows[1]);
  if (sum.status) sum.status = dump.read_queries(sequence, layer, head * group, group, &q);
  if (sum.status) sum.status = dump.read_query_positions(sequence, layer, &positions);
  if (!sum.status) return sum;
  const analysis::QueryTile tile = query_tile(layout, q, positions);
  analysis::BlockAttention attention(tile);
  analysis::SoftmaxState exact(tile.count(), dim), online(tile.count(), dim);
  std::vector<float> x[2], stored[2];
  for (int64_t first = 0; first < rows[0].tokens; first += kBlockTokens) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, rows[0].tokens - first));
    analysis::Visibility all[kBlockTokens], near[kBlockTokens], far[kBlockTokens];
    for (int32_t t = 0; t < n; ++t) {
      all[t].first = near[t].first = first + t;
      near[t].last = first + t + window - 1;
      far[t].first = first + t + window;
    }
    for (const Component c : {Component::kKey, Component::kValue}) {
      const auto i = static_cast<size_t>(c);
      x[i].resize(static_cast<size_t>(kBlockTokens) * dim);
      stored[i].resize(x[i].size());
      row_to_float(rows[i], first, n, x[i].data());
      sum.status = stored_block(store, sequence * store.view().rows_per_sequence() + within, c,
                                static_cast<int32_t>(first / kBlockTokens), stored[i].data());
      if (!sum.status) return sum;
    }
    attention.load(x[0].data(), x[1].data(), n);
    attention.add_to(&exact, all);
    attention.add_to(&online, near);
    attention.load(stored[0].data(), stored[1].data(), n);
    attention.add_to(&online, far);
  }
  std::vector<double> a(dim), b(dim);
  for (int64_t i = 0; i < tile.count(); ++i) {
    exact.output(i, a.data());
    online.output(i, b.data());
    double norm = 0, error = 0;
    for (int32_t d = 0; d < dim; ++d) norm += a[d] * a[d], error += (a[d] - b[d]) * (a[d] - b[d]);
    if (norm == 0) continue;
    sum.error += std::sqrt(error / norm);
    ++sum.queries;
  }
  return sum;
}

// Of all sequences, which lie in the store's slots in the dump's order.
inline Result<double> attention_error(const datasets::DumpReader& dump, const CodedHostStore& store,
                                      int32_t threads) {
  const auto rows = static_cast<int64_t>(store.view().rows_per_sequence());
  std::vector<ErrorSum> sums(dump.info().sequences.size() * rows);
  parallel_for(static_cast<int64_t>(sums.size()), threads, [&](int64_t i) {
    sums[i] =
        row_error(dump, store, static_cast<int32_t>(i / rows), static_cast<int32_t>(i % rows));
  });
  ErrorSum all;
  for (const ErrorSum& s : sums) {
    if (!s.status) return s.status;
    all.error += s.error;
    all.queries += s.queries;
  }
  return all.queries > 0 ? all.error / static_cast<double>(all.queries) : 0.0;
}

}  // namespace tierkv
