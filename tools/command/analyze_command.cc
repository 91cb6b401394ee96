// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>

#include "tools/analysis/layer_data.h"
#include "tools/analysis/report.h"
#include "tools/command/analyze_arguments.h"

namespace tierkv::tools {
namespace {

struct Arguments : AnalyzeArguments {
  std::vector<std::string> presets;
};

int run(const Arguments& args) {
  AnalyzeInputs inputs;
  analysis::AnalyzeOptions& options = inputs.options;
  if (const int code = read_presets(args.presets, &options.presets); code != kExitOk) return code;
  if (const int code = read_inputs(args, &inputs); code != kExitOk) return code;
  if (args.presets.empty()) options.presets = analysis::default_comparison(options.profile);
  const std::vector<analysis::Preset> presets = options.presets;
  analysis::SweepResult all;
  for (datasets::DumpReader& reader : inputs.readers) {
    options.presets = presets;
    if (args.presets.empty()) {
      std::string left_out;
      if (const Status s = analysis::keep_served(reader.info(), &options, &left_out); !s)
        return report_error(s.message(), kExitBadInput);
      if (!left_out.empty()) {
        std::fprintf(stderr, "tierkv: left out: %s: %s (--preset NAME says why)\n",
                     reader.info().path.c_str(), left_out.c_str());
      }
    }
    ProgressBar bar(reader.info().path);
    options.progress = [&](double fraction) { bar.update(fraction); };
    Result<std::vector<analysis::AnalyzeResult>> part = analysis::analyze(reader, options);
    bar.finish();
    if (!part) return report_error(part.status().message(), kExitBadInput);
    all.files.push_back(reader.info());
    all.results.insert(all.results.end(), part->begin(), part->end());
  }
  if (args.json) {
    analysis::Details details;
    if (args.details) {
      if (const int code = read_details(inputs, &details); code != kExitOk) return code;
    }
    return print_result(analysis::to_json(all.files, all.results, options.profile,
                                          args.details ? &details : nullptr));
  }
  if (args.csv) return print_result(analysis::to_csv(all.results));
  std::string text;
  const bool weighted = std::any_of(presets.begin(), presets.end(),
                                    [](const analysis::Preset& p) { return p.scheme.weighted(); });
  for (size_t i = 0; weighted && i < all.files.size(); ++i) {
    text +=
        all.files[i].path + ": " + analysis::describe_rope(all.files[i], options.profile) + "\n";
  }
  return print_result(text + analysis::to_table(all.results));
}

}  // namespace

void add_analyze(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand(
      "analyze", "What each scheme would do to a dumped cache: size, tiers, error, speed");
  CLI::Option* json = add_analyze_arguments(c, args.get(), "tierkv.analyze/1");
  c->add_option("--preset", args->presets,
                "Scheme to try; repeat for more. Default: a comparison with equal windows "
                "of what needs no profile, or what --profile serves; what a dump "
                "cannot serve is left out and named on stderr")
      ->allow_extra_args(false);
  c->add_flag("--csv", args->csv, "Results as CSV")->excludes(json);
  c->footer(analysis::preset_help() + "\n" + analysis::metric_help());
  c->callback([args, exit_code] { *exit_code = run(*args); });
}

}  // namespace tierkv::tools
