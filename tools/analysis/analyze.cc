// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/analyze.h"

#include <algorithm>

#include "tools/analysis/baselines/eviction.h"
#include "tools/analysis/layer_batch.h"

namespace tierkv::analysis {
namespace {

// Layers analysed together, as stored in the dump.
constexpr int64_t kBatchBytes = int64_t{48} << 20;

}  // namespace

std::vector<Preset> default_comparison(const Profile* profile) {
  std::vector<Preset> out;
  for (const std::string& text : default_presets()) {
    Result<Preset> preset = parse_preset(text);
    if (preset && check_sensitivities(preset->scheme, profile)) out.push_back(std::move(*preset));
  }
  return out;
}

Status check_options(const datasets::DumpInfo& info, const AnalyzeOptions& o) {
  const int32_t last = o.end_layer(info.layout) - 1;
  if (o.first_layer < 0 || last >= info.layout.num_layers || o.first_layer > last) {
    return Status(StatusCode::kInvalidArgument,
                  info.path + ": layers " + std::to_string(o.first_layer) + "-" +
                      std::to_string(last) + " asked for (--layers), the dump has 0-" +
                      std::to_string(info.layout.num_layers - 1));
  }
  if (Status s = check_unpruned(info); !s) return s;
  if (o.profile == nullptr) return Status::ok();
  if (Status s = o.profile->check_model(info.layout, info.model_id); !s)
    return s.with_context(info.path);
  return check_rope(info, o.profile);
}

Status suits(const datasets::DumpInfo& info, const Preset& preset, const AnalyzeOptions& o) {
  if (Status s = check_options(info, o); !s) return s;
  const std::string where = info.path + ": preset " + preset.text;
  const Scheme scheme = preset.scheme.for_head_dim(info.layout.head_dim);
  if (Status s = scheme.validate(info.layout.head_dim); !s) return s.with_context(where);
  if (Status s = check_sensitivities(scheme, o.profile); !s) return s.with_context(where);
  const bool needs_q = scheme.needs_queries() && o.profile == nullptr;
  for (size_t i = 0; i < info.sequences.size(); ++i) {
    const datasets::SequenceInfo& seq = info.sequences[i];
    if (!o.only_sequence.empty() && seq.id != o.only_sequence) continue;
    for (int32_t l = o.first_layer; l < o.end_layer(info.layout); ++l) {
      if (needs_q && !seq.layers[l].has_q) {
        return Status(StatusCode::kInvalidArgument,
                      where + ": /seq/" + seq.id + "/layer/" + std::to_string(l) +
                          " has no q to choose the step by; give a profile (--profile)");
      }
      const auto index = static_cast<int32_t>(i);
      Status s = check_eviction(scheme, info, index, l);
      if (s && scheme.tiered) s = check_significance(info, index, l);
      if (!s) return Status(s.code(), s.message() + " (preset " + preset.text + ")");
    }
  }
  return Status::ok();
}

Status keep_served(const datasets::DumpInfo& info, AnalyzeOptions* options, std::string* left_out) {
  Status first = Status::ok();
  std::erase_if(options->presets, [&](const Preset& preset) {
    const Status s = suits(info, preset, *options);
    if (s) return false;
    if (first) first = s;
    *left_out += (left_out->empty() ? "" : ", ") + preset.text;
    return true;
  });
  return options->presets.empty() ? first : Status::ok();
}

Result<std::vector<AnalyzeResult>> analyze(datasets::DumpReader& reader,
                                           const AnalyzeOptions& given,
                                           std::vector<Status>* failures) {
  const datasets::DumpInfo& info = reader.info();
  AnalyzeOptions options = given;
  for (Preset& p : options.presets) p.scheme = p.scheme.for_head_dim(info.layout.head_dim);
  if (Status s = check_options(info, options); !s) return s;
  for (const Preset& p : options.presets) {
    if (Status s = suits(info, p, options); !s) return s;
  }
  const auto need_significance = [&](int32_t seq, int32_t layer) {
    return std::any_of(options.presets.begin(), options.presets.end(), [&](const Preset& p) {
      return wants_significance(p.scheme, info, seq, layer);
    });
  };

  std::vector<std::pair<int32_t, int32_t>> work;
  for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
    if (!options.only_sequence.empty() && info.sequences[seq].id != options.only_sequence) continue;
    for (int32_t l = options.first_layer; l < options.end_layer(info.layout); ++l)
      work.emplace_back(seq, l);
  }
  if (work.empty()) {
    return Status(StatusCode::kNotFound,
                  info.path + ": no sequence '" + options.only_sequence + "' (--seq)");
  }
  std::vector<Tally> tallies(options.presets.size() * info.sequences.size());
  std::vector<PresetDetail> details;
  if (options.details) {
    details.assign(options.presets.size(),
                   PresetDetail(info.layout.num_layers, info.layout.num_kv_heads));
  }
  std::vector<Status> first_failure(1);
  if (failures != nullptr) failures->assign(options.presets.size(), Status::ok());
  for (size_t next = 0; next < work.size();) {
    std::vector<LayerData> layers;
    for (int64_t bytes = 0; next < work.size() && (layers.empty() || bytes < kBatchBytes); ++next) {
      const auto [seq, layer] = work[next];
      bytes += LayerData::dump_bytes(info, seq, layer);
      if (!layers.empty() && bytes > kBatchBytes) break;
      layers.emplace_back();
      const bool significance = need_significance(seq, layer);
      if (Status s = load_layer(reader, seq, layer, significance, options.threads, &layers.back());
          !s) {
        return s;
      }
      layers.back().rope = rope_of(info, options.profile, layer);
    }
    BatchSums sums = {&tallies, &details, nullptr, failures != nullptr ? failures : &first_failure};
    if (options.progress) {
      const auto before = static_cast<double>(next - layers.size());
      const auto share = static_cast<double>(layers.size());
      const auto total = static_cast<double>(work.size());
      sums.progress = [=, &options](double done) {
        options.progress((before + done * share) / total);
      };
    }
    LayerBatch(info, options, std::move(layers), sums).run();
    if (!first_failure[0]) return first_failure[0];
    const auto failed = [](const Status& status) { return !status.is_ok(); };
    if (std::all_of(sums.failures->begin(), sums.failures->end(), failed)) break;
  }

  std::vector<AnalyzeResult> results;
  for (size_t p = 0; p < options.presets.size(); ++p) {
    if (failures != nullptr && !(*failures)[p]) continue;
    const size_t total = results.size();
    results.push_back({info.path, options.presets[p].text, "all", {}, nullptr});
    if (options.details) {
      results[total].detail = std::make_shared<PresetDetail>(std::move(details[p]));
    }
    for (size_t seq = 0; seq < info.sequences.size(); ++seq) {
      const Tally& t = tallies[p * info.sequences.size() + seq];
      if (t.values == 0) continue;
      results[total].tally.add(t);
      results.push_back({info.path, options.presets[p].text, info.sequences[seq].id, t, nullptr});
    }
  }
  return results;
}

}  // namespace tierkv::analysis
