// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "datasets/profile_file.h"
#include "tools/analysis/calibrate.h"
#include "tools/analysis/json_text.h"
#include "tools/command/command.h"
#include "tools/command/interrupt.h"

namespace tierkv::tools {
namespace {

struct Arguments {
  std::vector<std::string> files;
  std::string output;
  analysis::CalibrateOptions options;
  bool no_thresholds = false, json = false, force = false;
};

Status write(const Arguments& args, const Profile& profile) {
  const Interrupt interrupt;
  return datasets::write_profile(
      args.output, profile, [&] { interrupt.check(); }, args.force);
}

int run(Arguments& args) {
  if (const int code = check_output_file(args.output, args.force, args.files); code != kExitOk) {
    return code;
  }
  std::vector<datasets::DumpReader> dumps;
  for (const std::string& file : args.files) {
    Result<datasets::DumpReader> reader = datasets::DumpReader::open(file);
    if (!reader) return report_error(reader.status().message(), kExitBadInput);
    dumps.push_back(std::move(reader.value()));
  }
  ProgressBar bar("calibrate");
  args.options.progress = [&](double fraction) { bar.update(fraction); };
  args.options.thresholds = !args.no_thresholds;
  Result<Profile> profile = analysis::calibrate(dumps, args.options);
  bar.finish();
  if (!profile) return report_error(profile.status().message(), kExitBadInput);
  if (Status s = write(args, *profile); !s) return report_error(s.message(), kExitBadInput);
  if (profile->alpha_low > 0) {
    std::fprintf(stderr,
                 "tierkv: warning: the profile prunes tokens (alpha_l = %g); attention error does "
                 "not see what pruning loses (docs/guides/choose-a-format.md).\n",
                 profile->alpha_low);
  }
  if (args.json) {
    nlohmann::ordered_json j = {
        {"schema", "tierkv.calibrate/2"},        {"profile", args.output},
        {"model_id", profile->model_id},         {"alpha_h", profile->alpha_high},
        {"alpha_l", profile->alpha_low},         {"num_layers", profile->num_layers},
        {"num_kv_heads", profile->num_kv_heads}, {"head_dim", profile->head_dim}};
    return print_result(analysis::json_text(j, 1));
  }
  std::string text =
      fmt::format("{}: {} layers, {} kv heads, head_dim {}, alpha_h {}, alpha_l {}\n", args.output,
                  profile->num_layers, profile->num_kv_heads, profile->head_dim,
                  profile->alpha_high, profile->alpha_low);
  return print_result(text);
}

}  // namespace

void add_calibrate(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  args->options.threads = default_threads();
  CLI::App* c = app.add_subcommand("calibrate",
                                   "Write a profile (means, energies, tier thresholds) from dumps");
  c->add_option("FILE", args->files, "kv-dump files of one model, with q")->required();
  c->add_option("-o,--output", args->output, "Profile to write (HDF5)")->required();
  CLI::Option* without =
      c->add_flag("--no-thresholds", args->no_thresholds,
                  "Leave alpha_h = 1 and alpha_l = 0 (dumps without significance)");
  CLI::Option* error_budget =
      c->add_option("--error-budget", args->options.error_budget,
                    "alpha_h: share of the way from the error of all tokens high to that of all "
                    "low (default 0.25)")
          ->excludes(without);
  CLI::Option* prune_budget =
      c->add_option("--prune-budget", args->options.prune_budget,
                    "alpha_l: relative increase of the attention error allowed by pruning "
                    "(default 0: keep every token)")
          ->excludes(without);
  require_number(error_budget, 0, 1);
  require_number(prune_budget, 0, 10);
  c->add_option("--model-id", args->options.model_id,
                "Name of the model in the profile (default: that of the dumps)");
  add_threads(c, &args->options.threads);
  add_force(c, &args->force);
  c->add_flag("--json", args->json, "Summary as JSON");
  c->footer(
      "The sensitivities of heads, which `fast` and the default steps of `small` need, come from "
      "the model:\npython -m tierkv.calibrate_model (docs/guides/calibrate.md).");
  c->callback([args, exit_code] { *exit_code = run(*args); });
}

}  // namespace tierkv::tools
