// Axes, scales and colours: what every chart of the report has in common.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tools/report/svg.h"

namespace tierkv::report {

// From numbers to coordinates, linear or logarithmic.
struct Scale {
  double low = 0, high = 1;  // numbers, low < high; both positive where logarithmic
  double from = 0, to = 1;   // coordinates
  bool logarithmic = false;

  double operator()(double x) const;
  // At most about `count` round numbers within [low, high].
  std::vector<double> ticks(int count) const;
};

// The smallest round range that holds low and high; logarithmic ranges end at 1, 2 or 5 times a
// power of ten.
Scale nice_scale(double low, double high, bool logarithmic);

// A chart's place inside a picture.
struct Frame {
  double left = 0, top = 0, width = 0, height = 0;
  double right() const { return left + width; }
  double bottom() const { return top + height; }
};

struct Axis {
  Scale scale;
  std::string label;     // empty: none
  bool percent = false;  // ticks are shares, written in percent
  bool bare = false;     // neither grid nor ticks
};

// Sets the scales' coordinates to the frame and draws grid, ticks and labels.
void draw_axes(Svg* svg, const Frame& frame, Axis* x, Axis* y);

struct LegendEntry {
  std::string text;
  Stroke stroke;                 // of the line
  std::optional<Marker> marker;  // instead of a line
};
// One line of entries from `at` to the right, wrapped at `width`; the height it took.
double draw_legend(Svg* svg, Point at, double width, const std::vector<LegendEntry>& entries);

// Colours that colour-blind readers tell apart (Okabe and Ito), without the yellow, which is too
// pale on white, and the dashes that go with them where lines must also be told apart in grey.
inline constexpr int kColors = 7;
const std::string& color(int i);
const std::string& dashes(int i);

// A colour of a scale of even steps of lightness (viridis, Smith and van der Walt), dark for 0,
// light for 1; the colour of text on it.
std::string heat_color(double share);
const char* heat_text_class(double share);

// "0.05", "1.2k", "1e-05": at most four characters where that is possible.
std::string short_number(double x);

}  // namespace tierkv::report
