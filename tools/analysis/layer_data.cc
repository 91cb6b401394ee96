// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/layer_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "codec/host/parallel.h"
#include "codec/policy/significance.h"

namespace tierkv::analysis {
namespace {

std::string where(const datasets::DumpInfo& info, int32_t seq, int32_t layer) {
  return info.path + ": /seq/" + info.sequences[seq].id + "/layer/" + std::to_string(layer);
}

Status compute_significance(const datasets::DumpInfo& info, LayerData* data) {
  if (Status s = check_significance(info, data->seq, data->layer); !s) return s;
  const CacheLayout& layout = info.layout;
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    std::vector<float> keys(data->tokens * layout.head_dim);
    row_to_float(data->k[h], 0, data->tokens, keys.data());
    AttentionRow row;
    row.q = data->q[h].data();
    row.k = keys.data();
    row.group_size = layout.group_size();
    row.num_queries = row.num_tokens = static_cast<int32_t>(data->tokens);
    row.head_dim = layout.head_dim;
    row.sm_scale = layout.sm_scale;
    std::vector<double> exact(data->tokens);
    if (Status s = exact_significance(row, exact.data(), nullptr); !s) {
      return s.with_context(where(info, data->seq, data->layer) +
                            ": significance cannot be computed");
    }
    data->significance[h].assign(exact.begin(), exact.end());
  }
  return Status::ok();
}

}  // namespace

Status check_significance(const datasets::DumpInfo& info, int32_t seq, int32_t layer) {
  const datasets::LayerInfo& l = info.sequences[seq].layers[layer];
  if (l.has_significance || (l.has_q && l.num_queries == info.sequences[seq].num_tokens)) {
    return Status::ok();
  }
  return Status(StatusCode::kNotFound, where(info, seq, layer) +
                                           ": tiers need 'significance', or q for all positions to "
                                           "compute it from; the dump has neither");
}

bool wants_significance(const Scheme& scheme, const datasets::DumpInfo& info, int32_t seq,
                        int32_t layer) {
  if (scheme.needs_significance()) return true;
  return scheme.importance && check_significance(info, seq, layer).is_ok();
}

int64_t LayerData::dump_bytes(const datasets::DumpInfo& info, int32_t seq, int32_t layer) {
  const datasets::LayerInfo& l = info.sequences[seq].layers[layer];
  const int64_t kv = 2 * info.sequences[seq].num_tokens * info.layout.num_kv_heads;
  const int64_t q = l.num_queries * info.layout.num_q_heads;
  return (kv + q) * info.layout.head_dim * dtype_bytes(l.dtype);
}

void shape_layer(const datasets::DumpInfo& info, int32_t seq, int32_t layer, LayerData* out) {
  const int32_t heads = info.layout.num_kv_heads;
  out->seq = seq;
  out->layer = layer;
  out->tokens = info.sequences[seq].num_tokens;
  out->k.resize(heads);
  out->v.resize(heads);
  out->q.resize(heads);
  out->significance.resize(heads);
  for (int32_t h = 0; h < heads; ++h) {
    out->q[h].clear();
    out->significance[h].clear();
  }
  out->positions.clear();
  out->rope = rope_of(info, nullptr, layer);
}

Status load_component(datasets::DumpReader& reader, int32_t kv_head, Component c, LayerData* out) {
  RowData& row = (c == Component::kKey ? out->k : out->v)[kv_head];
  return reader.read_row(out->seq, out->layer, kv_head, c, &row);
}

Status load_queries(datasets::DumpReader& reader, int32_t kv_head, LayerData* out) {
  const datasets::DumpInfo& info = reader.info();
  if (!info.sequences[out->seq].layers[out->layer].has_q) return Status::ok();
  const int32_t group = info.layout.group_size();
  return reader.read_queries(out->seq, out->layer, kv_head * group, group, &out->q[kv_head]);
}

Status load_shared(datasets::DumpReader& reader, bool need_significance, LayerData* out) {
  const datasets::LayerInfo& l = reader.info().sequences[out->seq].layers[out->layer];
  if (l.has_q) {
    if (Status s = reader.read_query_positions(out->seq, out->layer, &out->positions); !s) return s;
  }
  if (!need_significance || !l.has_significance) return Status::ok();
  for (int32_t h = 0; h < reader.info().layout.num_kv_heads; ++h) {
    const Status s = reader.read_significance(out->seq, out->layer, h, &out->significance[h]);
    if (!s) return s;
  }
  return Status::ok();
}

Status complete_significance(const datasets::DumpInfo& info, bool need_significance,
                             LayerData* out) {
  if (!need_significance || info.sequences[out->seq].layers[out->layer].has_significance) {
    return Status::ok();
  }
  return compute_significance(info, out);
}

