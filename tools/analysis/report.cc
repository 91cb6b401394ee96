// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/report.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/analysis/detail_json.h"
#include "tools/analysis/json_text.h"
#include "tools/analysis/layer_data.h"

namespace tierkv::analysis {
namespace {

using Json = nlohmann::ordered_json;

Json number(const std::optional<double>& v) {
  return v ? Json(*v) : Json(nullptr);
}

double tier_share(const Tally& t, Tier tier) {
  int64_t total = 0;
  for (const int64_t n : t.tokens) total += n;
  return total > 0
             ? static_cast<double>(t.tokens[static_cast<int>(tier)]) / static_cast<double>(total)
             : 0;
}

// The window and the sinks of a preset; nullopt where it has none by its nature.
std::optional<TierPolicy> kept_apart(const AnalyzeResult& r) {
  const Result<Preset> preset = parse_preset(r.preset);
  if (!preset || preset->scheme.keeps_all_alike()) return std::nullopt;
  return preset->scheme.policy;
}

// Bytes of coded blocks by what they hold, and of rows' own means and steps; null without
// blocks.
Json parts_json(const Tally& t) {
  const BlockStats& s = t.blocks;
  if (s.total_bits() == 0) return nullptr;
  Json j;
  j["codes"] = s.payload_bits / 8;
  j["exceptions"] = s.exception_bits / 8;
  j["headers"] = s.header_bits / 8;
  j["exponents"] = s.exponent_bits / 8;
  j["stream_lengths"] = s.length_bits / 8;
  j["padding"] = s.padding_bits / 8;
  j["means_and_steps"] = t.row_bytes;
  return j;
}

Json result_json(const AnalyzeResult& r) {
  const Tally& t = r.tally;
  Json tiers;
  tiers["window"] = tier_share(t, Tier::kWindow);
  tiers["high"] = tier_share(t, Tier::kHigh);
  tiers["low"] = tier_share(t, Tier::kLow);
  tiers["pruned"] = tier_share(t, Tier::kPruned);
  Json j;
  j["file"] = r.file;
  j["preset"] = r.preset;
  j["seq"] = r.seq;
  const std::optional<TierPolicy> kept = kept_apart(r);
  j["window"] = kept ? Json(kept->window_tokens) : Json(nullptr);
  j["sinks"] = kept ? Json(kept->sink_tokens) : Json(nullptr);
  j["values"] = t.values;
  j["bits_per_value"] = bits_per_value(t);
  j["ratio"] = compression_ratio(t);
  j["page_ratio"] = number(page_ratio(t));
  j["tiers"] = tiers;
  j["key_rel_error"] = number(relative_error(t, Component::kKey));
  j["value_rel_error"] = number(relative_error(t, Component::kValue));
  j["attention_rel_error"] = number(attention_error(t));
  j["attention_rel_error_online"] = number(attention_error_online(t));
  j["attention_pooled_error"] = number(attention_error_pooled(t));
  j["attention_weighted_error"] = number(attention_error_weighted(t));
  j["attention_cosine"] = number(attention_cosine(t));
  j["key_entropy_bits"] = number(entropy_bits(t, Component::kKey));
  j["value_entropy_bits"] = number(entropy_bits(t, Component::kValue));
  j["key_coded_bits"] = number(coded_bits(t, Component::kKey));
  j["value_coded_bits"] = number(coded_bits(t, Component::kValue));
  j["parts"] = parts_json(t);
  j["encode_gbps"] = number(encode_gbps(t));
  j["decode_gbps"] = number(decode_gbps(t));
  if (r.detail != nullptr) j["detail"] = detail_json(*r.detail);
  return j;
}

// A CSV field is quoted where it holds a comma, a quote or a line end.
std::string csv_text(const std::string& s) {
  if (s.find_first_of(",\"\n") == std::string::npos) return s;
  std::string quoted = "\"";
  for (const char c : s) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string cell(const std::optional<double>& v, const char* format) {
  return v ? fmt::format(fmt::runtime(format), *v) : "-";
}

Json files_json(const std::vector<datasets::DumpInfo>& files, const Profile* profile) {
  Json list = Json::array();
  for (const datasets::DumpInfo& info : files) {
    Json f;
    f["file"] = info.path;
    f["model_id"] = info.model_id;
    f["num_layers"] = info.layout.num_layers;
    f["num_q_heads"] = info.layout.num_q_heads;
    f["num_kv_heads"] = info.layout.num_kv_heads;
    f["head_dim"] = info.layout.head_dim;
    f["dtype"] = dtype_name(info.layout.dtype);
    f["rope"] = describe_rope(info, profile);
    f["num_sequences"] = info.sequences.size();
    int64_t tokens = 0;
    for (const datasets::SequenceInfo& s : info.sequences) tokens += s.num_tokens;
    f["num_tokens"] = tokens;
    list.push_back(f);
  }
  return list;
}

// The details behind all else, then in one line: their arrays are long.
std::string text_of(Json j, const Profile* profile, const Details* details) {
  if (details == nullptr) return json_text(j, 1);
  j["profile"] = profile == nullptr ? Json(nullptr) : profile_json(*profile);
  j["surveys"] = Json::array();
  for (const Survey& s : details->surveys) j["surveys"].push_back(survey_json(s));
  return json_text(j, -1);
}

// One row of a table for people.
struct TableRow {
  const AnalyzeResult* result;
  bool best;  // on the Pareto front
};

// The totals of each file, least error first (without queries: smallest cache), in the order in
// which the files come.
std::vector<std::vector<TableRow>> totals_by_file(const std::vector<AnalyzeResult>& results) {
  const std::vector<bool> front = pareto_front(results);
  std::vector<std::vector<TableRow>> files;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].seq != "all") continue;
    const auto same = std::find_if(files.begin(), files.end(), [&](const auto& rows) {
      return rows[0].result->file == results[i].file;
    });
    auto& rows = same == files.end() ? files.emplace_back() : *same;
    rows.push_back({&results[i], front[i]});
  }
  for (std::vector<TableRow>& rows : files) {
    std::stable_sort(rows.begin(), rows.end(), [](const TableRow& a, const TableRow& b) {
      const std::optional<double> x = ranking_error(a.result->tally);
      const std::optional<double> y = ranking_error(b.result->tally);
      if (x && y && *x != *y) return *x < *y;
      return bits_per_value(a.result->tally) < bits_per_value(b.result->tally);
    });
  }
  return files;
}

}  // namespace

