// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/detail_json.h"

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

namespace tierkv::analysis {
namespace {

using Json = nlohmann::ordered_json;

Json matrix(int32_t layers, int32_t heads, const std::function<Json(size_t)>& cell) {
  Json rows = Json::array();
  for (int32_t l = 0; l < layers; ++l) {
    Json row = Json::array();
    for (int32_t h = 0; h < heads; ++h) row.push_back(cell(static_cast<size_t>(l) * heads + h));
    rows.push_back(std::move(row));
  }
  return rows;
}

Json counts_json(const CodeCounts& counts) {
  Json j = Json::array();
  for (const auto& [code, count] : counts) j.push_back({code, count});
  return j;
}

Json errors_json(const std::array<PositionErrors::Squares, PositionErrors::kBins>& bins) {
  Json j = Json::array();
  for (const PositionErrors::Squares& s : bins)
    j.push_back(s.norm > 0 ? Json(std::sqrt(s.error / s.norm)) : Json(nullptr));
  return j;
}

Json histogram_json(const LogHistogram& histogram) {
  CodeCounts counts;
  for (int32_t i = 0; i < LogHistogram::kBins; ++i) {
    if (histogram.bins[i] > 0) counts[i] = histogram.bins[i];
  }
  return counts_json(counts);
}

// Means by head; means and standard deviations by layer, over its heads and all sequences.
Json critical_json(const Survey& s, const std::vector<Spread>& rows) {
  Json j, means = Json::array(), deviations = Json::array();
  j["mean"] = matrix(s.num_layers, s.num_kv_heads, [&](size_t row) {
    return rows[row].count > 0 ? Json(rows[row].mean()) : Json(nullptr);
  });
  for (int32_t l = 0; l < s.num_layers; ++l) {
    Spread layer;
    for (int32_t h = 0; h < s.num_kv_heads; ++h) layer.add(rows[l * s.num_kv_heads + h]);
    means.push_back(layer.count > 0 ? Json(layer.mean()) : Json(nullptr));
    deviations.push_back(layer.count > 0 ? Json(layer.deviation()) : Json(nullptr));
  }
  j["layer_mean"] = std::move(means);
  j["layer_deviation"] = std::move(deviations);
  return j;
}

Json trace_json(const SignificanceTrace& trace) {
  if (trace.groups.empty()) return nullptr;
  Json j = {{"file", trace.file},
            {"seq", trace.seq},
            {"layer", trace.layer},
            {"kv_head", trace.kv_head},
            {"tokens", trace.tokens}};
  for (const SignificanceTrace::Group& g : trace.groups) {
    j["first"].push_back(g.first);
    j["median"].push_back(g.median);
    j["max"].push_back(g.max);
  }
  return j;
}

}  // namespace

Json detail_json(const PresetDetail& d) {
  constexpr const char* kTierNames[] = {"window", "high", "low", "pruned"};
  constexpr Tier kTiers[] = {Tier::kWindow, Tier::kHigh, Tier::kLow, Tier::kPruned};
  constexpr const char* kComponentNames[] = {"key", "value"};
  Json j;
  for (int i = 0; i < 4; ++i) {
    j["tiers"][kTierNames[i]] = matrix(d.num_layers, d.num_kv_heads, [&](size_t row) {
      return Json(d.tiers[row][static_cast<int>(kTiers[i])]);
    });
  }
  for (int c = 0; c < 2; ++c) {
    const char* name = kComponentNames[c];
    j["rel_error_by_place"][name] = errors_json(d.errors.bins[c]);
    j["codes"][name]["high"] = counts_json(d.codes[c][0]);
    j["codes"][name]["low"] = counts_json(d.codes[c][1]);
    j["exponents"][name] = counts_json(d.exponents[c]);
  }
  j["classes"] = d.classes.empty() ? Json(nullptr)
                                   : matrix(d.num_layers, d.num_kv_heads,
                                            [&](size_t row) { return Json(d.classes[row]); });
  return j;
}

Json survey_json(const Survey& s) {
  Json j;
  j["num_layers"] = s.num_layers;
  j["num_kv_heads"] = s.num_kv_heads;
  j["first_decade"] = LogHistogram::kFirstDecade;
  j["bins_per_decade"] = LogHistogram::kBinsPerDecade;
  for (const auto& [name, layers] :
       {std::pair{"significance", &s.significance}, std::pair{"value_norm", &s.value_norm},
        std::pair{"key_norm", &s.key_norm}}) {
    j[name] = Json::array();
    for (const LogHistogram& h : *layers) j[name].push_back(histogram_json(h));
  }
  j["critical_of_query"] = critical_json(s, s.critical_of_query);
  j["critical_received"] = critical_json(s, s.critical_received);
  j["trace"] = trace_json(s.trace);
  return j;
}

Json profile_json(const Profile& p) {
  Json j;
  j["model_id"] = p.model_id;
  const auto field = [&](const char* name, const std::vector<double>& rows) {
    j[name] = rows.empty() ? Json(nullptr) : matrix(p.num_layers, p.num_kv_heads, [&](size_t row) {
      return Json(rows[row]);
    });
  };
  field("key_sensitivity", p.key_sensitivity);
  field("value_sensitivity", p.value_sensitivity);
  field("joint_sensitivity", p.joint_sensitivity);
  const auto scales = [&](const char* name, double RowProfile::*scale) {
    j[name] =
        matrix(p.num_layers, p.num_kv_heads, [&](size_t row) { return Json(p.rows[row].*scale); });
  };
  scales("key_scale", &RowProfile::key_scale);
  scales("value_scale", &RowProfile::value_scale);
  return j;
}

}  // namespace tierkv::analysis
