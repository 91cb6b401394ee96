#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/report/figures.h"
#include "tools/report/plot.h"

namespace tierkv::report {
namespace {

using analysis::AnalyzeResult;

struct Family {
  const char* name;
  std::vector<const char*> prefixes;
  Marker marker;
  int color;
};
const std::vector<Family>& families() {
  static const std::vector<Family> kFamilies = {
      {"token-wise", {"k1", "k2", "k4", "k8"}, Marker::kCircle, 0},
      {"tiers", {"diffkv"}, Marker::kTriangle, 1},
      {"KIVI", {"kivi"}, Marker::kSquare, 2},
      {"KVComp", {"kvcomp"}, Marker::kDiamond, 3},
      {"weighted and global steps", {"small", "step"}, Marker::kStar, 4},
      {"pruning", {"snapkv", "h2o"}, Marker::kCross, 5},
      {"fp16, zstd", {"fp16", "zstd"}, Marker::kPlus, 6}};
  return kFamilies;
}

double memory(const AnalyzeResult& r) {
  return 1 / analysis::compression_ratio(r.tally);
}

// Schemes without loss have an error of rounding only, which would stretch the axis over ten
// decades: they sit on its floor.
struct Chart {
  Axis x, y;
  double floor = 0;
  Point at(const AnalyzeResult& r) const {
    const double error = *analysis::ranking_error(r.tally);
    return {x.scale(memory(r)), y.scale(std::max(error, floor))};
  }
};

Chart make_chart(const ResultList& results) {
  double low = 1, high = 1e-3, least = 1, most = 0;
  for (const AnalyzeResult* r : results) {
    const double error = *analysis::ranking_error(r->tally);
    if (error > 1e-5) low = std::min(low, error);
    high = std::max(high, error);
    least = std::min(least, memory(*r));
    most = std::max(most, memory(*r));
  }
  Chart c;
  c.x.scale = {0.95 * least, 1.05 * most, 0, 1, true};
  c.x.label = "memory, share of fp16 (logarithmic)";
  c.x.percent = true;
  c.y.scale = nice_scale(std::min(low, high / 2) * 0.7, high, true);
  c.y.label = std::string("attention outputs, ") + analysis::ranking_error_name(results[0]->tally);
  c.floor = c.y.scale.low;
  return c;
}

struct Box {
  double left, top, right, bottom;
  bool overlaps(const Box& o) const {
    return left < o.right && o.left < right && top < o.bottom && o.top < bottom;
  }
};

// Puts text beside a point, where it hides neither points nor text that is there already.
class Labels {
 public:
  Labels(Svg* svg, const Frame& frame) : svg_(svg), frame_(frame) {}
  void keep_clear(Point p, double radius = 5) {
    taken_.push_back({p.x - radius, p.y - radius, p.x + radius, p.y + radius});
  }
  void keep_clear(const std::vector<Point>& line) {
    constexpr double kEvery = 4, kRadius = 1.5;
    for (size_t i = 1; i < line.size(); ++i) {
      const double dx = line[i].x - line[i - 1].x, dy = line[i].y - line[i - 1].y;
      const double steps = std::ceil(std::hypot(dx, dy) / kEvery);
      for (double s = 1; s < steps; ++s) {
        keep_clear({line[i - 1].x + dx * s / steps, line[i - 1].y + dy * s / steps}, kRadius);
      }
    }
  }
  bool place(Point p, const std::string& text, bool strong) {
    const double width = (strong ? 7.2 : 6.4) * static_cast<double>(text.size());
    for (const double dy : {3.5, -8.0, 15.0, -18.0, 25.0}) {
      for (const bool right : {true, false}) {
        const double x = right ? p.x + 8 : p.x - 8 - width;
        const Box box = {x, p.y + dy - 9, x + width, p.y + dy + 2};
        const bool inside = box.left > frame_.left && box.right < frame_.right() &&
                            box.top > frame_.top && box.bottom < frame_.bottom();
        if (!inside || std::any_of(taken_.begin(), taken_.end(),
                                   [&](const Box& b) { return b.overlaps(box); })) {
          continue;
        }
        taken_.push_back(box);
        svg_->text({x, p.y + dy}, text, Anchor::kStart, strong ? "label" : "tick");
        return true;
      }
    }
    return false;
  }

 private:
  Svg* svg_;
  Frame frame_;
  std::vector<Box> taken_;
};

}  // namespace

int family_of(const std::string& preset) {
  for (size_t f = 0; f < families().size(); ++f) {
    for (const char* prefix : families()[f].prefixes) {
      if (preset.starts_with(prefix)) return static_cast<int>(f);
    }
  }
  return static_cast<int>(families().size()) - 1;
}

std::string rate_distortion(const ResultList& results, const std::vector<int>& numbers,
                            const std::vector<bool>& front) {
  const Frame frame = {62, 12, 640, 400};
  Svg svg(720, 490, "Memory against attention error of every preset");
  Chart chart = make_chart(results);
  draw_axes(&svg, frame, &chart.x, &chart.y);
  std::vector<Point> line;
  for (size_t i = 0; i < results.size(); ++i) {
    if (front[i]) line.push_back(chart.at(*results[i]));
  }
  std::sort(line.begin(), line.end(), [](const Point& a, const Point& b) { return a.x < b.x; });
  if (line.size() > 1) svg.polyline(line, {"#888", 1.5, "5 3"});
  Labels labels(&svg, frame);
  labels.keep_clear(line);
  std::vector<bool> used(families().size());
  for (size_t i = 0; i < results.size(); ++i) {
    const AnalyzeResult& r = *results[i];
    const int f = family_of(r.preset);
    used[f] = true;
    labels.keep_clear(chart.at(r));
    svg.marker(
        chart.at(r), families()[f].marker, color(families()[f].color),
        fmt::format("{}: {} at {:.1f}% of fp16, {} {:.4f}", numbers[i], r.preset, 100 * memory(r),
                    analysis::ranking_error_name(r.tally), *analysis::ranking_error(r.tally)));
  }
  for (const bool strong : {true, false}) {
    for (size_t i = 0; i < results.size(); ++i) {
      if (front[i] != strong) continue;
      const std::string number = std::to_string(numbers[i]);
      if (strong && labels.place(chart.at(*results[i]), number + " " + results[i]->preset, true)) {
        continue;
      }
      labels.place(chart.at(*results[i]), number, false);
    }
  }
  std::vector<LegendEntry> legend;
  for (size_t f = 0; f < families().size(); ++f) {
    if (used[f])
      legend.push_back(
          {families()[f].name, {color(families()[f].color), 1, ""}, families()[f].marker});
  }
  legend.push_back({"no other has less of both", {"#888", 1.5, "5 3"}, std::nullopt});
  draw_legend(&svg, {frame.left, 463}, frame.width, legend);
  return svg.str();
}

}  // namespace tierkv::report