const std::vector<std::string>& table_columns() {
  static const std::vector<std::string> kColumns = {
      "memory",       "bits/value",     "ratio",           "page ratio",
      "pooled error", "weighted",       "attention error", "key err",
      "value err",    "coded K/V bits", "window+sinks",    "enc/dec GB/s"};
  return kColumns;
}

std::vector<std::string> table_cells(const AnalyzeResult& r) {
  const Tally& t = r.tally;
  const std::optional<TierPolicy> kept = kept_apart(r);
  const auto pair = [](const std::optional<double>& a, const std::optional<double>& b) {
    return cell(a, "{:.2f}") + "/" + cell(b, "{:.2f}");
  };
  return {fmt::format("{:.1f}%", 100 / compression_ratio(t)),
          fmt::format("{:.2f}", bits_per_value(t)),
          fmt::format("{:.2f}", compression_ratio(t)),
          cell(page_ratio(t), "{:.2f}"),
          cell(attention_error_pooled(t), "{:.4f}"),
          cell(attention_error_weighted(t), "{:.4f}"),
          cell(attention_error_online(t), "{:.4f}"),
          cell(relative_error(t, Component::kKey), "{:.4f}"),
          cell(relative_error(t, Component::kValue), "{:.4f}"),
          pair(coded_bits(t, Component::kKey), coded_bits(t, Component::kValue)),
          kept ? fmt::format("{}+{}", kept->window_tokens, kept->sink_tokens) : "-",
          pair(encode_gbps(t), decode_gbps(t))};
}

std::string table_legend() {
  return "memory: share of fp16, everything counted. pooled error: of attention outputs, |o - o'| "
         "over all heads and queries of a layer by |o|, mean over layers; weighted: the same by "
         "head, weighted with the sensitivities of the profile; attention error: mean over heads "
         "and queries of |o - o'| / |o|. In all three the window moves with each query. "
         "window+sinks: newest and "
         "first tokens kept apart; rows compare where these are equal. Rates are of one thread "
         "on the host.";
}

