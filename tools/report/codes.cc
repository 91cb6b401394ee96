#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/report/figures.h"
#include "tools/report/plot.h"

namespace tierkv::report {
namespace {

using analysis::CodeCounts;
using analysis::PositionErrors;

int64_t total(const CodeCounts& counts) {
  int64_t n = 0;
  for (const auto& [code, count] : counts) n += count;
  return n;
}

// The codes that matter: without the rarest on either side that are less than 1 in 10000 together.
std::pair<int32_t, int32_t> main_range(const CodeCounts& counts) {
  const int64_t spare = total(counts) / 20000;
  int64_t below = 0, above = 0;
  auto first = counts.begin();
  while ((below += first->second) <= spare) ++first;
  auto last = counts.rbegin();
  while ((above += last->second) <= spare) ++last;
  return {first->first, last->first};
}

void draw_codes(Svg* svg, const Frame& frame, const CodeCounts& counts, int hue,
                const std::string& title) {
  svg->text({frame.left, frame.top - 4}, title, Anchor::kStart, "small");
  if (counts.empty()) {
    svg->text({frame.left, frame.top + 20}, "stored raw", Anchor::kStart, "tick");
    return;
  }
  const auto [first, last] = main_range(counts);
  const auto n = static_cast<double>(total(counts));
  double top = 0;
  for (const auto& [code, count] : counts) top = std::max(top, static_cast<double>(count) / n);
  Axis x = {{first - 0.5, last + 0.5}, ""};
  Axis y = {nice_scale(0, top, false), "", true};
  draw_axes(svg, frame, &x, &y);
  std::vector<Point> outline = {{x.scale(first - 0.5), y.scale(0)}};
  for (int32_t code = first; code <= last; ++code) {
    const auto it = counts.find(code);
    const double share = it == counts.end() ? 0 : static_cast<double>(it->second) / n;
    outline.push_back({x.scale(code - 0.5), y.scale(share)});
    outline.push_back({x.scale(code + 0.5), y.scale(share)});
  }
  outline.push_back({x.scale(last + 0.5), y.scale(0)});
  svg->area(outline, color(hue));
}

std::string bits_text(const std::optional<double>& entropy) {
  return entropy ? fmt::format(", entropy {:.2f} bits", *entropy) : "";
}

}  // namespace

std::string code_histograms(const ResultList& results) {
  constexpr double kRow = 128;
  struct Panel {
    const analysis::AnalyzeResult* result;
    int part;
  };
  std::vector<Panel> panels;
  for (const analysis::AnalyzeResult* r : results) {
    for (int part = 0; part < 2; ++part) {
      if (!r->detail->codes[0][part].empty() || !r->detail->codes[1][part].empty())
        panels.push_back({r, part});
    }
  }
  Svg svg(720, kRow * static_cast<double>(panels.size()) + 6, "Histograms of quantisation codes");
  for (size_t i = 0; i < panels.size(); ++i) {
    const analysis::AnalyzeResult& r = *panels[i].result;
    const double y = kRow * static_cast<double>(i);
    const bool tiers = !r.detail->codes[0][1].empty() || !r.detail->codes[1][1].empty();
    const std::string tier = !tiers ? "" : panels[i].part == 0 ? ", high tier" : ", low tier";
    svg.text({0, y + 13}, r.preset + tier, Anchor::kStart, "title");
    for (int c = 0; c < 2; ++c) {
      const std::string bits =
          tiers ? "" : bits_text(analysis::entropy_bits(r.tally, static_cast<Component>(c)));
      draw_codes(&svg, {c == 0 ? 44.0 : 406.0, y + 34, 300, 66}, r.detail->codes[c][panels[i].part],
                 c, (c == 0 ? "keys" : "values") + bits);
    }
  }
  return svg.str();
}

std::string error_by_position(const ResultList& results) {
  Svg svg(720, 282 + 16.0 * static_cast<double>((results.size() + 1) / 2),
          "Relative error of keys and values along the sequence");
  double low = 1, high = 1e-4;
  const auto error = [&](const analysis::AnalyzeResult& r, int c, int bin) {
    const PositionErrors::Squares& s = r.detail->errors.bins[c][bin];
    return s.norm > 0 ? std::sqrt(s.error / s.norm) : 0.0;
  };
  for (const analysis::AnalyzeResult* r : results) {
    for (int c = 0; c < 2; ++c) {
      for (int b = 0; b < PositionErrors::kBins; ++b) {
        const double e = error(*r, c, b);
        if (e > 1e-4) low = std::min(low, e);
        high = std::max(high, e);
      }
    }
  }
  for (int c = 0; c < 2; ++c) {
    const Frame frame = {c == 0 ? 62.0 : 412.0, 12, 292, 220};
    Axis x = {{0, 1}, "position, share of the sequence", true};
    Axis y = {nice_scale(std::min(low, high / 2), high, true),
              c == 0 ? "relative error of keys" : "relative error of values"};
    draw_axes(&svg, frame, &x, &y);
    for (size_t i = 0; i < results.size(); ++i) {
      std::vector<Point> line;
      for (int b = 0; b < PositionErrors::kBins; ++b) {
        const double e = std::max(error(*results[i], c, b), y.scale.low);
        line.push_back({x.scale((b + 0.5) / PositionErrors::kBins), y.scale(e)});
      }
      svg.polyline(line, {color(static_cast<int>(i)), 1.5, dashes(static_cast<int>(i))});
    }
  }
  std::vector<LegendEntry> legend;
  for (size_t i = 0; i < results.size(); ++i) {
    legend.push_back({results[i]->preset,
                      {color(static_cast<int>(i)), 1.5, dashes(static_cast<int>(i))},
                      std::nullopt});
  }
  draw_legend(&svg, {62, 284}, 640, legend);
  return svg.str();
}

}  // namespace tierkv::report
