// SPDX-License-Identifier: Apache-2.0
// Rate against distortion: many presets over many dumps, the results pooled over all of them.
#pragma once

#include <string>
#include <vector>

#include "tools/analysis/analyze.h"

namespace tierkv::analysis {

// A preset that a dump cannot serve, left out there: no q, no significance, a group that does not
// divide the head, a value that the preset cannot hold.
struct SkippedPreset {
  std::string file, preset, reason;
};

struct SweepResult {
  std::vector<datasets::DumpInfo> files;
  // By preset, in the order given. `file` is kPooled for the first of each: the union of all dumps,
  // for the presets that none of them skipped. With one dump there is no pooled result.
  std::vector<AnalyzeResult> results;
  std::vector<SkippedPreset> skipped;
};
inline constexpr char kPooled[] = "all";

// options.progress gets the share of all dumps that is done. With `sequences` the results of single
// sequences are kept too.
Result<SweepResult> sweep(std::vector<datasets::DumpReader>& readers, const AnalyzeOptions& options,
                          bool sequences);

// Presets of `results` that no other of the same file and sequence beats in both memory and
// ranking_error(); false without queries.
std::vector<bool> pareto_front(const std::vector<AnalyzeResult>& results);

// The presets that `tierkv sweep` tries when none is given: 44, with equal windows and
// sinks.
std::vector<std::string> default_sweep();

}  // namespace tierkv::analysis
