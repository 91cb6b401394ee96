// What `analyze` and `sweep` have in common on the command line, and what it names once read.
#pragma once

#include <optional>

#include "tools/analysis/analyze.h"
#include "tools/command.h"

namespace tierkv::tools {

struct AnalyzeArguments {
  std::vector<std::string> files;
  std::string layers, seq, profile;
  int32_t threads = default_threads();
  bool json = false, csv = false;
};

// FILE..., --layers, --seq, --profile, --threads; not the formats of the result, which differ.
void add_analyze_arguments(CLI::App* command, AnalyzeArguments* args);

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

}  // namespace tierkv::tools
