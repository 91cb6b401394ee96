// SPDX-License-Identifier: Apache-2.0
// `tierkv compress`, `decompress` and `verify`.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "datasets/profile_file.h"
#include "tools/analysis/json_text.h"
#include "tools/analysis/layer_data.h"
#include "tools/analysis/stop_watch.h"
#include "tools/command/command.h"
#include "tools/command/interrupt.h"
#include "tools/container/container_file.h"

namespace tierkv::tools {
namespace {

using nlohmann::ordered_json;

struct Arguments {
  std::vector<std::string> files;  // verify
  std::string input, output, preset, profile, dtype = "stored";
  int32_t threads = default_threads(), gzip = 0;
  bool json = false, force = false, without_queries = false;
};

std::string line_of(const ordered_json& j) {
  const auto carried = j["carried_bytes"].get<int64_t>();
  std::string text =
      fmt::format("{}: {} bytes, ratio {:.3f} of keys and values", j["output"].get<std::string>(),
                  j["file_bytes"].get<int64_t>(), j["ratio"].get<double>());
  if (carried > 0) {
    text += fmt::format(
        ", {:.3f} of the file with {} bytes of queries and significance (--without-queries leaves "
        "them out)",
        j["file_ratio"].get<double>(), carried);
  }
  if (j.contains("rope")) text += ", " + j["rope"].get<std::string>();
  return text + fmt::format(", {:.2f} GB/s of fp16\n", j["gbps"].get<double>());
}

// `ratio`: keys and values as fp16 against the file without what is carried over; `file_ratio`:
// against the whole file.
ordered_json summary_of(const Arguments& args, const analysis::CompressSummary& s, double seconds) {
  const double fp16_bytes = 2.0 * static_cast<double>(s.values);
  const auto file = static_cast<double>(s.file_bytes);
  int64_t tokens = 0;
  for (const int64_t n : s.tokens) tokens += n;
  const auto share = [&](Tier t) {
    return static_cast<double>(s.tokens[static_cast<int>(t)]) / static_cast<double>(tokens);
  };
  return {{"schema", "tierkv.compress/1"},
          {"input", args.input},
          {"output", args.output},
          {"preset", args.preset},
          {"values", s.values},
          {"file_bytes", s.file_bytes},
          {"carried_bytes", s.query_bytes},
          {"bits_per_value",
           8 * (file - static_cast<double>(s.query_bytes)) / static_cast<double>(s.values)},
          {"ratio", fp16_bytes / (file - static_cast<double>(s.query_bytes))},
          {"file_ratio", fp16_bytes / file},
          {"tiers",
           {{"window", share(Tier::kWindow)},
            {"high", share(Tier::kHigh)},
            {"low", share(Tier::kLow)},
            {"pruned", share(Tier::kPruned)}}},
          {"read_seconds", s.read_seconds},
          {"encode_seconds", s.encode_seconds},
          {"write_seconds", s.write_seconds},
          {"seconds", seconds},
          {"gbps", fp16_bytes / seconds * 1e-9}};
}

int run_compress(const Arguments& args) {
  analysis::CompressOptions options;
  options.threads = args.threads;
  options.without_queries = args.without_queries;
  options.overwrite = args.force;
  Result<analysis::Preset> preset = analysis::parse_preset(args.preset);
  if (!preset) return report_error("--preset: " + preset.status().message(), kExitBadInput);
  options.preset = std::move(preset.value());
  if (options.preset.scheme.prunes()) {
    std::fprintf(stderr, "tierkv: warning: preset %s prunes tokens, for good.\n",
                 args.preset.c_str());
  }
  if (const int code = check_output_file(args.output, args.force, {args.input, args.profile});
      code != kExitOk) {
    return code;
  }
  std::optional<Profile> profile;
  if (!args.profile.empty()) {
    Result<Profile> read = datasets::read_profile(args.profile);
    if (!read) return report_error(read.status().message(), kExitBadInput);
    profile = std::move(read.value());
    options.profile = &*profile;
  }
  Result<datasets::DumpReader> reader = datasets::DumpReader::open(args.input);
  if (!reader) return report_error(reader.status().message(), kExitBadInput);
  ProgressBar bar(args.output);
  const Interrupt interrupt;
  options.progress = [&](double fraction) {
    bar.update(fraction);
    interrupt.check();
  };
  const analysis::StopWatch watch;
  const Result<analysis::CompressSummary> summary =
      analysis::compress(reader.value(), options, args.output);
  bar.finish();
  if (!summary) return report_error(summary.status().message(), kExitBadInput);
  ordered_json j = summary_of(args, *summary, watch.seconds());
  if (options.preset.scheme.weighted())
    j["rope"] = analysis::describe_rope(reader->info(), options.profile);
  return print_result(args.json ? analysis::json_text(j, 2) : line_of(j));
}

Result<CacheDecoder> open_cache(const std::string& path) {
  Result<ContainerReader> container = ContainerReader::open(path);
  if (!container) return container.status();
  return CacheDecoder::open(std::move(container.value()));
}

int run_decompress(const Arguments& args) {
  if (const int code = check_output_file(args.output, args.force, {args.input}); code != kExitOk) {
    return code;
  }
  const Result<CacheDecoder> decoder = open_cache(args.input);
  if (!decoder) return report_error(decoder.status().message(), kExitBadInput);
  DType dtype = decoder->model().layout.dtype;
  if (args.dtype != "stored") {
    dtype = args.dtype == "float16"    ? DType::kFloat16
            : args.dtype == "bfloat16" ? DType::kBFloat16
                                       : DType::kFloat32;
  }
  ProgressBar bar(args.output);
  const Interrupt interrupt;
  const auto progress = [&](double fraction) {
    bar.update(fraction);
    interrupt.check();
  };
  const analysis::StopWatch watch;
  const Status status = analysis::decompress(
      *decoder, {dtype, args.threads, args.gzip, progress, args.force}, args.output);
  bar.finish();
  if (status.code() == StatusCode::kOutOfRange && args.dtype == "stored") {
    return report_error(status.message() + "; --dtype float32 holds them", kExitBadInput);
  }
  if (!status) return report_error(status.message(), kExitBadInput);
  if (!args.json) return kExitOk;
  return print_result(analysis::json_text({{"schema", "tierkv.decompress/1"},
                                           {"input", args.input},
                                           {"output", args.output},
                                           {"preset", decoder->model().preset},
                                           {"dtype", dtype_name(dtype)},
                                           {"sequences", decoder->sequences().size()},
                                           {"seconds", watch.seconds()}},
                                          2));
}

// *chunks: how many there are; *decoded: whether they were, which of a store's sequence only a
// store can do.
Status verify_container(const std::string& path, int32_t threads, size_t* chunks, bool* decoded) {
  Result<ContainerReader> container = ContainerReader::open(path);
  if (!container) return container.status();
  *chunks = container->chunks().size();
  *decoded = !holds_store_sequence(*container);
  if (!*decoded) return verify_chunks(*container, threads);
  const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(container.value()));
  if (!decoder) return decoder.status();
  ProgressBar bar(path);
  return verify(*decoder, threads, [&](double fraction) { bar.update(fraction); });
}

// The exit code of one file; what is wrong with it goes to stderr.
int verify_file(const std::string& path, int32_t threads, ordered_json* files) {
  size_t chunks = 0;
  bool decoded = false;
  const Status status = verify_container(path, threads, &chunks, &decoded);
  ordered_json j = {{"file", path}, {"ok", status.is_ok()}};
  if (status) {
    j["chunks"] = chunks;
    j["decoded"] = decoded;
  }
  if (!status) j["error"] = status.message();
  files->push_back(j);
  if (status) return kExitOk;
  const StatusCode code = status.code();
  const bool is_foreign = code == StatusCode::kInvalidArgument || code == StatusCode::kIo ||
                          code == StatusCode::kVersion || code == StatusCode::kUnsupported;
  return report_error(status.message(), is_foreign ? kExitBadInput : kExitVerification);
}

int run_verify(const Arguments& args) {
  ordered_json files = ordered_json::array();
  bool failed = false, bad_input = false;
  std::string text;
  for (const std::string& path : args.files) {
    const int code = verify_file(path, args.threads, &files);
    failed |= code == kExitVerification;
    bad_input |= code == kExitBadInput;
    if (code != kExitOk) continue;
    const bool decoded = files.back()["decoded"].get<bool>();
    text += path + (decoded ? ": ok\n" : ": ok (a store's sequence: checksums only)\n");
  }
  if (args.json) {
    text = analysis::json_text({{"schema", "tierkv.verify/1"}, {"files", files}}, 2);
  }
  if (const int printed = print_result(text); printed != kExitOk) return printed;
  return failed ? kExitVerification : bad_input ? kExitBadInput : kExitOk;
}

void add_common(CLI::App* c, const std::shared_ptr<Arguments>& args) {
  add_threads(c, &args->threads);
  c->add_flag("--json", args->json, "Summary as JSON");
}

}  // namespace

