// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "codec/file/cache_decoder.h"
#include "codec/file/container_format.h"
#include "datasets/dump.h"
#include "datasets/printable.h"
#include "tools/analysis/json_text.h"
#include "tools/analysis/layer_data.h"
#include "tools/command/command.h"
#include "tools/presets/preset.h"

namespace tierkv::tools {
namespace {

using Json = nlohmann::ordered_json;
using datasets::printable;

int64_t kv_bytes(const datasets::DumpInfo& info, const datasets::SequenceInfo& seq) {
  int64_t bytes = 0;
  for (const datasets::LayerInfo& l : seq.layers) {
    bytes +=
        2 * seq.num_tokens * info.layout.num_kv_heads * info.layout.head_dim * dtype_bytes(l.dtype);
  }
  return bytes;
}

void add_layout(const CacheLayout& l, const std::vector<Rope>& rope, Json* j) {
  (*j)["num_layers"] = l.num_layers;
  (*j)["num_q_heads"] = l.num_q_heads;
  (*j)["num_kv_heads"] = l.num_kv_heads;
  (*j)["head_dim"] = l.head_dim;
  (*j)["dtype"] = dtype_name(l.dtype);
  (*j)["rope_applied"] = l.rope_applied;
  (*j)["rope_theta"] = l.rope_theta;
  (*j)["rope"] = analysis::rotation_text(rope, l);
  (*j)["sm_scale"] = l.sm_scale;
}

std::string layout_text(const CacheLayout& l, const std::vector<Rope>& rope) {
  return fmt::format("  {} layers, {} query heads, {} kv heads, head_dim {}, {}, RoPE {} ({})\n",
                     l.num_layers, l.num_q_heads, l.num_kv_heads, l.head_dim, dtype_name(l.dtype),
                     l.rope_applied ? "applied" : "not applied", analysis::rotation_text(rope, l));
}

Json describe(const datasets::DumpInfo& info) {
  Json j;
  j["file"] = info.path;
  j["format"] = "kv-dump";
  j["format_version"] = info.format_version;
  j["model_id"] = info.model_id;
  j["created_by"] = info.created_by;
  add_layout(info.layout, info.rope, &j);
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
  std::string out = fmt::format("{}: kv-dump {}, model {}\n", info.path, info.format_version,
                                info.model_id.empty() ? "unknown" : printable(info.model_id)) +
                    layout_text(info.layout, info.rope);
  for (const datasets::SequenceInfo& s : info.sequences) {
    out += fmt::format(
        "  {:<16} {:>9} tokens  {:>9.1f} MB of K and V  {:>7} queries  significance {}{}\n", s.id,
        s.num_tokens, static_cast<double>(kv_bytes(info, s)) / 1e6, s.layers[0].num_queries,
        s.layers[0].has_significance ? "yes" : "no",
        s.kind.empty() ? "" : "  (" + printable(s.kind) + ")");
  }
  return out;
}

// ---- Containers ----

const char* rule_name(const ComponentFormat& f) {
  if (f.is_raw()) return "raw";
  switch (f.step_rule) {
    case StepRule::kMinMax:
      return "min-max";
    case StepRule::kRelative:
      return "relative";
    case StepRule::kAbsolute:
      return "global";
    case StepRule::kWeighted:
      return "weighted";
    case StepRule::kNorm:
      return "norm";
  }
  return "unknown";
}

// How a container's rows were quantised; nulls where its preset is unknown or has no such thing.
struct Steps {
  Json key_rule, value_rule, key_step, value_step;
  Json statistics;  // "profile" or "sequence": whose means, weights and steps the rows have
};

Steps steps_of(const CacheDecoder& decoder) {
  Steps out;
  for (const ChunkEntry& chunk : decoder.container().chunks()) {
    if (chunk.key.kind != ChunkKind::kWeightedRow && chunk.key.kind != ChunkKind::kBasis) continue;
    out.statistics = chunk.key.sequence == kNotApplicable ? "profile" : "sequence";
  }
  const Result<analysis::Preset> preset = analysis::parse_preset(decoder.model().preset);
  if (!preset) return out;
  const analysis::Scheme& s = preset->scheme;
  out.key_rule = rule_name(s.high.k);
  out.value_rule = rule_name(s.high.v);
  const bool own = s.weighted() && out.statistics != "profile";
  if (s.high.k.step > 0) out.key_step = own ? s.own_k : s.high.k.step;
  if (s.high.v.step > 0) out.value_step = own ? s.own_v : s.high.v.step;
  return out;
}

Json describe(const CacheDecoder& decoder) {
  const ContainerModel& model = decoder.model();
  const Steps steps = steps_of(decoder);
  Json j;
  j["file"] = decoder.container().path();
  j["format"] = "tkv";
  j["format_version"] = fmt::format("{}.{}", kContainerMajor, kContainerMinor);
  j["file_bytes"] = decoder.container().file_bytes();
  j["model_id"] = model.model_id;
  j["created_by"] = model.created_by;
  add_layout(model.layout, model.rope, &j);
  j["preset"] = model.preset;
  j["key_step_rule"] = steps.key_rule;
  j["key_step"] = steps.key_step;
  j["value_step_rule"] = steps.value_rule;
  j["value_step"] = steps.value_step;
  j["statistics"] = steps.statistics;
  j["sequences"] = Json::array();
  for (const ContainerSequence& s : decoder.sequences())
    j["sequences"].push_back({{"seq", s.id}, {"kind", s.kind}, {"tokens", s.tokens.size()}});
  return j;
}

std::string to_text(const CacheDecoder& decoder) {
  const ContainerModel& model = decoder.model();
  const Steps steps = steps_of(decoder);
  const auto step = [](const Json& rule, const Json& value) {
    return rule.is_null() ? "unknown"
                          : rule.get<std::string>() + (value.is_null() ? "" : " " + value.dump());
  };
  std::string out = fmt::format("{}: container {}.{}, {:.1f} MB, model {}\n",
                                decoder.container().path(), kContainerMajor, kContainerMinor,
                                static_cast<double>(decoder.container().file_bytes()) / 1e6,
                                model.model_id.empty() ? "unknown" : printable(model.model_id)) +
                    layout_text(model.layout, model.rope);
  out += fmt::format("  preset {}: keys {}, values {}{}\n", printable(model.preset),
                     step(steps.key_rule, steps.key_step), step(steps.value_rule, steps.value_step),
                     steps.statistics.is_null()
                         ? ""
                         : ", statistics of the " + steps.statistics.get<std::string>());
  for (const ContainerSequence& s : decoder.sequences())
    out += fmt::format("  {:<16} {:>9} tokens{}\n", printable(s.id), s.tokens.size(),
                       s.kind.empty() ? "" : "  (" + printable(s.kind) + ")");
  return out;
}

// Adds what the file holds to both; what is wrong with it otherwise.
Status add_file(const std::string& file, Json* files, std::string* text) {
  if (begins_with(file, {std::begin(kContainerMagic), std::end(kContainerMagic)})) {
    Result<ContainerReader> reader = ContainerReader::open(file);
    if (!reader) return reader.status();
    const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(*reader));
    if (!decoder) return decoder.status();
    files->push_back(describe(*decoder));
    *text += to_text(*decoder);
    return Status::ok();
  }
  const Result<datasets::DumpReader> reader = datasets::DumpReader::open(file);
  if (!reader) {
    const Status s = reader.status();
    if (s.message().ends_with("'kv-profile' (expected 'kv-dump')"))
      return Status(s.code(), s.message() + ": a profile; info reads dumps and containers");
    if (s.message() != file + ": " + datasets::kNotHdf5) return s;
    return Status(StatusCode::kCorrupt, file + " is neither HDF5 nor a .tkv container");
  }
  files->push_back(describe(reader->info()));
  *text += to_text(reader->info());
  return Status::ok();
}

}  // namespace

void add_info(CLI::App& app, int* exit_code) {
  struct Arguments {
    std::vector<std::string> files;
    bool json = false;
  };
  auto args = std::make_shared<Arguments>();
  CLI::App* c = app.add_subcommand("info", "What a dump or a container holds");
  c->add_option("FILE", args->files, "kv-dumps (HDF5) and .tkv containers")->required();
  c->add_flag("--json", args->json, "As JSON");
  c->callback([args, exit_code] {
    Json files = Json::array();
    std::string text;
    for (const std::string& file : args->files) {
      if (const Status s = add_file(file, &files, &text); !s) {
        *exit_code = report_error(s.message(), kExitBadInput);
        return;
      }
    }
    *exit_code = print_result(
        args->json ? analysis::json_text({{"schema", "tierkv.info/1"}, {"files", files}}, 1)
                   : text);
  });
}

}  // namespace tierkv::tools
