#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "tools/report/figures.h"
#include "tools/report/plot.h"

namespace tierkv::report {
namespace {

// A matrix of shares, layers to the right, heads downwards; numbers in the cells where they fit.
struct HeatMap {
  std::string title;
  int32_t layers = 0, heads = 0;
  double low = 0, high = 1;  // of the colours
  std::function<double(int32_t, int32_t)> share;
};

constexpr double kCellHeight = 18, kTitle = 20, kLabels = 34;

double map_height(int32_t heads) {
  return kTitle + heads * kCellHeight + kLabels;
}

void draw_map(Svg* svg, Point at, double width, const HeatMap& map) {
  const double cell = width / map.layers;
  svg->text({at.x, at.y + 12}, map.title, Anchor::kStart, "label");
  const int32_t every = std::max(1, static_cast<int>(24 / cell) + 1);
  for (int32_t h = 0; h < map.heads; ++h) {
    const double y = at.y + kTitle + h * kCellHeight;
    svg->text({at.x - 5, y + 13}, std::to_string(h), Anchor::kEnd, "tick");
    for (int32_t l = 0; l < map.layers; ++l) {
      const double share = map.share(l, h);
      const double shade = map.high > map.low ? (share - map.low) / (map.high - map.low) : 0;
      const Point corner = {at.x + l * cell, y};
      svg->rectangle(corner, {cell - 0.5, kCellHeight - 0.5}, heat_color(shade),
                     fmt::format("layer {}, head {}: {:.1f}%", l, h, 100 * share));
      if (cell >= 26) {
        svg->text({corner.x + cell / 2, y + 13}, fmt::format("{:.0f}", 100 * share),
                  Anchor::kMiddle, heat_text_class(shade));
      }
    }
  }
  const double bottom = at.y + kTitle + map.heads * kCellHeight;
  for (int32_t l = 0; l < map.layers; l += every) {
    svg->text({at.x + (l + 0.5) * cell, bottom + 12}, std::to_string(l), Anchor::kMiddle, "tick");
  }
  svg->text({at.x + width / 2, bottom + 26}, "layer", Anchor::kMiddle, "tick");
}

// Colours and what they stand for, for printing where cells are too small for numbers.
void draw_key(Svg* svg, Point at, double width, double low, double high) {
  constexpr int kSteps = 40;
  for (int i = 0; i < kSteps; ++i) {
    svg->rectangle({at.x + i * width / kSteps, at.y}, {width / kSteps + 0.3, 9},
                   heat_color((i + 0.5) / kSteps));
  }
  svg->text({at.x, at.y + 21}, short_number(100 * low) + "%", Anchor::kStart, "tick");
  svg->text({at.x + width, at.y + 21}, short_number(100 * high) + "%", Anchor::kEnd, "tick");
}

double tier_share(const analysis::PresetDetail& d, int32_t row, Tier tier) {
  int64_t total = 0;
  for (const int64_t n : d.tiers[row]) total += n;
  const int64_t n = d.tiers[row][static_cast<int>(tier)];
  return total > 0 ? static_cast<double>(n) / static_cast<double>(total) : 0;
}

}  // namespace

std::string tier_shares(const ResultList& results) {
  constexpr Tier kTiers[] = {Tier::kHigh, Tier::kLow, Tier::kPruned};
  constexpr const char* kNames[] = {"high", "low", "pruned"};
  const int32_t layers = results[0]->detail->num_layers, heads = results[0]->detail->num_kv_heads;
  const double block = 24 + map_height(heads);
  Svg svg(720, block * static_cast<double>(results.size()) + 34,
          "Share of tokens in each tier per layer and head");
  for (size_t i = 0; i < results.size(); ++i) {
    const double y = block * static_cast<double>(i);
    svg.text({0, y + 14}, results[i]->preset, Anchor::kStart, "title");
    for (int t = 0; t < 3; ++t) {
      HeatMap map;
      map.title = std::string(kNames[t]) + ", % of tokens";
      map.layers = layers;
      map.heads = heads;
      map.share = [&](int32_t l, int32_t h) {
        return tier_share(*results[i]->detail, l * heads + h, kTiers[t]);
      };
      draw_map(&svg, {26 + t * 236.0, y + 20}, 210, map);
    }
  }
  draw_key(&svg, {26, block * static_cast<double>(results.size()) + 6}, 210, 0, 1);
  return svg.str();
}

std::string critical_by_head(const analysis::Survey& survey) {
  double most = 0;
  const auto share = [&](const std::vector<analysis::Spread>& rows, int32_t l, int32_t h) {
    return rows[l * survey.num_kv_heads + h].mean();
  };
  for (const auto* rows : {&survey.critical_of_query, &survey.critical_received}) {
    for (const analysis::Spread& s : *rows) most = std::max(most, s.mean());
  }
  const double height = map_height(survey.num_kv_heads);
  Svg svg(720, height + 34, "Share of critical tokens per layer and head");
  HeatMap map;
  map.layers = survey.num_layers;
  map.heads = survey.num_kv_heads;
  map.high = most;
  map.title = "of one query's attention, % of tokens";
  map.share = [&](int32_t l, int32_t h) { return share(survey.critical_of_query, l, h); };
  draw_map(&svg, {26, 0}, 325, map);
  map.title = "of all attention received, % of tokens";
  map.share = [&](int32_t l, int32_t h) { return share(survey.critical_received, l, h); };
  draw_map(&svg, {388, 0}, 325, map);
  draw_key(&svg, {26, height + 6}, 210, 0, most);
  return svg.str();
}

}  // namespace tierkv::report
