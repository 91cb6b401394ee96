// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>

#include "datasets/safetensors/safetensors_dump.h"
#include "tools/command/command.h"
#include "tools/command/interrupt.h"

namespace tierkv::tools {
namespace {

using datasets::TensorAxes;
using datasets::TensorNames;

struct Arguments {
  std::string input, output;
  std::string names, tokens_name, axes, seq;
  std::vector<std::string> parts;
  bool force = false;
  // Facts, as text so that what was given can be told from what was not.
  std::string q_heads, sm_scale, rope_theta, rope_applied, model_id;
};

const std::map<std::string, TensorAxes>& axes_by_name() {
  static const std::map<std::string, TensorAxes> kAxes = {{"htd", TensorAxes::kHeadTokenDim},
                                                          {"thd", TensorAxes::kTokenHeadDim},
                                                          {"bhtd", TensorAxes::kBatchHeadTokenDim},
                                                          {"bthd", TensorAxes::kBatchTokenHeadDim}};
  return kAxes;
}

// part=NAME, under the names of the kv-dump.
bool set_part(const std::string& text, TensorNames* names) {
  const size_t equals = text.find('=');
  const TensorNames defaults;
  for (int i = 0; i < datasets::kNumDumpParts; ++i) {
    if (equals == std::string::npos || text.substr(0, equals) != defaults.parts[i]) continue;
    names->parts[i] = text.substr(equals + 1);
    return true;
  }
  return false;
}

int read_names(const Arguments& args, TensorNames* names) {
  if (args.names == "hf") {
    *names = TensorNames::hugging_face();
  } else if (!args.names.empty() && args.names != "kv-dump") {
    names->layer = args.names;
    if (!names->has_sequences()) names->tokens = "tokens";
  }
  if (!args.tokens_name.empty()) names->tokens = args.tokens_name;
  if (!args.axes.empty()) names->axes = axes_by_name().at(args.axes);
  for (const std::string& part : args.parts) {
    if (!set_part(part, names)) {
      return report_error(
          "--part " + part + ": expected k=, v=, q=, q_positions= or significance= and a name",
          kExitBadInput);
    }
  }
  if (Status s = names->validate(); !s) {
    return report_error("--" + s.message(), kExitBadInput);
  }
  return kExitOk;
}

template <class T>
int read_number(const char* option, const std::string& text, std::optional<T>* out) {
  if (text.empty()) return kExitOk;
  T value{};
  const char* end = text.data() + text.size();
  const auto [p, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || p != end) {
    return report_error(std::string(option) + " " + text + ": expected a number", kExitBadInput);
  }
  *out = value;
  return kExitOk;
}

int read_facts(const Arguments& args, datasets::ModelFacts* facts) {
  if (const int code = read_number("--q-heads", args.q_heads, &facts->num_q_heads)) return code;
  if (const int code = read_number("--sm-scale", args.sm_scale, &facts->sm_scale)) return code;
  if (const int code = read_number("--rope-theta", args.rope_theta, &facts->rope_theta))
    return code;
  if (!args.rope_applied.empty()) facts->rope_applied = args.rope_applied == "yes";
  if (!args.model_id.empty()) facts->model_id = args.model_id;
  return kExitOk;
}

bool has_ending(const std::string& path, const char* ending) {
  return path.ends_with(ending);
}

// The first few of what is not carried over.
void name_left_out(const std::string& kind, const std::vector<std::string>& names) {
  constexpr size_t kNamed = 5;
  for (size_t i = 0; i < std::min(kNamed, names.size()); ++i)
    std::fprintf(stderr, "tierkv: left out: %s '%s'\n", kind.c_str(), names[i].c_str());
  if (names.size() > kNamed)
    std::fprintf(stderr, "tierkv: left out: %zu more\n", names.size() - kNamed);
}

int to_safetensors(const Arguments& args, const TensorNames& names) {
  const Result<datasets::DumpReader> dump = datasets::DumpReader::open(args.input);
  if (!dump) return report_error(dump.status().message(), kExitBadInput);
  const Result<std::vector<std::string>> others = datasets::other_datasets(args.input);
  if (!others) return report_error(others.status().message(), kExitBadInput);
  name_left_out("dataset", *others);
  ProgressBar bar(args.output);
  const Interrupt interrupt;
  const Status s = datasets::export_safetensors(*dump, names, args.seq, args.output, args.force,
                                                [&](double fraction) {
                                                  bar.update(fraction);
                                                  interrupt.check();
                                                });
  bar.finish();
  return s ? kExitOk : report_error(s.message(), kExitBadInput);
}

int to_dump(const Arguments& args, const TensorNames& names, const datasets::ModelFacts& facts) {
  const Result<datasets::SafetensorsReader> file = datasets::SafetensorsReader::open(args.input);
  if (!file) return report_error(file.status().message(), kExitBadInput);
  const Result<datasets::ImportPlan> plan = datasets::plan_import(file->header(), names, facts);
  if (!plan) return report_error(args.input + ": " + plan.status().message(), kExitBadInput);
  for (const std::string& text : plan->assumed)
    std::fprintf(stderr, "tierkv: assumed: %s\n", text.c_str());
  name_left_out("tensor", plan->left_out);
  ProgressBar bar(args.output);
  const Interrupt interrupt;
  const Status s = datasets::import_safetensors(*file, *plan, names.axes, args.output, args.force,
                                                [&](double fraction) {
                                                  bar.update(fraction);
                                                  interrupt.check();
                                                });
  bar.finish();
  return s ? kExitOk : report_error(s.message(), kExitBadInput);
}

// Refuses options of the other direction.
int check_direction(const Arguments& args, bool to_tensors) {
  const std::pair<const char*, const std::string&> to_hdf5[] = {
      {"--q-heads", args.q_heads},
      {"--sm-scale", args.sm_scale},
      {"--rope-theta", args.rope_theta},
      {"--rope-applied", args.rope_applied},
      {"--model-id", args.model_id}};
  for (const auto& [option, value] : to_hdf5) {
    if (to_tensors && !value.empty())
      return report_error(option + std::string(" is an option of safetensors to HDF5"), kExitUsage);
  }
  if (to_tensors || args.seq.empty()) return kExitOk;
  return report_error("--seq is an option of HDF5 to safetensors", kExitUsage);
}

int run(const Arguments& args) {
  TensorNames names;
  datasets::ModelFacts facts;
  if (const int code = read_names(args, &names); code != kExitOk) return code;
  if (const int code = read_facts(args, &facts); code != kExitOk) return code;
  const bool to_tensors = has_ending(args.output, ".safetensors");
  if (!to_tensors && !has_ending(args.output, ".h5") && !has_ending(args.output, ".hdf5")) {
    return report_error("OUT " + args.output + ": must end in .safetensors, .h5 or .hdf5",
                        kExitBadInput);
  }
  if (const int code = check_direction(args, to_tensors); code != kExitOk) return code;
  if (!to_tensors && begins_with(args.input, "\x89HDF\r\n\x1a\n")) {
    return report_error(args.input + " is HDF5 already; OUT must end in .safetensors",
                        kExitBadInput);
  }
  if (const int code = check_output_file(args.output, args.force, {args.input}); code != kExitOk) {
    return code;
  }
  return to_tensors ? to_safetensors(args, names) : to_dump(args, names, facts);
}

}  // namespace

void add_convert(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand("convert", "kv-dumps (HDF5) to safetensors and back");
  c->add_option("IN", args->input, "kv-dump (HDF5) or safetensors file")->required();
  c->add_option("OUT", args->output, "File to write: .safetensors, .h5 or .hdf5")->required();
  add_force(c, &args->force);
  c->add_option("--names", args->names,
                "How tensors are called: kv-dump (default), hf, or a pattern with {layer}, {part} "
                "and, for several sequences, {seq}");
  c->add_option("--tokens-name", args->tokens_name, "Name of the token ids, with {seq} as above");
  c->add_option("--part", args->parts,
                "PART=NAME: what stands for {part}; PART is k, v, q, q_positions or significance. "
                "Repeat for more")
      ->allow_extra_args(false);
  c->add_option("--axes", args->axes,
                "Order of the axes of k, v and q: htd (heads, tokens, head_dim; default), thd, or "
                "with a batch of one bhtd, bthd")
      ->check(CLI::IsMember({"htd", "thd", "bhtd", "bthd"}));
  c->add_option("--seq", args->seq, "Only this sequence (HDF5 to safetensors)");
  c->add_option("--q-heads", args->q_heads,
                "To HDF5: query heads (default: of q, or as many as kv heads)");
  c->add_option("--sm-scale", args->sm_scale,
                "To HDF5: factor of q . k (default 1 / sqrt(head_dim))");
  c->add_option("--rope-theta", args->rope_theta, "To HDF5: RoPE base (default 0: unknown)");
  c->add_option("--rope-applied", args->rope_applied, "To HDF5: keys are after RoPE (default yes)")
      ->check(CLI::IsMember({"yes", "no"}));
  c->add_option("--model-id", args->model_id, "To HDF5: name of the model");
  c->footer(
      "Names:\n"
      "  kv-dump   seq.{seq}.layer.{layer}.{part}, seq.{seq}.tokens    htd\n"
      "  hf        past_key_values.{layer}.key and .value, input_ids   bhtd, one sequence\n"
      "Facts that tensors do not hold come from the options, else from the metadata of files that\n"
      "convert wrote, else are assumed and named on stderr. Tensors of other names are left out "
      "and\n"
      "named. Values are carried over bit by bit.");
  c->callback([args, exit_code] { *exit_code = run(*args); });
}

}  // namespace tierkv::tools
