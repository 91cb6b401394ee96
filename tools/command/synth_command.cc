// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "datasets/synth.h"
#include "tools/command/command.h"
#include "tools/command/interrupt.h"

namespace tierkv::tools {
namespace {

struct Arguments {
  std::string output, tokens = "1024", dtype = "float16", significance = "sampled";
  bool force = false;
  datasets::SynthSpec spec;
  const CLI::Option *queries = nullptr, *sinks = nullptr;
};

// Defaults are at most a sequence; what was asked for is not cut.
int check_within(const CLI::Option& option, const datasets::SynthSpec& spec, int64_t value) {
  const int64_t tokens = *std::min_element(spec.tokens.begin(), spec.tokens.end());
  if (option.count() == 0 || value <= tokens) return kExitOk;
  return report_error(fmt::format("{} {} is more than the {} tokens of a sequence",
                                  option.get_name(), value, tokens),
                      kExitBadInput);
}

int run(Arguments& args) {
  datasets::SynthSpec& spec = args.spec;
  for (const std::string& count : CLI::detail::split(args.tokens, ','))
    spec.tokens.push_back(std::stoll(count));
  if (const int code = check_within(*args.queries, spec, spec.num_queries)) return code;
  if (const int code = check_within(*args.sinks, spec, spec.sink_tokens)) return code;
  spec.layout.dtype = args.dtype == "float16"    ? DType::kFloat16
                      : args.dtype == "bfloat16" ? DType::kBFloat16
                                                 : DType::kFloat32;
  spec.significance = args.significance == "exact"     ? datasets::SignificanceKind::kExact
                      : args.significance == "sampled" ? datasets::SignificanceKind::kSampled
                                                       : datasets::SignificanceKind::kNone;
  spec.layout.rope_applied = false;
  const CacheLayout& l = spec.layout;
  if (l.num_q_heads % l.num_kv_heads != 0) {
    return report_error(fmt::format("--q-heads {} is not a multiple of --kv-heads {}",
                                    l.num_q_heads, l.num_kv_heads),
                        kExitBadInput);
  }
  if (spec.outlier_channels > l.head_dim) {
    return report_error(
        fmt::format("--outliers {} is more than --head-dim {}", spec.outlier_channels, l.head_dim),
        kExitBadInput);
  }
  if (const int code = check_output_file(args.output, args.force, {}); code != kExitOk) {
    return code;
  }
  ProgressBar bar(args.output);
  const Interrupt interrupt;
  const auto progress = [&](double fraction) {
    bar.update(fraction);
    interrupt.check();
  };
  const Status status = datasets::synthesize(spec, args.output, progress, args.force);
  bar.finish();
  return status ? kExitOk : report_error(status.message(), kExitBadInput);
}

}  // namespace

void add_synth(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  datasets::SynthSpec& s = args->spec;
  s.layout.num_layers = 2;
  s.layout.num_q_heads = 8;
  s.layout.num_kv_heads = 2;
  s.layout.head_dim = 128;
  CLI::App* c = app.add_subcommand(
      "synth", "Write a synthetic cache: outlier channels, sinks, heavy-tailed attention");
  c->add_option("-o,--output", args->output, "Dump to write (HDF5)")->required();
  add_force(c, &args->force);
  const auto whole = [&](const char* name, auto* value, const char* what, int64_t least,
                         int64_t most) {
    CLI::Option* option = c->add_option(name, *value, what);
    require_whole(option, least, most);
    return option;
  };
  whole("--layers", &s.layout.num_layers, "Layers (default 2)", 1, 4096);
  whole("--q-heads", &s.layout.num_q_heads, "Query heads (default 8)", 1, 4096);
  whole("--kv-heads", &s.layout.num_kv_heads, "Key/value heads (default 2)", 1, 4096);
  whole("--head-dim", &s.layout.head_dim, "Channels per head (default 128)", 1, kMaxHeadDim);
  // As a text: CLI11's delimiter skips empty items.
  whole("--tokens", &args->tokens,
        "Tokens per sequence, e.g. 1024,4096 for two sequences (default 1024)", 1,
        datasets::kMaxSynthTokens);
  c->add_option("--dtype", args->dtype, "float16 (default), bfloat16 or float32")
      ->check(CLI::IsMember({"float16", "bfloat16", "float32"}));
  args->queries =
      whole("--queries", &s.num_queries, "Newest positions whose q is written (default 64)", 0,
            datasets::kMaxSynthTokens);
  whole("--seed", &s.seed, "The same seed gives the same dump (default 1)", 0, INT64_MAX);
  whole("--outliers", &s.outlier_channels, "Outlier key channels (default 4)", 0, kMaxHeadDim);
  require_number(c->add_option("--outlier-scale", s.outlier_scale,
                               "Their size in standard deviations (default 8)"),
                 0, 1000);
  args->sinks = whole("--sinks", &s.sink_tokens, "Attention sinks at the start (default 4)", 0,
                      datasets::kMaxSynthTokens);
  require_number(c->add_option("--heavy", s.heavy_fraction,
                               "Share of tokens many queries look for (default 0.02)"),
                 0, 1);
  c->add_option("--significance", args->significance,
                "none, sampled (default) or exact (slow beyond a few thousand tokens)")
      ->check(CLI::IsMember({"none", "sampled", "exact"}));
  c->callback([args, exit_code] { *exit_code = run(*args); });
}

}  // namespace tierkv::tools
