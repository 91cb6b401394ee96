// SPDX-License-Identifier: Apache-2.0
// Calibration from dumps: what keys, values and queries alone can tell. Means and energies come
// from all sequences given, without their first kCalibrationSinks tokens; the tier thresholds from
// the attention error they cause. Sensitivities need the model (python/tierkv/calibrate_model.py).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "codec/policy/profile.h"
#include "datasets/dump.h"

namespace tierkv::analysis {

inline constexpr int32_t kCalibrationSinks = 4;

struct CalibrateOptions {
  bool thresholds = true;  // choose alpha_high and alpha_low; needs significance
  // alpha_high: the largest whose online attention error stays below that of all tokens high plus
  // this share of the way to all tokens low. alpha_low: the largest that adds at most
  // `prune_budget` (relative) to that error; 0 keeps everything, which is the default because
  // attention error does not see what pruning loses (docs/guides/choose-a-format.md).
  double error_budget = 0.25;
  double prune_budget = 0;
  std::string model_id;  // of the profile; empty: the dumps', which must then have the same one
  int32_t threads = 1;
  std::function<void(double)> progress;
};

// kInvalidArgument where dumps are of different models or do not name theirs.
Result<Profile> calibrate(std::vector<datasets::DumpReader>& dumps,
                          const CalibrateOptions& options);

}  // namespace tierkv::analysis
