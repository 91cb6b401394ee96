#include <CLI/CLI.hpp>
#include <charconv>

#include "datasets/profile_file.h"
#include "tools/analysis/report.h"
#include "tools/command.h"

namespace tierkv::tools {
namespace {

struct Arguments {
  std::vector<std::string> files, presets;
  std::string layers, seq, profile;
  int32_t threads = default_threads();
  bool json = false, csv = false;
};

// "A-B" or "A".
bool parse_layers(const std::string& text, int32_t* first, int32_t* last) {
  const char* end = text.data() + text.size();
  auto [p, error] = std::from_chars(text.data(), end, *first);
  if (error != std::errc() || *first < 0) return false;
  *last = *first;
  if (p == end) return true;
  if (*p != '-') return false;
  const auto [q, second] = std::from_chars(p + 1, end, *last);
  return second == std::errc() && q == end && *last >= *first;
}

int run(const Arguments& args) {
  analysis::AnalyzeOptions options;
  options.threads = args.threads;
  options.only_sequence = args.seq;
  if (!args.layers.empty() &&
      !parse_layers(args.layers, &options.first_layer, &options.last_layer)) {
    return report_error("--layers " + args.layers + ": expected A-B with 0 <= A <= B", kExitUsage);
  }
  for (const std::string& text :
       args.presets.empty() ? analysis::default_presets() : args.presets) {
    Result<analysis::Preset> preset = analysis::parse_preset(text);
    if (!preset) return report_error(preset.status().message(), kExitUsage);
    if (preset->scheme.prunes()) {
      std::fprintf(stderr,
                   "tierkv: warning: preset %s prunes tokens (alpha_l > 0). What nobody has "
                   "attended to yet may be asked for "
                   "later: on our model alpha_l = 0.02 loses half of the retrieval answers while "
                   "perplexity and attention "
                   "error hardly change (docs/QUALITY.md).\n",
                   text.c_str());
    }
    options.presets.push_back(std::move(preset.value()));
  }
  std::optional<Profile> profile;
  if (!args.profile.empty()) {
    Result<Profile> read = datasets::read_profile(args.profile);
    if (!read) return report_error(read.status().message(), kExitBadInput);
    profile = std::move(read.value());
    options.profile = &*profile;
  }
  std::vector<datasets::DumpReader> readers;
  for (const std::string& file : args.files) {
    Result<datasets::DumpReader> reader = datasets::DumpReader::open(file);
    if (!reader) return report_error(reader.status().message(), kExitBadInput);
    readers.push_back(std::move(reader.value()));
  }
  std::vector<datasets::DumpInfo> infos;
  std::vector<analysis::AnalyzeResult> results;
  for (datasets::DumpReader& reader : readers) {
    ProgressBar bar(reader.info().path);
    options.progress = [&](double fraction) { bar.update(fraction); };
    Result<std::vector<analysis::AnalyzeResult>> part = analysis::analyze(reader, options);
    bar.finish();
    if (!part) return report_error(part.status().message(), kExitBadInput);
    infos.push_back(reader.info());
    results.insert(results.end(), part->begin(), part->end());
  }
  return print_result(args.json  ? analysis::to_json(infos, results)
                      : args.csv ? analysis::to_csv(results)
                                 : analysis::to_table(results));
}

}  // namespace

void add_analyze(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand(
      "analyze", "What each scheme would do to a dumped cache: size, tiers, error, speed");
  c->add_option("FILE", args->files, "kv-dump files (HDF5)")->required();
  c->add_option("--preset", args->presets,
                "Scheme to try; repeat for more. Default: a comparison with equal windows")
      ->allow_extra_args(false);
  c->add_option("--layers", args->layers, "Layers A-B, inclusive, from 0");
  c->add_option("--seq", args->seq, "Only this sequence");
  c->add_option("--profile", args->profile,
                "Means, steps and bases of `tierkv calibrate` instead of each sequence's own");
  c->add_option("--threads", args->threads, "Worker threads (default: all cores)")
      ->check(CLI::Range(1, 1024));
  CLI::Option* json = c->add_flag("--json", args->json, "Results as JSON, schema tierkv.analyze/1");
  c->add_flag("--csv", args->csv, "Results as CSV")->excludes(json);
  c->footer(analysis::preset_help());
  c->callback([args, exit_code] { *exit_code = run(*args); });
}

}  // namespace tierkv::tools
