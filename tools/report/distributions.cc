#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/report/figures.h"
#include "tools/report/plot.h"

namespace tierkv::report {
namespace {

using analysis::LogHistogram;
using analysis::Survey;

// First, middle and last of the layers that were looked at.
std::vector<int32_t> representative_layers(const Survey& s) {
  std::vector<int32_t> seen;
  for (int32_t l = 0; l < s.num_layers; ++l) {
    if (s.value_norm[l].total() > 0) seen.push_back(l);
  }
  std::vector<int32_t> out;
  for (const size_t i : {size_t{0}, (seen.size() - 1) / 2, seen.size() - 1}) {
    if (out.empty() || out.back() != seen[i]) out.push_back(seen[i]);
  }
  return out;
}

double bin_start(int32_t bin) {
  return std::pow(
      10.0, LogHistogram::kFirstDecade + static_cast<double>(bin) / LogHistogram::kBinsPerDecade);
}

// Bins that any of the histograms has numbers in, as [first, last].
std::pair<int32_t, int32_t> used_bins(const std::vector<LogHistogram>& layers,
                                      const std::vector<int32_t>& which) {
  int32_t first = LogHistogram::kBins, last = 0;
  for (const int32_t l : which) {
    for (int32_t b = 0; b < LogHistogram::kBins; ++b) {
      if (layers[l].bins[b] == 0) continue;
      first = std::min(first, b);
      last = std::max(last, b);
    }
  }
  return {first, last};
}

// Densities of a few layers over the logarithm, as outlines.
void draw_densities(Svg* svg, const Frame& frame, const std::vector<LogHistogram>& layers,
                    const std::vector<int32_t>& which, const std::string& label) {
  const auto [first, last] = used_bins(layers, which);
  double top = 0;
  for (const int32_t l : which) {
    for (const int64_t n : layers[l].bins) {
      top = std::max(top, static_cast<double>(n) / static_cast<double>(layers[l].total()));
    }
  }
  Axis x = {nice_scale(bin_start(first), bin_start(last + 1), true), label};
  Axis y = {nice_scale(0, top, false), "share of tokens", true};
  draw_axes(svg, frame, &x, &y);
  for (size_t i = 0; i < which.size(); ++i) {
    const LogHistogram& h = layers[which[i]];
    std::vector<Point> points = {{x.scale(bin_start(first)), y.scale(0)}};
    for (int32_t b = first; b <= last; ++b) {
      const double share = static_cast<double>(h.bins[b]) / static_cast<double>(h.total());
      points.push_back({x.scale(bin_start(b)), y.scale(share)});
      points.push_back({x.scale(bin_start(b + 1)), y.scale(share)});
    }
    points.push_back({x.scale(bin_start(last + 1)), y.scale(0)});
    svg->polyline(points, {color(static_cast<int>(i)), 1.6, dashes(static_cast<int>(i))});
  }
}

}  // namespace

std::string score_distributions(const Survey& survey) {
  Svg svg(720, 300, "Distributions of significance, value norms and key norms");
  const std::vector<int32_t> layers = representative_layers(survey);
  const bool significance = survey.significance[layers[0]].total() > 0;
  const double width = significance ? 174 : 290;
  double left = 58;
  if (significance) {
    draw_densities(&svg, {left, 12, width, 210}, survey.significance, layers,
                   "significance of a token");
    left += width + 62;
  }
  draw_densities(&svg, {left, 12, width, 210}, survey.value_norm, layers, "norm of a value vector");
  left += width + 62;
  draw_densities(&svg, {left, 12, width, 210}, survey.key_norm, layers, "norm of a key vector");
  std::vector<LegendEntry> legend;
  for (size_t i = 0; i < layers.size(); ++i) {
    legend.push_back({"layer " + std::to_string(layers[i]),
                      {color(static_cast<int>(i)), 1.6, dashes(static_cast<int>(i))},
                      std::nullopt});
  }
  draw_legend(&svg, {58, 285}, 640, legend);
  return svg.str();
}

std::string significance_trace(const analysis::SignificanceTrace& trace) {
  double low = 1, high = 1e-30;
  for (const auto& g : trace.groups) {
    for (const double x : {g.median, g.max}) {
      if (x > 0) low = std::min(low, x);
      high = std::max(high, x);
    }
  }
  const Frame frame = {62, 12, 640, 220};
  Svg svg(720, 300, "Significance along one row");
  Axis x = {nice_scale(0, static_cast<double>(trace.tokens), false), "position of the token"};
  x.scale.high = static_cast<double>(trace.tokens);
  Axis y = {nice_scale(std::max(low, high * 1e-9), high, true), "significance"};
  draw_axes(&svg, frame, &x, &y);
  std::vector<Point> median, band;
  for (size_t i = 0; i < trace.groups.size(); ++i) {
    const auto& g = trace.groups[i];
    const int64_t next = i + 1 < trace.groups.size() ? trace.groups[i + 1].first : trace.tokens;
    const double at = x.scale((static_cast<double>(g.first) + static_cast<double>(next)) / 2);
    median.push_back({at, y.scale(std::max(g.median, y.scale.low))});
    band.push_back({at, y.scale(std::max(g.max, y.scale.low))});
  }
  const std::vector<Point> max = band;
  band.insert(band.end(), median.rbegin(), median.rend());
  svg.area(band, "#d6e6f2");
  svg.polyline(max, {color(1), 1, ""});
  svg.polyline(median, {color(0), 1.4, ""});
  draw_legend(&svg, {frame.left, 285}, frame.width,
              {{"largest of a group of neighbours", {color(1), 1, ""}, std::nullopt},
               {"median of the group", {color(0), 1.4, ""}, std::nullopt}});
  return svg.str();
}

std::string critical_by_layer(const Survey& survey) {
  const Frame frame = {62, 12, 640, 200};
  Svg svg(720, 282, "Share of critical tokens per layer");
  Axis x = {{-0.5, survey.num_layers - 0.5}, "layer"};
  x.bare = true;
  Axis y = {nice_scale(0, 1, false), "share of tokens", true};
  draw_axes(&svg, frame, &x, &y);
  const double step = frame.width / survey.num_layers, bar = step * 0.36;
  const int32_t every = std::max(1, static_cast<int>(24 / step) + 1);
  const std::vector<analysis::Spread>* forms[] = {&survey.critical_of_query,
                                                  &survey.critical_received};
  for (int32_t l = 0; l < survey.num_layers; ++l) {
    for (int f = 0; f < 2; ++f) {
      analysis::Spread layer;
      for (int32_t h = 0; h < survey.num_kv_heads; ++h) {
        layer.add((*forms[f])[l * survey.num_kv_heads + h]);
      }
      if (layer.count == 0) continue;
      const double left = x.scale(l) + (f == 0 ? -bar : 0), mean = layer.mean();
      const double middle = left + bar / 2, spread = layer.deviation();
      svg.rectangle({left, y.scale(mean)}, {bar - 1, frame.bottom() - y.scale(mean)}, color(f),
                    fmt::format("layer {}: {:.1f}% +- {:.1f}", l, 100 * mean, 100 * spread));
      svg.line({middle, y.scale(std::max(0.0, mean - spread))},
               {middle, y.scale(std::min(1.0, mean + spread))}, {"#222", 1.2, ""});
    }
    if (l % every == 0) {
      svg.text({x.scale(l), frame.bottom() + 14}, std::to_string(l), Anchor::kMiddle, "tick");
    }
  }
  draw_legend(&svg, {frame.left, 268}, frame.width,
              {{"of one query's attention", {color(0), 1, ""}, Marker::kSquare},
               {"of all attention received", {color(1), 1, ""}, Marker::kSquare}});
  return svg.str();
}

}  // namespace tierkv::report
