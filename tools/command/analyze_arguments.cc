// SPDX-License-Identifier: Apache-2.0
#include "tools/command/analyze_arguments.h"

#include <CLI/CLI.hpp>
#include <charconv>

#include "datasets/profile_file.h"

namespace tierkv::tools {
namespace {

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

}  // namespace

CLI::Option* add_analyze_arguments(CLI::App* command, AnalyzeArguments* args, const char* schema) {
  command->add_option("FILE", args->files, "kv-dump files (HDF5)")->required();
  command->add_option("--layers", args->layers, "Layers A-B, inclusive, from 0");
  command->add_option("--seq", args->seq, "Only this sequence");
  add_profile(command, &args->profile);
  add_threads(command, &args->threads);
  CLI::Option* json =
      command->add_flag("--json", args->json, "Results as JSON, schema " + std::string(schema));
  command
      ->add_flag("--details", args->details,
                 "With --json: what `python3 -m tierkv.report` draws besides (tiers and classes of "
                 "heads, codes, exponents, errors by place, a survey of the dumps)")
      ->needs(json);
  return json;
}

int read_inputs(const AnalyzeArguments& args, AnalyzeInputs* inputs) {
  analysis::AnalyzeOptions& options = inputs->options;
  options.threads = args.threads;
  options.only_sequence = args.seq;
  options.details = args.details;
  if (!args.layers.empty() &&
      !parse_layers(args.layers, &options.first_layer, &options.last_layer)) {
    return report_error("--layers " + args.layers + ": expected A-B with 0 <= A <= B",
                        kExitBadInput);
  }
  if (!args.profile.empty()) {
    Result<Profile> read = datasets::read_profile(args.profile);
    if (!read) return report_error(read.status().message(), kExitBadInput);
    inputs->profile = std::move(read.value());
    options.profile = &*inputs->profile;
  }
  for (const std::string& file : args.files) {
    Result<datasets::DumpReader> reader = datasets::DumpReader::open(file);
    if (!reader) return report_error(reader.status().message(), kExitBadInput);
    inputs->readers.push_back(std::move(reader.value()));
  }
  return kExitOk;
}

// Names the presets whose window and sinks are not those of the first.
static void warn_of_windows(const std::vector<analysis::Preset>& presets) {
  const analysis::Preset* first = nullptr;
  std::string others;
  for (const analysis::Preset& p : presets) {
    if (p.scheme.keeps_all_alike()) continue;
    if (first == nullptr) first = &p;
    const TierPolicy &a = first->scheme.policy, &b = p.scheme.policy;
    if (a.window_tokens == b.window_tokens && a.sink_tokens == b.sink_tokens) continue;
    others += (others.empty() ? "" : ", ") + p.text;
  }
  if (others.empty()) return;
  std::fprintf(
      stderr,
      "tierkv: warning: %s: another window or other sinks than %s; sizes and errors of the "
      "two kinds do not compare.\n",
      others.c_str(), first->text.c_str());
}

int read_presets(const std::vector<std::string>& texts, std::vector<analysis::Preset>* presets) {
  for (const std::string& text : texts) {
    Result<analysis::Preset> preset = analysis::parse_preset(text);
    if (!preset) return report_error("--preset: " + preset.status().message(), kExitBadInput);
    presets->push_back(std::move(preset.value()));
  }
  std::string pruning;
  for (const analysis::Preset& preset : *presets) {
    if (preset.scheme.prunes()) pruning += (pruning.empty() ? "" : ", ") + preset.text;
  }
  warn_of_windows(*presets);
  if (pruning.empty()) return kExitOk;
  std::fprintf(stderr,
               "tierkv: warning: %s: prunes tokens. What nobody has attended to yet may be asked "
               "for later: on a model of 24 million parameters alpha_l = 0.02 loses half of the "
               "retrieval answers while perplexity and attention error hardly change.\n",
               pruning.c_str());
  return kExitOk;
}

int read_details(AnalyzeInputs& inputs, analysis::Details* details) {
  for (datasets::DumpReader& reader : inputs.readers) {
    Result<analysis::Survey> survey = analysis::survey(reader, inputs.options);
    if (!survey) return report_error(survey.status().message(), kExitBadInput);
    analysis::join_survey(std::move(*survey), &details->surveys);
  }
  return kExitOk;
}

}  // namespace tierkv::tools
