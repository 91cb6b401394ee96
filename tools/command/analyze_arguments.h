// SPDX-License-Identifier: Apache-2.0
// What `analyze` and `sweep` have in common on the command line, and what it names once read.
#pragma once

#include <optional>

#include "tools/analysis/analyze.h"
#include "tools/analysis/report.h"
#include "tools/analysis/sweep.h"
#include "tools/command/command.h"

namespace tierkv::tools {

struct AnalyzeArguments {
  std::vector<std::string> files;
  std::string layers, seq, profile;
  int32_t threads = default_threads();
  bool json = false, csv = false, details = false;
};

// FILE..., --layers, --seq, --profile, --threads, --json, --details; returns --json. The other
// formats of the result differ.
CLI::Option* add_analyze_arguments(CLI::App* command, AnalyzeArguments* args, const char* schema);

struct AnalyzeInputs {
  analysis::AnalyzeOptions options;  // without presets; `profile` points into this struct
  std::optional<Profile> profile;
  std::vector<datasets::DumpReader> readers;

  AnalyzeInputs() = default;
  AnalyzeInputs(const AnalyzeInputs&) = delete;
  AnalyzeInputs& operator=(const AnalyzeInputs&) = delete;
};

// kExitOk, or the exit code of a failure that it has reported.
int read_inputs(const AnalyzeArguments& args, AnalyzeInputs* inputs);

// Appends the presets of the texts; a warning for each that prunes.
int read_presets(const std::vector<std::string>& texts, std::vector<analysis::Preset>* presets);

// The surveys of the dumps, for --details. kExitOk, or the exit code of a failure
// that it has reported.
int read_details(AnalyzeInputs& inputs, analysis::Details* details);

}  // namespace tierkv::tools