Status load_layer(datasets::DumpReader& reader, int32_t seq, int32_t layer, bool need_significance,
                  int32_t threads, LayerData* out) {
  shape_layer(reader.info(), seq, layer, out);
  std::vector<Status> status(int64_t{3} * reader.info().layout.num_kv_heads);
  parallel_for(static_cast<int64_t>(status.size()), threads, [&](int64_t i) {
    const auto h = static_cast<int32_t>(i / 3);
    status[i] = i % 3 == 0   ? load_component(reader, h, Component::kKey, out)
                : i % 3 == 1 ? load_component(reader, h, Component::kValue, out)
                             : load_queries(reader, h, out);
  });
  for (const Status& s : status) {
    if (!s) return s;
  }
  if (Status s = load_shared(reader, need_significance, out); !s) return s;
  return complete_significance(reader.info(), need_significance, out);
}

Status cannot_hold(StatusCode code, const LayerData& data, int32_t kv_head,
                   std::initializer_list<Component> components) {
  const std::string head = "kv head " + std::to_string(kv_head) + ": ";
  if (code != StatusCode::kOutOfRange && code != StatusCode::kNonFinite)
    return Status(code, head + "coding failed");
  float largest = -1;
  const char* what = "";
  int64_t token = 0;
  for (const Component c : components) {
    const RowData& row = (c == Component::kKey ? data.k : data.v)[kv_head];
    std::vector<float> x(row.head_dim);
    for (int64_t t = 0; t < data.tokens; ++t) {
      row_to_float(row, t, 1, x.data());
      for (const float value : x) {
        if (std::fabs(value) <= largest) continue;
        largest = std::fabs(value);
        what = c == Component::kKey ? "keys" : "values";
        token = t;
      }
    }
  }
  return Status(StatusCode::kOutOfRange,
                head + fmt::format("{} up to {:g} (token {}) are more than the format holds", what,
                                   largest, token));
}

Status check_unpruned(const datasets::DumpInfo& info) {
  for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
    const std::vector<datasets::LayerInfo>& layers = info.sequences[seq].layers;
    for (size_t l = 0; l < layers.size(); ++l) {
      if (!layers[l].has_pruned) continue;
      return Status(StatusCode::kUnsupported,
                    where(info, static_cast<int32_t>(seq), static_cast<int32_t>(l)) +
                        "/pruned: the dump has lost tokens, whose zeros are no data");
    }
  }
  return Status::ok();
}

RowProfile measure_row(const LayerData& data, int32_t kv_head, int32_t head_dim) {
  RowProfile row;
  std::vector<double> k_sum(head_dim, 0.0), v_sum(head_dim, 0.0);
  std::vector<float> x(head_dim);
  double v_squares = 0, q_squares = 0;
  for (int64_t t = 0; t < data.tokens; ++t) {
    row_to_float(data.k[kv_head], t, 1, x.data());
    for (int32_t d = 0; d < head_dim; ++d) k_sum[d] += x[d];
    row_to_float(data.v[kv_head], t, 1, x.data());
    for (int32_t d = 0; d < head_dim; ++d) {
      v_sum[d] += x[d];
      v_squares += static_cast<double>(x[d]) * x[d];
    }
  }
  const auto n = static_cast<double>(std::max<int64_t>(1, data.tokens));
  for (int32_t d = 0; d < head_dim; ++d) {
    row.key_mean.push_back(static_cast<float>(k_sum[d] / n));
    row.value_mean.push_back(static_cast<float>(v_sum[d] / n));
  }
  row.value_signal = v_squares / n;
  for (const float v : data.q[kv_head]) q_squares += static_cast<double>(v) * v;
  const double queries = static_cast<double>(data.q[kv_head].size()) / head_dim;
  row.query_trace = queries > 0 ? q_squares / queries : 0;
  return row;
}

QueryTile make_tile(const LayerData& data, int32_t kv_head, const CacheLayout& layout,
                    int64_t first, int64_t count) {
  QueryTile tile;
  tile.heads = layout.group_size();
  tile.head_dim = layout.head_dim;
  tile.sm_scale = layout.sm_scale;
  const auto total = static_cast<int64_t>(data.positions.size());
  count = std::min(count, total - first);
  tile.positions.assign(data.positions.begin() + first, data.positions.begin() + first + count);
  tile.q.reserve(tile.count() * layout.head_dim);
  for (int32_t h = 0; h < tile.heads; ++h) {
    const float* q = data.q[kv_head].data() + (h * total + first) * layout.head_dim;
    tile.q.insert(tile.q.end(), q, q + count * layout.head_dim);
  }
  return tile;
}

}  // namespace tierkv::analysis
