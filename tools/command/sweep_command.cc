// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>

#include "tools/analysis/report.h"
#include "tools/analysis/sweep.h"
#include "tools/command/analyze_arguments.h"
#include "tools/presets/preset_grid.h"

namespace tierkv::tools {
namespace {

struct Arguments : AnalyzeArguments {
  std::vector<std::string> grids;
  bool markdown = false, sequences = false;
};

// Every preset once, in the order in which the grids first name it.
int expand(const std::vector<std::string>& grids, std::vector<std::string>* presets) {
  for (const std::string& grid : grids) {
    const Result<std::vector<std::string>> expanded = analysis::expand_grid(grid);
    if (!expanded) return report_error("--preset: " + expanded.status().message(), kExitBadInput);
    for (const std::string& preset : *expanded) {
      if (std::find(presets->begin(), presets->end(), preset) == presets->end())
        presets->push_back(preset);
    }
  }
  return kExitOk;
}

int run(const Arguments& args) {
  std::vector<std::string> presets =
      args.grids.empty() ? analysis::default_sweep() : std::vector<std::string>();
  if (const int code = expand(args.grids, &presets); code != kExitOk) return code;
  AnalyzeInputs inputs;
  if (const int code = read_presets(presets, &inputs.options.presets); code != kExitOk) return code;
  if (const int code = read_inputs(args, &inputs); code != kExitOk) return code;
  ProgressBar bar("sweep of " + std::to_string(presets.size()) + " presets");
  inputs.options.progress = [&](double fraction) { bar.update(fraction); };
  const Result<analysis::SweepResult> result =
      analysis::sweep(inputs.readers, inputs.options, args.sequences);
  bar.finish();
  if (!result) return report_error(result.status().message(), kExitBadInput);
  for (const analysis::SkippedPreset& s : result->skipped) {
    std::fprintf(stderr, "tierkv: left out: %s\n", s.reason.c_str());
  }
  if (result->results.empty()) {
    return report_error("no preset can be tried on any of the dumps", kExitBadInput);
  }
  if (args.json) {
    analysis::Details details;
    if (args.details) {
      if (const int code = read_details(inputs, &details); code != kExitOk) return code;
    }
    return print_result(
        analysis::to_json(*result, inputs.options.profile, args.details ? &details : nullptr));
  }
  return print_result(args.csv        ? analysis::to_csv(result->results)
                      : args.markdown ? analysis::to_markdown(result->results)
                                      : analysis::to_table(result->results));
}

}  // namespace

void add_sweep(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand(
      "sweep", "Rate against distortion: a grid or a list of presets over dumps");
  CLI::Option* json = add_analyze_arguments(c, args.get(), "tierkv.sweep/1");
  c->add_option(
       "--preset", args->grids,
       "Preset, or a grid of presets with '/' between alternatives of the name, a value or "
       "a suffix: step:k=0.2/0.3/0.4,v=0.25/0.3 are 6, k4v4/k8v4+/huffman are 4. Repeat "
       "for more. Default: 44 presets with equal windows")
      ->allow_extra_args(false);
  c->add_flag("--sequences", args->sequences, "A result for every sequence too, not only totals");
  CLI::Option* csv = c->add_flag("--csv", args->csv, "Results as CSV")->excludes(json);
  c->add_flag("--markdown", args->markdown, "Results as Markdown tables")
      ->excludes(json)
      ->excludes(csv);
  c->footer(analysis::preset_help() + "\n" + analysis::metric_help() +
            "A preset that a dump cannot serve is left out there and named on stderr.");
  c->callback([args, exit_code] { *exit_code = run(*args); });
}

}  // namespace tierkv::tools
