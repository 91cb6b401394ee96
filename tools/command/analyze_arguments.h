// What `analyze` and `sweep` have in common on the command line, and what it names once read.
#pragma once

#include <optional>

#include "tools/analysis/analyze.h"
#include "tools/analysis/sweep.h"
#include "tools/command/command.h"

namespace tierkv::tools {

struct AnalyzeArguments {
  std::vector<std::string> files;
  std::string layers, seq, profile, report;
  int32_t threads = default_threads();
  bool json = false, csv = false, force = false;
};

// FILE..., --layers, --seq, --profile, --threads, --report, --force; not the formats of the result,
// which differ.
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

// Surveys the dumps and writes the page of --report; nothing without the option.
int write_report(const AnalyzeArguments& args, AnalyzeInputs& inputs,
                 const analysis::SweepResult& results);

}  // namespace tierkv::tools
