// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/sweep.h"

#include <map>

namespace tierkv::analysis {
namespace {

double input_bytes(const datasets::DumpInfo& info) {
  double bytes = 0;
  for (const datasets::SequenceInfo& s : info.sequences) {
    bytes += static_cast<double>(s.num_tokens) * info.layout.num_layers;
  }
  return bytes * info.layout.num_kv_heads * info.layout.head_dim;
}

using DetailPointer = std::shared_ptr<const PresetDetail>;

// Null where the two are of different shapes.
DetailPointer joined(const DetailPointer& a, const DetailPointer& b) {
  if (a == nullptr || b == nullptr || a->num_layers != b->num_layers ||
      a->num_kv_heads != b->num_kv_heads) {
    return nullptr;
  }
  auto sum = std::make_shared<PresetDetail>(*a);
  sum->add(*b);
  return sum;
}

std::vector<AnalyzeResult> pooled(const std::vector<AnalyzeResult>& totals, size_t files) {
  std::vector<AnalyzeResult> sums;
  std::map<std::string, std::pair<size_t, int32_t>> place;  // of a preset: its sum, its files
  for (const AnalyzeResult& r : totals) {
    const auto [it, is_new] = place.emplace(r.preset, std::make_pair(sums.size(), int32_t{0}));
    if (is_new) sums.push_back({kPooled, r.preset, "all", {}, nullptr});
    AnalyzeResult& sum = sums[it->second.first];
    Tally tally = r.tally;
    tally.rows.clear();
    for (const auto& [key, row] : r.tally.rows)
      tally.rows[{it->second.second, key[1], key[2]}] = row;
    const bool paged = tally.page_bytes > 0 && (is_new || sum.tally.page_bytes > 0);
    sum.tally.add(tally);
    if (!paged) sum.tally.page_bytes = 0;
    sum.detail = is_new ? r.detail : joined(sum.detail, r.detail);
    ++it->second.second;
  }
  std::erase_if(sums, [&](const AnalyzeResult& r) {
    return place.at(r.preset).second != static_cast<int32_t>(files);
  });
  return sums;
}

}  // namespace

Result<SweepResult> sweep(std::vector<datasets::DumpReader>& readers, const AnalyzeOptions& given,
                          bool sequences) {
  SweepResult out;
  double total = 0, done = 0;
  for (const datasets::DumpReader& reader : readers) {
    if (Status s = check_options(reader.info(), given); !s) return s;
    total += input_bytes(reader.info());
  }
  std::vector<AnalyzeResult> parts, totals;
  for (datasets::DumpReader& reader : readers) {
    const datasets::DumpInfo& info = reader.info();
    AnalyzeOptions options = given;
    options.presets.clear();
    for (const Preset& preset : given.presets) {
      const Status s = suits(info, preset, given);
      if (s) options.presets.push_back(preset);
      if (!s) out.skipped.push_back({info.path, preset.text, s.message()});
    }
    out.files.push_back(info);
    if (!options.presets.empty()) {
      const double share = input_bytes(info) / total;
      options.progress = [&](double fraction) {
        if (given.progress) given.progress(done + fraction * share);
      };
      std::vector<Status> failures;
      Result<std::vector<AnalyzeResult>> results = analyze(reader, options, &failures);
      if (!results) return results.status();
      for (size_t p = 0; p < failures.size(); ++p) {
        if (failures[p]) continue;
        out.skipped.push_back({info.path, options.presets[p].text, failures[p].message()});
      }
      for (AnalyzeResult& r : *results) {
        if (r.seq == "all") totals.push_back(r);
        if (r.seq == "all" || sequences) parts.push_back(std::move(r));
      }
    }
    done += input_bytes(info) / total;
  }
  if (readers.size() > 1) out.results = pooled(totals, readers.size());
  out.results.insert(out.results.end(), parts.begin(), parts.end());
  return out;
}

std::vector<bool> pareto_front(const std::vector<AnalyzeResult>& results) {
  std::vector<bool> front;
  for (const AnalyzeResult& r : results) {
    const std::optional<double> error = ranking_error(r.tally);
    bool best = error.has_value();
    for (const AnalyzeResult& o : results) {
      const std::optional<double> e = ranking_error(o.tally);
      if (!best || !e || o.file != r.file || o.seq != r.seq) continue;
      const double mine = bits_per_value(r.tally), theirs = bits_per_value(o.tally);
      best = !(theirs <= mine && *e <= *error && (theirs < mine || *e < *error));
    }
    front.push_back(best);
  }
  return front;
}

std::vector<std::string> default_sweep() {
  return {"fp16",
          "k8v8",
          "k8v4",
          "k4v8",
          "k4v4",
          "k8v2",
          "k4v2",
          "k2v4",
          "k4v4+rot",
          "k4v2+rot",
          "k4v4+huffman",
          "diffkv",
          "diffkv:low=k4v4",
          "diffkv:alpha_h=3",
          "diffkv:alpha_h=3,low=k4v4",
          "kivi4:group=64",
          "kivi4:group=32",
          "kivi2",
          "kvcomp:rel_k=0.025,rel_v=0.075",
          "kvcomp",
          "kvcomp:predict=token",
          "kvcomp:rel_k=0.1,rel_v=0.2",
          "kvcomp:unit=channel,rel_k=0.1",
          "kvcomp:unit=channel,rel_k=0.15",
          "kvcomp:unit=channel,rel_k=0.25,rel_v=0.2",
          "small:k=0.2,v=0.2",
          "small:k=0.3,v=0.25",
          "small:k=0.4,v=0.35",
          "small",
          "small:books=4",
          "small:importance=off",
          "small:k=0.7,v=0.6",
          "step:k=0.2,v=0.2",
          "step",
          "step:k=0.5,v=0.4",
          "step+fse",
          "step:basis=none",
          "step+rot",
          "zstd-fp16",
          "zstd-codes:of=k4v4",
          "snapkv",
          "snapkv:keep=0.25",
          "h2o",
          "h2o:keep=0.25"};
}

}  // namespace tierkv::analysis
