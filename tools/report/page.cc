#include "tools/report/page.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/analysis/report.h"
#include "tools/report/figures.h"
#include "tools/report/svg.h"

namespace tierkv::report {
namespace {

using analysis::AnalyzeResult;
using analysis::Survey;

constexpr const char* kStyle = R"(
body { font: 15px/1.45 system-ui, "Helvetica Neue", Arial, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
figure { margin: 0 0 1.2rem; } figcaption { color: #444; font-size: .9rem; max-width: 48rem; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, "Helvetica Neue", Arial, sans-serif; fill: #1a1a1a; }
svg text.small { font-size: 11px; } svg text.tick { font-size: 10px; fill: #444; }
svg text.label { font-size: 11px; font-weight: 600; paint-order: stroke; stroke: #fff; stroke-width: 3px; }
svg text.title { font-weight: 600; }
svg text.cell { font-size: 10px; } svg text.light { fill: #fff; }
table { border-collapse: collapse; font-size: .82rem; margin-bottom: 1rem; }
th, td { padding: .2rem .55rem; text-align: right; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; } td { white-space: nowrap; } td code { white-space: normal; overflow-wrap: anywhere; }
th:nth-child(2), td:nth-child(2) { text-align: left; } tr.front td { font-weight: 600; background: #eef5fa; }
td code { font-size: .95em; } .scroll { overflow-x: auto; } ul { padding-left: 1.2rem; }
@media print {
  @page { margin: 12mm; }
  body { max-width: none; margin: 0; font-size: 11px; } table { font-size: 7.5pt; }
  figure, tr { break-inside: avoid; } h2 { break-after: avoid; } .scroll { overflow: visible; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
)";

constexpr size_t kMaxCompared = 6;  // presets in the figures that compare a few

std::string figure(const std::string& picture, const std::string& caption) {
  return "<figure>\n" + picture + "<figcaption>" + caption + "</figcaption>\n</figure>\n";
}
std::string heading(const std::string& text) {
  return "<h2>" + escaped(text) + "</h2>\n";
}

// Totals over one file, or over all of them, smallest memory first, with their numbers.
struct Subject {
  std::string file;
  ResultList results;
  std::vector<bool> front;
  std::vector<int> numbers;

  bool detailed() const { return !results.empty() && results[0]->detail != nullptr; }
};

std::vector<Subject> subjects_of(const std::vector<AnalyzeResult>& results) {
  const std::vector<bool> front = analysis::pareto_front(results);
  std::vector<size_t> order;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].seq == "all") order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return analysis::bits_per_value(results[a].tally) < analysis::bits_per_value(results[b].tally);
  });
  std::vector<Subject> subjects;
  for (const AnalyzeResult& r : results) {
    const auto same = [&](const Subject& s) { return s.file == r.file; };
    if (std::any_of(subjects.begin(), subjects.end(), same)) continue;
    Subject& s = subjects.emplace_back();
    s.file = r.file;
    for (const size_t i : order) {
      if (results[i].file != r.file) continue;
      s.results.push_back(&results[i]);
      s.front.push_back(front[i]);
      s.numbers.push_back(static_cast<int>(s.results.size()));
    }
  }
  return subjects;
}

// At most n of the list, evenly spread.
ResultList thinned(const ResultList& list, size_t n) {
  if (list.size() <= n) return list;
  ResultList out;
  for (size_t i = 0; i < n; ++i) out.push_back(list[i * (list.size() - 1) / (n - 1)]);
  return out;
}

// The presets that figures of a few compare: of all where they are few, else of the front.
ResultList compared(const Subject& s, bool (*wanted)(const AnalyzeResult&)) {
  ResultList all, best;
  for (size_t i = 0; i < s.results.size(); ++i) {
    if (!wanted(*s.results[i])) continue;
    all.push_back(s.results[i]);
    if (s.front[i]) best.push_back(s.results[i]);
  }
  return thinned(all.size() <= kMaxCompared || best.empty() ? all : best, kMaxCompared);
}

bool loses(const AnalyzeResult& r) {
  const auto error = analysis::relative_error(r.tally, Component::kKey);
  return error.value_or(0) > 1e-4 || r.tally.tokens[static_cast<int>(Tier::kPruned)] > 0;
}
bool has_codes(const AnalyzeResult& r) {
  for (const auto& component : r.detail->codes) {
    for (const analysis::CodeCounts& counts : component) {
      if (!counts.empty()) return true;
    }
  }
  return false;
}
bool has_tiers(const AnalyzeResult& r) {
  return r.tally.tokens[static_cast<int>(Tier::kLow)] +
             r.tally.tokens[static_cast<int>(Tier::kPruned)] >
         0;
}

std::string table(const Subject& s) {
  std::string out = "<div class=\"scroll\"><table><thead><tr><th>#</th><th>preset</th>";
  for (const std::string& c : analysis::table_columns()) out += "<th>" + escaped(c) + "</th>";
  out += "</tr></thead><tbody>\n";
  for (size_t i = 0; i < s.results.size(); ++i) {
    out += fmt::format("<tr{}><td>{}</td><td><code>{}</code></td>",
                       s.front[i] ? " class=\"front\"" : "", s.numbers[i],
                       escaped(s.results[i]->preset));
    for (const std::string& c : analysis::table_cells(*s.results[i]))
      out += "<td>" + escaped(c) + "</td>";
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string rate_section(const Subject& s) {
  Subject measured;  // without attention errors there is nothing to draw
  for (size_t i = 0; i < s.results.size(); ++i) {
    if (!analysis::ranking_error(s.results[i]->tally)) continue;
    measured.results.push_back(s.results[i]);
    measured.numbers.push_back(s.numbers[i]);
    measured.front.push_back(s.front[i]);
  }
  if (measured.results.empty()) {
    return "<p>No attention error: the dump has no queries.</p>\n";
  }
  return figure(
      rate_distortion(measured.results, measured.numbers, measured.front),
      "Each point is a preset, numbered as in the table. Memory counts everything stored "
      "(codes, scales, windows, codebooks); the error of attention outputs is the weighted "
      "one, or the pooled one where no profile has sensitivities. Presets without loss lie "
      "on the floor of the chart. Attention error does not see what pruning loses.");
}

std::string preset_sections(const Subject& s) {
  std::string out;
  if (const ResultList tiers = compared(s, has_tiers); !tiers.empty()) {
    out += heading("Tiers per layer and head") +
           figure(tier_shares(thinned(tiers, 4)),
                  "Shares of all tokens; what is missing to 100% is the window and the sinks.");
  }
  if (const ResultList coded = compared(s, has_codes); !coded.empty()) {
    out += heading("Codes") +
           figure(code_histograms(coded),
                  "How often each quantisation code occurs, over all layers and heads, outside "
                  "window and sinks. The rarest codes at the ends, one in 10000 together, are cut "
                  "off. The narrower the histogram, the more entropy coding gains.");
  }
  if (const ResultList lossy = compared(s, loses); !lossy.empty()) {
    out += heading("Error along the sequence") +
           figure(error_by_position(lossy),
                  "Norm of the difference over norm of the original, over kept tokens, by place in "
                  "the sequence. Windows show as a drop at the end. What lies below the floor of "
                  "the chart is drawn on it.");
  }
  return out;
}

std::string survey_sections(const Survey& s) {
  std::string out =
      heading("Who is attended to") +
      figure(score_distributions(s),
             "Significance is the attention a token receives per later query (largest of "
             "the group's heads). How many decades it spans against the values' norms "
             "is DiffKV's reason to give keys more bits than values. First, middle and "
             "last layer.");
  bool any = false;
  for (const analysis::Spread& r : s.critical_of_query) any |= r.count > 0;
  for (const analysis::Spread& r : s.critical_received) any |= r.count > 0;
  if (!s.trace.groups.empty()) {
    out +=
        figure(significance_trace(s.trace),
               fmt::format("Significance along sequence {}, layer {}, head {}; the newest tokens "
                           "have been seen by few queries yet.",
                           escaped(s.trace.seq), s.trace.layer, s.trace.kv_head));
  } else {
    out += "<p>The dumps hold no significance: it is not drawn.</p>\n";
  }
  if (!any) return out + "<p>No critical tokens: the dumps hold neither q nor significance.</p>\n";
  return out + heading("Critical tokens") +
         figure(critical_by_layer(s),
                "The smallest share of tokens that holds 95% of the attention: of one query (mean "
                "over up to 64 queries and the group's heads) and of all attention received. Mean "
                "over heads and sequences, with the standard deviation.") +
         figure(critical_by_head(s),
                "The same per layer (across) and key/value head (down), in percent.");
}

std::string introduction(const analysis::SweepResult& sweep, const std::string& version) {
  std::string out = fmt::format("<h1>KV cache: rate and distortion</h1>\n<p>tierkv {}</p>\n<ul>\n",
                                escaped(version));
  for (const datasets::DumpInfo& f : sweep.files) {
    int64_t tokens = 0;
    for (const datasets::SequenceInfo& s : f.sequences) tokens += s.num_tokens;
    const CacheLayout& l = f.layout;
    out += fmt::format(
        "<li><code>{}</code>: {}, {} sequences, {} tokens, {} layers, {} query heads, {} key/value "
        "heads of {} channels, {}</li>\n",
        escaped(f.path), escaped(f.model_id.empty() ? "unknown model" : f.model_id),
        f.sequences.size(), tokens, l.num_layers, l.num_q_heads, l.num_kv_heads, l.head_dim,
        dtype_name(l.dtype));
  }
  out += "</ul>\n";
  if (sweep.skipped.empty()) return out;
  out += "<p>Left out:</p>\n<ul>\n";
  for (const analysis::SkippedPreset& s : sweep.skipped)
    out += "<li>" + escaped(s.reason) + "</li>\n";
  return out + "</ul>\n";
}

// One survey of all dumps where they have the same shape, else that of each.
std::vector<Survey> joined(const std::vector<Survey>& surveys) {
  std::vector<Survey> out;
  for (const Survey& s : surveys) {
    const auto same = std::find_if(out.begin(), out.end(), [&](const Survey& o) {
      return o.num_layers == s.num_layers && o.num_kv_heads == s.num_kv_heads;
    });
    if (same == out.end()) {
      out.push_back(s);
    } else {
      same->add(s);
    }
  }
  return out;
}

}  // namespace

std::string html_page(const ReportInput& input) {
  std::string body = introduction(*input.sweep, input.version);
  const std::vector<Subject> subjects = subjects_of(input.sweep->results);
  const auto name = [&](const Subject& s) {
    return s.file == analysis::kPooled ? "all dumps together" : s.file;
  };
  for (const Subject& s : subjects) {
    body += heading("Rate and distortion: " + name(s)) + rate_section(s);
  }
  for (const Subject& s : subjects) {
    if (!s.detailed()) continue;
    body += preset_sections(s);
    if (s.file == analysis::kPooled) break;  // holds the others
  }
  for (const Survey& s : joined(input.surveys)) body += survey_sections(s);
  for (const Subject& s : subjects) body += heading("Table: " + name(s)) + table(s);
  body += "<p>" + escaped(analysis::table_legend()) + "</p>\n";
  return "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n"
         "<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" "
         "content=\"width=device-width, initial-scale=1\"/>\n"
         "<title>tierkv report</title>\n<style>" +
         std::string(kStyle) + "</style>\n</head>\n<body>\n" + body + "</body>\n</html>\n";
}

}  // namespace tierkv::report
