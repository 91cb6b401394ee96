// SPDX-License-Identifier: Apache-2.0
// tkv_analyze and tkv_calibrate.
#include "tools/analysis/analyze.h"
#include "capi/dumps/files.h"
#include "codec/file/output_file.h"
#include "datasets/profile_file.h"
#include "tools/analysis/calibrate.h"
#include "tools/analysis/report.h"

namespace tierkv::capi {
namespace {

Status read_presets(const tkv_analyze_options& o, std::vector<analysis::Preset>* presets) {
  if (o.num_presets > 0 && o.presets == nullptr) return invalid("presets is null");
  for (size_t i = 0; i < o.num_presets; ++i) {
    if (o.presets[i] == nullptr) return invalid("preset " + std::to_string(i) + " is null");
    Result<analysis::Preset> preset = analysis::parse_preset(o.presets[i]);
    if (!preset) return preset.status();
    presets->push_back(std::move(*preset));
  }
  return Status::ok();
}

Status run_analyze(const tkv_analyze_options* options, tkv_text** json) {
  tkv_analyze_options o;
  if (Status s = read_struct(options, "options", &o); !s) return s;
  if (json == nullptr) return invalid("json is null");
  if (o.first_layer < 0 || o.num_layers < 0 || o.num_layers > INT32_MAX - o.first_layer) {
    return invalid("first_layer or num_layers is out of range");
  }
  analysis::AnalyzeOptions a;
  if (Status s = read_threads(o.threads, &a.threads); !s) return s;
  if (Status s = read_presets(o, &a.presets); !s) return s;
  a.first_layer = o.first_layer;
  a.last_layer = o.num_layers == 0 ? -1 : o.first_layer + o.num_layers - 1;
  if (o.sequence != nullptr) a.only_sequence = o.sequence;
  const Result<std::optional<Profile>> profile = open_profile(o.profile);
  if (!profile) return profile.status();
  if (profile->has_value()) a.profile = &profile->value();
  Result<std::vector<datasets::DumpReader>> readers = open_dumps(o.files, o.num_files);
  if (!readers) return readers.status();
  std::vector<datasets::DumpInfo> infos;
  std::vector<analysis::AnalyzeResult> results;
  for (size_t i = 0; i < readers->size(); ++i) {
    Result<std::function<void(double)>> progress = read_progress(o.progress, i, readers->size());
    if (!progress) return progress.status();
    a.progress = std::move(*progress);
    if (o.num_presets == 0) {
      std::string left_out;
      a.presets = analysis::default_comparison(a.profile);
      if (Status s = analysis::keep_served((*readers)[i].info(), &a, &left_out); !s) return s;
    }
    Result<std::vector<analysis::AnalyzeResult>> part = analysis::analyze((*readers)[i], a);
    if (!part) return part.status();
    infos.push_back((*readers)[i].info());
    results.insert(results.end(), part->begin(), part->end());
  }
  *json = new tkv_text{analysis::to_json(infos, results, a.profile)};
  return Status::ok();
}

Status run_calibrate(tkv_calibrate_options* options, const char* path) {
  tkv_calibrate_options o;
  if (Status s = read_struct(options, "options", &o); !s) return s;
  if (path == nullptr) return invalid("profile is null");
  if (!(o.error_budget >= 0 && o.error_budget <= 1)) return invalid("error_budget must be 0 to 1");
  if (!(o.prune_budget >= 0 && o.prune_budget <= 10))
    return invalid("prune_budget must be 0 to 10");
  analysis::CalibrateOptions c;
  if (Status s = read_threads(o.threads, &c.threads); !s) return s;
  bool no_thresholds = false;
  if (Status s = read_flag(o.no_thresholds, "no_thresholds", &no_thresholds); !s) return s;
  c.thresholds = !no_thresholds;
  if (o.error_budget > 0) c.error_budget = o.error_budget;
  c.prune_budget = o.prune_budget;
  if (o.model_id != nullptr) c.model_id = o.model_id;
  Result<std::function<void(double)>> progress = read_progress(o.progress);
  if (!progress) return progress.status();
  c.progress = std::move(*progress);
  Result<std::vector<datasets::DumpReader>> readers = open_dumps(o.files, o.num_files);
  if (!readers) return readers.status();
  if (Status s = check_output(path, o.overwrite != 0, {o.files, o.files + o.num_files}); !s)
    return s;
  const Result<Profile> profile = analysis::calibrate(*readers, c);
  if (!profile) return profile.status();
  if (Status s = datasets::write_profile(path, *profile, {}, o.overwrite != 0); !s) return s;
  o.alpha_high = profile->alpha_high;
  o.alpha_low = profile->alpha_low;
  write_struct(o, options);
  return Status::ok();
}

}  // namespace
}  // namespace tierkv::capi

extern "C" {

tkv_status tkv_analyze(const tkv_analyze_options* options, tkv_text** json, tkv_error* error) {
  return tierkv::capi::guarded(error, [&] { return tierkv::capi::run_analyze(options, json); });
}

tkv_status tkv_calibrate(tkv_calibrate_options* options, const char* profile, tkv_error* error) {
  return tierkv::capi::guarded(error,
                               [&] { return tierkv::capi::run_calibrate(options, profile); });
}

}  // extern "C"
