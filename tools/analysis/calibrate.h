// Calibration: a Profile from dumps. Means, global-step statistics and bases come from all tokens
// and queries of all sequences given; the tier thresholds from the attention error they cause.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "codec/policy/profile.h"
#include "datasets/dump.h"

namespace tierkv::analysis {

struct CalibrateOptions {
  bool matrix_basis = false;  // weighted PCA of keys (metric E[q q^T]) and PCA of values
  bool thresholds = true;     // choose alpha_high and alpha_low; needs significance
  // alpha_high: the largest whose online attention error stays below that of all tokens high plus
  // this share of the way to all tokens low. alpha_low: the largest that adds at most
  // `prune_budget` (relative) to that error; 0 keeps everything, which is the default because
  // attention error does not see what pruning loses (docs/LIMITATIONS.md).
  double error_budget = 0.25;
  double prune_budget = 0;
  // Global steps with scales of their own per layer, kv head and component, so that this mean
  // online attention error takes the fewest bits (tools/analysis/step_balance.h); 0: all scales
  // are 1.
  double balance_error = 0;
  int32_t threads = 1;
  std::function<void(double)> progress;
};

Result<Profile> calibrate(std::vector<datasets::DumpReader>& dumps,
                          const CalibrateOptions& options);

}  // namespace tierkv::analysis