std::string metric_help() {
  return R"(Errors of attention outputs, o' over what is stored against o over the dump, the window moving with each query:
  attention_pooled_error      sqrt(sum |o - o'|^2 / sum |o|^2) over the heads and queries of a layer, mean over layers
  attention_weighted_error    sqrt of the mean over (layer, kv head) of sum |o - o'|^2 / sum |o|^2, weighted with the
                              sensitivities of --profile; none without
  attention_rel_error_online  mean over heads and queries of |o - o'| / |o|
  attention_rel_error         the same with the window at the end of the sequence
Tables are sorted by the weighted error, which agrees best with KL, and by the pooled one where it is unknown. A star
marks presets that no other beats in both memory and that error.
JSON has `parts`: the bytes of small's blocks by what they hold.
)";
}

std::string to_json(const std::vector<datasets::DumpInfo>& files,
                    const std::vector<AnalyzeResult>& results, const Profile* profile,
                    const Details* details) {
  Json j;
  j["schema"] = "tierkv.analyze/1";
  j["files"] = files_json(files, profile);
  j["results"] = Json::array();
  for (const AnalyzeResult& r : results) j["results"].push_back(result_json(r));
  return text_of(std::move(j), profile, details);
}

std::string to_json(const SweepResult& sweep, const Profile* profile, const Details* details) {
  Json j;
  j["schema"] = "tierkv.sweep/1";
  j["files"] = files_json(sweep.files, profile);
  j["skipped"] = Json::array();
  for (const SkippedPreset& s : sweep.skipped) {
    j["skipped"].push_back({{"file", s.file}, {"preset", s.preset}, {"reason", s.reason}});
  }
  j["results"] = Json::array();
  const std::vector<bool> front = pareto_front(sweep.results);
  for (size_t i = 0; i < front.size(); ++i) {
    Json r = result_json(sweep.results[i]);
    r["pareto"] = static_cast<bool>(front[i]);
    j["results"].push_back(r);
  }
  return text_of(std::move(j), profile, details);
}

std::string to_csv(const std::vector<AnalyzeResult>& results) {
  std::string out;
  for (const AnalyzeResult& r : results) {
    Json j = result_json(r);
    const Json tiers = j["tiers"];
    std::string header, line;
    const auto field = [&](const std::string& name, const Json& v) {
      header += (header.empty() ? "" : ",") + name;
      line += (line.empty() ? "" : ",") + (v.is_string() ? csv_text(v.get<std::string>())
                                           : v.is_null() ? std::string()
                                                         : v.dump());
    };
    for (const auto& [key, value] : j.items()) {
      if (key == "parts") continue;  // of JSON alone
      if (key != "tiers") {
        field(key, value);
        continue;
      }
      for (const auto& [tier, share] : tiers.items()) field("tier_" + tier, share);
    }
    if (out.empty()) out = header + "\n";
    out += line + "\n";
  }
  return out;
}

std::string to_table(const std::vector<AnalyzeResult>& results) {
  std::string out;
  for (const std::vector<TableRow>& rows : totals_by_file(results)) {
    size_t width = 6;
    for (const TableRow& r : rows) width = std::max(width, r.result->preset.size());
    out += fmt::format("{}\n  {:<{}}", rows[0].result->file, "preset", width);
    for (const std::string& c : table_columns()) out += "  " + c;
    out += "\n";
    for (const TableRow& r : rows) {
      out += fmt::format("{} {:<{}}", r.best ? "*" : " ", r.result->preset, width);
      const std::vector<std::string> row = table_cells(*r.result);
      for (size_t c = 0; c < row.size(); ++c)
        out += fmt::format("  {:>{}}", row[c], table_columns()[c].size());
      out += "\n";
    }
  }
  out += table_legend() + " *: no other row has both less memory and less error.\n";
  return out;
}

std::string to_markdown(const std::vector<AnalyzeResult>& results) {
  std::string out;
  for (const std::vector<TableRow>& rows : totals_by_file(results)) {
    out += fmt::format("### {}\n\n| preset |", rows[0].result->file);
    for (const std::string& c : table_columns()) out += " " + c + " |";
    out += "\n|---|";
    for (size_t c = 0; c < table_columns().size(); ++c) out += "---:|";
    out += "\n";
    for (const TableRow& r : rows) {
      const char* mark = r.best ? "**" : "";
      out += fmt::format("| {}`{}`{} |", mark, r.result->preset, mark);
      for (const std::string& text : table_cells(*r.result)) out += " " + text + " |";
      out += "\n";
    }
    out += "\n";
  }
  std::string legend = table_legend();
  for (size_t at = 0; (at = legend.find('|', at)) != std::string::npos; at += 2)
    legend.insert(at, "\\");
  out += legend + " Bold: no other row has both less memory and less error.\n";
  return out;
}

}  // namespace tierkv::analysis
