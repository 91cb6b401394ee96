#include "tools/report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tierkv::report {
namespace {

const Stroke kGrid = {"#ddd", 1, ""};
const Stroke kBorder = {"#666", 1, ""};

// The largest of 1, 2, 5 times a power of ten that is at most x, or the smallest that is at least.
double round_number(double x, bool up) {
  const double power = std::pow(10.0, std::floor(std::log10(x)));
  const double kSteps[] = {1, 2, 5, 10};
  double best = up ? 10 * power : power;
  for (const double s : kSteps) {
    const double y = s * power;
    if (up && y >= x * (1 - 1e-9)) return y;
    if (!up && y <= x * (1 + 1e-9)) best = y;
  }
  return best;
}

}  // namespace

double Scale::operator()(double x) const {
  const double share = logarithmic
                           ? (std::log(x) - std::log(low)) / (std::log(high) - std::log(low))
                           : (x - low) / (high - low);
  return from + (to - from) * share;
}

std::vector<double> Scale::ticks(int count) const {
  std::vector<double> out;
  if (!logarithmic) {
    const double step = round_number((high - low) / count, true);
    for (double i = std::ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9) + 1e-300; ++i)
      out.push_back(i * step);
    return out;
  }
  const double decades = std::log10(high / low);
  std::vector<double> steps = {1};
  if (3 * decades <= count + 2) steps = {1, 2, 5};
  if (7 * decades <= count + 2) steps = {1, 1.5, 2, 3, 4, 5, 7};
  const int every = std::max(1, static_cast<int>(std::ceil(decades / count)));
  for (int e = static_cast<int>(std::floor(std::log10(low) + 1e-9)); e <= std::log10(high) + 1e-9;
       ++e) {
    for (const double s : steps) {
      const double tick = s * std::pow(10.0, e);
      if (e % every == 0 && tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9))
        out.push_back(tick);
    }
  }
  return out;
}

Scale nice_scale(double low, double high, bool logarithmic) {
  Scale s;
  s.logarithmic = logarithmic;
  if (logarithmic) {
    s.low = round_number(low, false);
    s.high = round_number(high, true);
    if (s.high <= s.low) s.high = 10 * s.low;
    return s;
  }
  if (!(high > low)) high = low + 1;
  const double step = round_number((high - low) / 6, true);
  s.low = step * std::floor(low / step + 1e-9);
  s.high = step * std::ceil(high / step - 1e-9);
  return s;
}

void draw_axes(Svg* svg, const Frame& frame, Axis* x, Axis* y) {
  x->scale.from = frame.left;
  x->scale.to = frame.right();
  y->scale.from = frame.bottom();
  y->scale.to = frame.top;
  const auto text = [](const Axis& axis, double t) {
    return axis.percent ? short_number(100 * t) + "%" : short_number(t);
  };
  const auto ticks = [](const Axis& axis, double count) {
    return axis.bare ? std::vector<double>()
                     : axis.scale.ticks(std::max(2, static_cast<int>(count)));
  };
  for (const double t : ticks(*x, frame.width / 60)) {
    const double at = x->scale(t);
    svg->line({at, frame.top}, {at, frame.bottom()}, kGrid);
    svg->text({at, frame.bottom() + 14}, text(*x, t), Anchor::kMiddle, "tick");
  }
  for (const double t : ticks(*y, frame.height / 35)) {
    const double at = y->scale(t);
    svg->line({frame.left, at}, {frame.right(), at}, kGrid);
    svg->text({frame.left - 5, at + 3.5}, text(*y, t), Anchor::kEnd, "tick");
  }
  svg->line({frame.left, frame.bottom()}, {frame.right(), frame.bottom()}, kBorder);
  svg->line({frame.left, frame.top}, {frame.left, frame.bottom()}, kBorder);
  if (!x->label.empty())
    svg->text({frame.left + frame.width / 2, frame.bottom() + 30}, x->label, Anchor::kMiddle);
  if (!y->label.empty())
    svg->vertical_text({frame.left - 42, frame.top + frame.height / 2}, y->label);
}

double draw_legend(Svg* svg, Point at, double width, const std::vector<LegendEntry>& entries) {
  constexpr double kLine = 16, kSample = 22, kCharacter = 6.8;
  Point p = at;
  for (const LegendEntry& e : entries) {
    const double size = kSample + 6 + kCharacter * static_cast<double>(e.text.size()) + 14;
    if (p.x > at.x && p.x + size > at.x + width) p = {at.x, p.y + kLine};
    if (e.marker) {
      svg->marker({p.x + kSample / 2, p.y - 4}, *e.marker, e.stroke.color);
    } else {
      svg->line({p.x, p.y - 4}, {p.x + kSample, p.y - 4}, e.stroke);
    }
    svg->text({p.x + kSample + 5, p.y}, e.text, Anchor::kStart, "small");
    p.x += size;
  }
  return p.y - at.y + kLine;
}

const std::string& color(int i) {
  static const std::string kPalette[kColors] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                                "#E69F00", "#56B4E9", "#000000"};
  return kPalette[i % kColors];
}

const std::string& dashes(int i) {
  static const std::string kDashes[kColors] = {"", "7 3", "2 2", "9 3 2 3", "4 2", "1 3", "12 4"};
  return kDashes[i % kColors];
}

std::string heat_color(double share) {
  constexpr int kStops[][3] = {
      {68, 1, 84}, {59, 82, 139}, {33, 145, 140}, {94, 201, 98}, {253, 231, 37}};
  const double x = 4 * std::clamp(share, 0.0, 1.0);
  const int i = std::min(3, static_cast<int>(x));
  const double f = x - i;
  int rgb[3];
  for (int c = 0; c < 3; ++c) {
    rgb[c] = static_cast<int>(std::lround(kStops[i][c] + f * (kStops[i + 1][c] - kStops[i][c])));
  }
  return fmt::format("#{:02x}{:02x}{:02x}", rgb[0], rgb[1], rgb[2]);
}

const char* heat_text_class(double share) {
  return share < 0.55 ? "cell light" : "cell";
}

std::string short_number(double x) {
  if (x == 0) return "0";
  const double a = std::fabs(x);
  if (a >= 1e6) return fmt::format("{:.3g}", x);
  if (a >= 1e4) return fmt::format("{:.3g}k", x / 1000);
  if (a < 1e-3) return fmt::format("{:.2g}", x);
  return fmt::format("{:.4g}", x);
}

}  // namespace tierkv::report
