// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/survey.h"

#include <algorithm>
#include <cmath>

#include "codec/host/parallel.h"
#include "tools/analysis/layer_data.h"
#include "tools/analysis/query_weights.h"

namespace tierkv::analysis {
namespace {

// The smallest share of n numbers that sums to kCritical of them all; sorts them.
double critical_share(double* x, int64_t n) {
  std::sort(x, x + n, std::greater<>());
  double total = 0, sum = 0;
  for (int64_t i = 0; i < n; ++i) total += x[i];
  int64_t count = 0;
  while (count < n && sum < Survey::kCritical * total) sum += x[count++];
  return static_cast<double>(count) / static_cast<double>(n);
}

// Mean over at most kQueriesPerRow positions and the heads of the group.
double critical_of_queries(const LayerData& data, int32_t kv_head, const CacheLayout& layout) {
  const auto positions = static_cast<int64_t>(data.positions.size());
  const int64_t count = std::min<int64_t>(positions, Survey::kQueriesPerRow);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const QueryTile tile = make_tile(data, kv_head, layout, i * positions / count, 1);
    QueryWeights attention(tile, data.k[kv_head]);
    for (int64_t q = 0; q < tile.count(); ++q) {
      int64_t seen = 0;
      double* w = attention.weights(q, &seen);
      sum += critical_share(w, seen) / static_cast<double>(tile.count());
    }
  }
  return sum / static_cast<double>(count);
}

double norm(const float* x, int32_t d) {
  double squares = 0;
  for (int32_t i = 0; i < d; ++i) squares += static_cast<double>(x[i]) * x[i];
  return std::sqrt(squares);
}

struct RowSurvey {
  LogHistogram significance, value_norm, key_norm;
  double critical_of_query = 0, critical_received = 0;
};

RowSurvey survey_row(const LayerData& data, int32_t h, const CacheLayout& layout) {
  RowSurvey row;
  std::vector<float> x(layout.head_dim);
  for (int64_t t = 0; t < data.tokens; ++t) {
    row_to_float(data.k[h], t, 1, x.data());
    row.key_norm.add(norm(x.data(), layout.head_dim));
    row_to_float(data.v[h], t, 1, x.data());
    row.value_norm.add(norm(x.data(), layout.head_dim));
  }
  if (data.has_queries()) row.critical_of_query = critical_of_queries(data, h, layout);
  if (data.significance[h].empty()) return row;
  std::vector<double> received(data.tokens);
  for (int64_t t = 0; t < data.tokens; ++t) {
    const double s = data.significance[h][t];
    row.significance.add(s);
    received[t] = s * static_cast<double>(data.tokens - 1 - t);
  }
  row.critical_received = critical_share(received.data(), data.tokens);
  return row;
}

SignificanceTrace trace_of(const datasets::DumpInfo& info, const LayerData& data) {
  SignificanceTrace trace;
  trace.file = info.path;
  trace.seq = info.sequences[data.seq].id;
  trace.layer = data.layer;
  trace.tokens = data.tokens;
  const int64_t groups = std::min<int64_t>(data.tokens, Survey::kTraceGroups);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * data.tokens / groups, end = (g + 1) * data.tokens / groups;
    std::vector<float> s(data.significance[0].begin() + first, data.significance[0].begin() + end);
    std::sort(s.begin(), s.end());
    trace.groups.push_back({first, s[s.size() / 2], s.back()});
  }
  return trace;
}

}  // namespace

void LogHistogram::add(double x) {
  if (!(x > 0)) {
    ++zeros;
    return;
  }
  const double bin = (std::log10(x) - kFirstDecade) * kBinsPerDecade;
  ++bins[static_cast<size_t>(std::clamp(bin, 0.0, kBins - 1.0))];
}
void LogHistogram::add(const LogHistogram& other) {
  for (int32_t i = 0; i < kBins; ++i) bins[i] += other.bins[i];
  zeros += other.zeros;
}
int64_t LogHistogram::total() const {
  int64_t n = 0;
  for (const int64_t b : bins) n += b;
  return n;
}

void Spread::add(double x) {
  sum += x;
  squares += x * x;
  ++count;
}
void Spread::add(const Spread& other) {
  sum += other.sum;
  squares += other.squares;
  count += other.count;
}
double Spread::deviation() const {
  if (count < 2) return 0;
  return std::sqrt(std::max(0.0, squares / static_cast<double>(count) - mean() * mean()));
}

void Survey::add(const Survey& other) {
  for (size_t l = 0; l < significance.size(); ++l) {
    significance[l].add(other.significance[l]);
    value_norm[l].add(other.value_norm[l]);
    key_norm[l].add(other.key_norm[l]);
  }
  for (size_t r = 0; r < critical_of_query.size(); ++r) {
    critical_of_query[r].add(other.critical_of_query[r]);
    critical_received[r].add(other.critical_received[r]);
  }
  if (trace.groups.empty()) trace = other.trace;
}

void join_survey(Survey survey, std::vector<Survey>* all) {
  const auto same = std::find_if(all->begin(), all->end(), [&](const Survey& o) {
    return o.num_layers == survey.num_layers && o.num_kv_heads == survey.num_kv_heads;
  });
  if (same == all->end()) {
    all->push_back(std::move(survey));
  } else {
    same->add(survey);
  }
}

Result<Survey> survey(datasets::DumpReader& reader, const AnalyzeOptions& options) {
  const datasets::DumpInfo& info = reader.info();
  if (Status s = check_options(info, options); !s) return s;
  Survey out;
  out.num_layers = info.layout.num_layers;
  out.num_kv_heads = info.layout.num_kv_heads;
  out.significance.resize(out.num_layers);
  out.value_norm.resize(out.num_layers);
  out.key_norm.resize(out.num_layers);
  out.critical_of_query.resize(static_cast<size_t>(out.num_layers) * out.num_kv_heads);
  out.critical_received.resize(out.critical_of_query.size());
  const int32_t end = options.end_layer(info.layout), middle = (options.first_layer + end - 1) / 2;
  for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
    if (!options.only_sequence.empty() && info.sequences[seq].id != options.only_sequence) continue;
    for (int32_t l = options.first_layer; l < end; ++l) {
      const auto index = static_cast<int32_t>(seq);
      const bool significance = info.sequences[seq].layers[l].has_significance;
      LayerData data;
      if (Status s = load_layer(reader, index, l, significance, options.threads, &data); !s)
        return s;
      std::vector<RowSurvey> rows(out.num_kv_heads);
      parallel_for(out.num_kv_heads, options.threads, [&](int64_t h) {
        rows[h] = survey_row(data, static_cast<int32_t>(h), info.layout);
      });
      for (int32_t h = 0; h < out.num_kv_heads; ++h) {
        const RowSurvey& row = rows[h];
        out.significance[l].add(row.significance);
        out.value_norm[l].add(row.value_norm);
        out.key_norm[l].add(row.key_norm);
        const size_t r = static_cast<size_t>(l) * out.num_kv_heads + h;
        if (data.has_queries()) out.critical_of_query[r].add(row.critical_of_query);
        if (significance) out.critical_received[r].add(row.critical_received);
      }
      if (significance && l == middle && out.trace.groups.empty()) {
        out.trace = trace_of(info, data);
      }
    }
  }
  return out;
}

}  // namespace tierkv::analysis
