#include "tools/analysis/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

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
  j["values"] = t.values;
  j["bits_per_value"] = bits_per_value(t);
  j["ratio"] = compression_ratio(t);
  j["page_ratio"] = number(page_ratio(t));
  j["tiers"] = tiers;
  j["key_rel_error"] = number(relative_error(t, Component::kKey));
  j["value_rel_error"] = number(relative_error(t, Component::kValue));
  j["attention_rel_error"] = number(attention_error(t));
  j["attention_rel_error_online"] = number(attention_error_online(t));
  j["attention_cosine"] = number(attention_cosine(t));
  j["key_entropy_bits"] = number(entropy_bits(t, Component::kKey));
  j["value_entropy_bits"] = number(entropy_bits(t, Component::kValue));
  j["key_coded_bits"] = number(coded_bits(t, Component::kKey));
  j["value_coded_bits"] = number(coded_bits(t, Component::kValue));
  j["encode_gbps"] = number(encode_gbps(t));
  j["decode_gbps"] = number(decode_gbps(t));
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

bool beaten(const AnalyzeResult& r, const std::vector<const AnalyzeResult*>& others) {
  const std::optional<double> error = attention_error_online(r.tally);
  if (!error) return false;
  for (const AnalyzeResult* o : others) {
    const std::optional<double> e = attention_error_online(o->tally);
    const double mine = bits_per_value(r.tally), theirs = bits_per_value(o->tally);
    if (e && theirs <= mine && *e <= *error && (theirs < mine || *e < *error)) return true;
  }
  return false;
}

}  // namespace

std::string to_json(const std::vector<datasets::DumpInfo>& files,
                    const std::vector<AnalyzeResult>& results) {
  Json j;
  j["schema"] = "tierkv.analyze/1";
  j["files"] = Json::array();
  for (const datasets::DumpInfo& info : files) {
    Json f;
    f["file"] = info.path;
    f["model_id"] = info.model_id;
    f["num_layers"] = info.layout.num_layers;
    f["num_q_heads"] = info.layout.num_q_heads;
    f["num_kv_heads"] = info.layout.num_kv_heads;
    f["head_dim"] = info.layout.head_dim;
    f["dtype"] = dtype_name(info.layout.dtype);
    j["files"].push_back(f);
  }
  j["results"] = Json::array();
  for (const AnalyzeResult& r : results) j["results"].push_back(result_json(r));
  return j.dump(1) + "\n";
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
  std::vector<std::string> files;
  for (const AnalyzeResult& r : results) {
    if (std::find(files.begin(), files.end(), r.file) == files.end()) files.push_back(r.file);
  }
  for (const std::string& file : files) {
    std::vector<const AnalyzeResult*> rows;
    for (const AnalyzeResult& r : results) {
      if (r.file == file && r.seq == "all") rows.push_back(&r);
    }
    std::stable_sort(rows.begin(), rows.end(), [](const AnalyzeResult* a, const AnalyzeResult* b) {
      return bits_per_value(a->tally) < bits_per_value(b->tally);
    });
    size_t width = 6;
    for (const AnalyzeResult* r : rows) width = std::max(width, r->preset.size());
    out += fmt::format(
        "{}\n  {:<{}}  memory  bits/value  ratio  page ratio  attention error  key err  value err  "
        "coded K/V bits  enc/dec GB/s\n",
        file, "preset", width);
    for (const AnalyzeResult* r : rows) {
      const Tally& t = r->tally;
      out += fmt::format(
          "{} {:<{}}  {:5.1f}%  {:10.2f}  {:5.2f}  {:>10}  {:>15}  {:>7}  {:>9}  {:>14}  {:>12}\n",
          beaten(*r, rows) ? " " : "*", r->preset, width, 100 / compression_ratio(t),
          bits_per_value(t), compression_ratio(t), cell(page_ratio(t), "{:.2f}"),
          cell(attention_error_online(t), "{:.4f}"),
          cell(relative_error(t, Component::kKey), "{:.4f}"),
          cell(relative_error(t, Component::kValue), "{:.4f}"),
          cell(coded_bits(t, Component::kKey), "{:.2f}") + "/" +
              cell(coded_bits(t, Component::kValue), "{:.2f}"),
          cell(encode_gbps(t), "{:.2f}") + "/" + cell(decode_gbps(t), "{:.2f}"));
    }
  }
  out +=
      "memory: share of fp16, everything counted. attention error: mean of |o - o'| / |o| with the "
      "window moving with\n"
      "each query (attention_rel_error_online). *: no other row has both less memory and less "
      "error. Rates are of one\n"
      "thread on the host.\n";
  return out;
}

}  // namespace tierkv::analysis
