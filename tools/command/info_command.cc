#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <nlohmann/json.hpp>

#include "datasets/dump.h"
#include "tools/command/command.h"

namespace tierkv::tools {
namespace {

using Json = nlohmann::ordered_json;

int64_t kv_bytes(const datasets::DumpInfo& info, const datasets::SequenceInfo& seq) {
  int64_t bytes = 0;
  for (const datasets::LayerInfo& l : seq.layers) {
    bytes +=
        2 * seq.num_tokens * info.layout.num_kv_heads * info.layout.head_dim * dtype_bytes(l.dtype);
  }
  return bytes;
}

Json describe(const datasets::DumpInfo& info) {
  const CacheLayout& l = info.layout;
  Json j;
  j["file"] = info.path;
  j["format"] = "kv-dump";
  j["format_version"] = info.format_version;
  j["model_id"] = info.model_id;
  j["created_by"] = info.created_by;
  j["num_layers"] = l.num_layers;
  j["num_q_heads"] = l.num_q_heads;
  j["num_kv_heads"] = l.num_kv_heads;
  j["head_dim"] = l.head_dim;
  j["dtype"] = dtype_name(l.dtype);
  j["rope_applied"] = l.rope_applied;
  j["rope_theta"] = l.rope_theta;
  j["sm_scale"] = l.sm_scale;
  j["sequences"] = Json::array();
  for (const datasets::SequenceInfo& s : info.sequences) {
    const datasets::LayerInfo& first = s.layers[0];
    Json q;
    q["seq"] = s.id;
    q["kind"] = s.kind;
    q["tokens"] = s.num_tokens;
    q["kv_bytes"] = kv_bytes(info, s);
    q["queries"] = first.num_queries;
    q["significance"] = first.has_significance;
    j["sequences"].push_back(q);
  }
  return j;
}

std::string to_text(const datasets::DumpInfo& info) {
  const CacheLayout& l = info.layout;
  std::string out = fmt::format(
      "{}: kv-dump {}, model {}\n  {} layers, {} query heads, {} kv heads, head_dim {}, {}, RoPE "
      "{} (theta {})\n",
      info.path, info.format_version, info.model_id.empty() ? "unknown" : info.model_id,
      l.num_layers, l.num_q_heads, l.num_kv_heads, l.head_dim, dtype_name(l.dtype),
      l.rope_applied ? "applied" : "not applied", l.rope_theta);
  for (const datasets::SequenceInfo& s : info.sequences) {
    out += fmt::format(
        "  {:<16} {:>9} tokens  {:>9.1f} MB of K and V  {:>7} queries  significance {}{}\n", s.id,
        s.num_tokens, static_cast<double>(kv_bytes(info, s)) / 1e6, s.layers[0].num_queries,
        s.layers[0].has_significance ? "yes" : "no", s.kind.empty() ? "" : "  (" + s.kind + ")");
  }
  return out;
}

}  // namespace

void add_info(CLI::App& app, int* exit_code) {
  struct Arguments {
    std::vector<std::string> files;
    bool json = false;
  };
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand("info", "What a dump holds");
  c->add_option("FILE", args->files, "kv-dump files (HDF5)")->required();
  c->add_flag("--json", args->json, "As JSON");
  c->callback([args, exit_code] {
    Json files = Json::array();
    std::string text;
    for (const std::string& file : args->files) {
      Result<datasets::DumpReader> reader = datasets::DumpReader::open(file);
      if (!reader) {
        *exit_code = report_error(reader.status().message(), kExitBadInput);
        return;
      }
      files.push_back(describe(reader->info()));
      text += to_text(reader->info());
    }
    *exit_code = print_result(
        args->json ? Json{{"schema", "tierkv.info/1"}, {"files", files}}.dump(1) + "\n" : text);
  });
}

}  // namespace tierkv::tools
