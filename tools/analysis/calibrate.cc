// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/calibrate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "codec/format/rope_turn.h"
#include "codec/host/parallel.h"
#include "tierkv/half.h"
#include "tools/analysis/analyze.h"
#include "tools/analysis/layer_data.h"

namespace tierkv::analysis {
namespace {

void add_squares(const float* x, int64_t n, std::vector<double>* squares) {
  const size_t d = squares->size();
  for (int64_t t = 0; t < n; ++t, x += d) {
    for (size_t i = 0; i < d; ++i) (*squares)[i] += static_cast<double>(x[i]) * x[i];
  }
}

// Sums over tokens and queries of one (layer, kv_head), by channel.
struct Moments {
  int64_t tokens = 0, queries = 0;
  std::vector<double> k, v;
  std::vector<double> kk, vv, qq;  // of squares

  explicit Moments(int32_t d) : k(d), v(d), kk(d), vv(d), qq(d) {}

  // The sinks are left out, unless the sequence has nothing else.
  void add(const LayerData& l, int32_t h) {
    constexpr int64_t kRows = 256;
    const auto d = static_cast<int64_t>(k.size());
    const int64_t first = l.tokens > kCalibrationSinks ? kCalibrationSinks : 0;
    std::vector<float> x(kRows * d);
    const auto add_rows = [&](const RowData& row, std::vector<double>* sum,
                              std::vector<double>* squares) {
      for (int64_t t = first; t < l.tokens; t += kRows) {
        const int64_t n = std::min(kRows, l.tokens - t);
        row_to_float(row, t, n, x.data());
        for (int64_t i = 0; i < n * d; ++i) (*sum)[i % d] += x[i];
        add_squares(x.data(), n, squares);
      }
    };
    add_rows(l.k[h], &k, &kk);
    add_rows(l.v[h], &v, &vv);
    tokens += l.tokens - first;
    const auto in_head = static_cast<int64_t>(l.positions.size());
    int64_t first_query =
        std::lower_bound(l.positions.begin(), l.positions.end(), first) - l.positions.begin();
    if (first_query == in_head) first_query = 0;
    const auto all = static_cast<int64_t>(l.q[h].size()) / d;
    for (int64_t head = 0; head < all; head += in_head) {
      add_squares(l.q[h].data() + (head + first_query) * d, in_head - first_query, &qq);
      queries += in_head - first_query;
    }
  }
};

// Which channel no profile can hold: its mean, and steps that suit it, would be beyond fp16. Empty:
// none.
std::string too_large(const Moments& m) {
  const std::tuple<const char*, const std::vector<double>&, int64_t> sums[] = {
      {"keys", m.kk, m.tokens}, {"values", m.vv, m.tokens}, {"queries", m.qq, m.queries}};
  for (const auto& [name, squares, n] : sums) {
    const auto most = std::max_element(squares.begin(), squares.end());
    const double rms = std::sqrt(*most / static_cast<double>(n));
    if (n == 0 || rms <= kMaxHalf) continue;
    return fmt::format("{} of a root mean square of {:.6g} in channel {}, beyond fp16 ({})", name,
                       rms, most - squares.begin(), kMaxHalf);
  }
  return "";
}

std::vector<float> mean_of(const std::vector<double>& sums, int64_t n) {
  std::vector<float> out;
  for (const double s : sums) out.push_back(static_cast<float>(s / static_cast<double>(n)));
  return out;
}

double total_mean(const std::vector<double>& sums, int64_t n) {
  return std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(n);
}

RowProfile finish_row(const Moments& m) {
  RowProfile row;
  row.key_mean = mean_of(m.k, m.tokens);
  row.value_mean = mean_of(m.v, m.tokens);
  row.value_signal = total_mean(m.vv, m.tokens);
  if (m.queries == 0) return row;
  row.query_trace = total_mean(m.qq, m.queries);
  row.query_energy = mean_of(m.qq, m.queries);
  return row;
}

// Mean online attention error of each preset over all dumps.
Result<std::vector<double>> errors_of(std::vector<datasets::DumpReader>& dumps,
                                      const std::vector<std::string>& presets, int32_t threads) {
  AnalyzeOptions options;
  options.threads = threads;
  for (const std::string& text : presets) {
    Result<Preset> p = parse_preset(text);
    if (!p) return p.status();
    options.presets.push_back(*p);
  }
  std::vector<Tally> sums(presets.size());
  for (datasets::DumpReader& dump : dumps) {
    Result<std::vector<AnalyzeResult>> results = analyze(dump, options);
    if (!results) return results.status();
    for (const AnalyzeResult& r : *results) {
      if (r.seq != "all") continue;
      for (size_t p = 0; p < presets.size(); ++p) {
        if (presets[p] == r.preset) sums[p].add(r.tally);
      }
    }
  }
  std::vector<double> errors;
  for (const Tally& t : sums) {
    const std::optional<double> e = attention_error_online(t);
    if (!e)
      return Status(StatusCode::kNotFound, "thresholds need dumped queries; the dumps have none");
    errors.push_back(*e);
  }
  return errors;
}

Status choose_thresholds(std::vector<datasets::DumpReader>& dumps, const CalibrateOptions& options,
                         Profile* profile) {
  static const std::vector<double> kHigh = {0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 1e9};
  std::vector<std::string> presets;
  for (const double a : kHigh) presets.push_back("diffkv:alpha_h=" + std::to_string(a));
  Result<std::vector<double>> errors = errors_of(dumps, presets, options.threads);
  if (!errors) return errors.status();
  const double all_high = errors->front(), all_low = errors->back();
  const double limit = all_high + options.error_budget * (all_low - all_high);
  profile->alpha_high = 0;
  double reached = all_high;
  for (size_t i = 0; i + 1 < kHigh.size(); ++i) {
    if ((*errors)[i] > limit) break;
    profile->alpha_high = kHigh[i];
    reached = (*errors)[i];
  }
  profile->alpha_low = 0;
  if (options.prune_budget <= 0) return Status::ok();
  static const std::vector<double> kLow = {0.01, 0.02, 0.04, 0.1, 0.2, 0.3};
  presets.clear();
  for (const double a : kLow) {
    presets.push_back("diffkv:alpha_h=" + std::to_string(std::max(a, profile->alpha_high)) +
                      ",alpha_l=" + std::to_string(a));
  }
  errors = errors_of(dumps, presets, options.threads);
  if (!errors) return errors.status();
  for (size_t i = 0; i < kLow.size(); ++i) {
    if ((*errors)[i] > reached * (1 + options.prune_budget) || kLow[i] > profile->alpha_high) break;
    profile->alpha_low = kLow[i];
  }
  return Status::ok();
}

// The model that all dumps are of.
Status name_model(const std::vector<datasets::DumpReader>& dumps, const CalibrateOptions& options,
                  Profile* profile) {
  const datasets::DumpInfo& first = dumps.front().info();
  profile->model_id = options.model_id.empty() ? first.model_id : options.model_id;
  profile->num_layers = first.layout.num_layers;
  profile->num_q_heads = first.layout.num_q_heads;
  profile->num_kv_heads = first.layout.num_kv_heads;
  profile->head_dim = first.layout.head_dim;
  profile->sm_scale = first.layout.sm_scale;
  if (profile->model_id.empty()) {
    return Status(StatusCode::kInvalidArgument,
                  first.path + ": has no model_id, which a profile needs; give one (--model-id)");
  }
  for (const datasets::DumpReader& dump : dumps) {
    const datasets::DumpInfo& info = dump.info();
    if (profile->rope.empty()) profile->rope = info.rope;
    const std::string& id = options.model_id.empty() ? info.model_id : options.model_id;
    const Status s = profile->check_model(info.layout, id);
    if (!s || id.empty()) {
      return Status(StatusCode::kInvalidArgument,
                    info.path + ": another model than " + first.path +
                        (s ? ": it has no model_id" : ": " + s.message()));
    }
    if (info.layout.rope_applied != first.layout.rope_applied) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{}: rope_applied is {}, unlike that of {}", info.path,
                                info.layout.rope_applied ? 1 : 0, first.path));
    }
  }
  return Status::ok();
}