void add_compress(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand("compress", "Compress a dumped cache into a .tkv container");
  c->add_option("IN", args->input, "kv-dump (HDF5)")->required();
  c->add_option("OUT", args->output, "Container to write")->required();
  add_force(c, &args->force);
  c->add_option("--preset", args->preset, "Scheme, as in analyze")->required();
  add_profile(c, &args->profile);
  c->add_flag("--without-queries", args->without_queries,
              "Leave out the dump's queries and significance");
  add_common(c, args);
  c->footer(analysis::preset_help() +
            "\nBaselines that only analyze and sweep know: snapkv, h2o, zstd-fp16, zstd-codes, "
            "predict=,\n+fse, +fixed, +bitshuffle.");
  c->callback([args, exit_code] { *exit_code = run_compress(*args); });
}

void add_decompress(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand("decompress",
                                   "Decode a .tkv container into a dump. Pruned tokens are zeros; "
                                   "the dataset `pruned` of a layer "
                                   "marks them (docs/reference/kv-dump.md)");
  c->add_option("IN", args->input, "Container (.tkv)")->required();
  c->add_option("OUT", args->output, "kv-dump to write (HDF5)")->required();
  add_force(c, &args->force);
  c->add_option("--dtype", args->dtype, "stored (default: as before), float16, bfloat16, float32")
      ->check(CLI::IsMember({"stored", "float16", "bfloat16", "float32"}));
  require_whole(
      c->add_option("--gzip", args->gzip, "gzip level of the dump; 0 (default) writes it as it is"),
      0, 9);
  add_common(c, args);
  c->callback([args, exit_code] { *exit_code = run_decompress(*args); });
}

void add_verify(CLI::App& app, int* exit_code) {
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand(
      "verify",
      "Check every byte of .tkv containers and decode them; of a store's sequence the bytes");
  c->add_option("FILE", args->files, "Containers (.tkv), sequences of a store")->required();
  add_common(c, args);
  c->footer(
      "Exit codes: 0 all are sound; 1 one is damaged; 2 a word or option is unknown or missing;\n"
      "3 one is no container, a value is wrong, or standard output cannot be written.");
  c->callback([args, exit_code] { *exit_code = run_verify(*args); });
}

}  // namespace tierkv::tools