// Both dims of a pair get the mean of the two energies.
void share_energies(const Rope* rope, RowProfile* row) {
  const int32_t pairs = rope == nullptr ? 0 : rope->rotary_dims / 2;
  for (int32_t i = 0; i < pairs; ++i) {
    float& a = row->query_energy[pair_first(rope->pairing, i)];
    float& b = row->query_energy[pair_second(rope->pairing, pairs, i)];
    a = b = (a + b) / 2;
  }
}

}  // namespace

Result<Profile> calibrate(std::vector<datasets::DumpReader>& dumps,
                          const CalibrateOptions& options) {
  Profile profile;
  if (Status s = name_model(dumps, options, &profile); !s) return s;
  for (const datasets::DumpReader& dump : dumps) {
    if (Status s = check_rope(dump.info(), &profile); !s) return s;
    if (Status s = check_unpruned(dump.info()); !s) return s;
  }
  const CacheLayout& layout = dumps.front().info().layout;
  const int32_t heads = layout.num_kv_heads;
  std::vector<Moments> moments(layout.num_layers * heads, Moments(layout.head_dim));
  for (size_t i = 0; i < dumps.size(); ++i) {
    const datasets::DumpInfo& info = dumps[i].info();
    for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
      for (int32_t l = 0; l < layout.num_layers; ++l) {
        LayerData data;
        if (Status s =
                load_layer(dumps[i], static_cast<int32_t>(seq), l, false, options.threads, &data);
            !s) {
          return s;
        }
        if (!data.has_queries()) {
          return Status(StatusCode::kNotFound, info.path + ": /seq/" + info.sequences[seq].id +
                                                   "/layer/" + std::to_string(l) +
                                                   " has no q; calibration needs queries");
        }
        parallel_for(heads, options.threads,
                     [&](int64_t h) { moments[l * heads + h].add(data, static_cast<int32_t>(h)); });
        for (int32_t h = 0; h < heads; ++h) {
          const std::string why = too_large(moments[l * heads + h]);
          if (why.empty()) continue;
          return Status(StatusCode::kOutOfRange,
                        fmt::format("{}: /seq/{}/layer/{}: kv head {} has {}", info.path,
                                    info.sequences[seq].id, l, h, why));
        }
      }
    }
    if (options.progress)
      options.progress(0.5 * static_cast<double>(i + 1) / static_cast<double>(dumps.size()));
  }
  profile.rows.resize(moments.size());
  parallel_for(static_cast<int64_t>(moments.size()), options.threads, [&](int64_t i) {
    profile.rows[i] = finish_row(moments[i]);
    share_energies(profile.rope_of(static_cast<int32_t>(i / heads)), &profile.rows[i]);
    if (!layout.rope_applied) profile.rows[i].key_mean_before_rope = profile.rows[i].key_mean;
  });
  if (options.thresholds) {
    if (Status s = choose_thresholds(dumps, options, &profile); !s) {
      if (s.code() != StatusCode::kNotFound) return s;
      return Status(s.code(), s.message() +
                                  "; leave the thresholds out (--no-thresholds, in Python "
                                  "thresholds=False) where dumps cannot tell them");
    }
  }
  if (options.progress) options.progress(1);
  return profile;
}

}  // namespace tierkv::analysis
