// Inline SVG as text. Coordinates are in the units of the picture's viewBox, which a page scales.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tierkv::report {

// Text made safe inside elements and quoted attributes; control characters become spaces.
std::string escaped(std::string_view text);

struct Point {
  double x = 0, y = 0;
};

enum class Anchor { kStart, kMiddle, kEnd };
enum class Marker { kCircle, kSquare, kDiamond, kTriangle, kCross, kPlus, kStar };

struct Stroke {
  std::string color = "#000";
  double width = 1;
  std::string dashes;  // "4 2", empty: solid
};

class Svg {
 public:
  // `name` says what the picture shows to those who do not see it.
  Svg(double width, double height, std::string_view name);

  // A tooltip is shown where the pointer rests and read aloud; empty: none.
  void rectangle(Point corner, Point size, const std::string& fill, std::string_view tooltip = "");
  void line(Point from, Point to, const Stroke& stroke);
  void polyline(const std::vector<Point>& points, const Stroke& stroke);
  void area(const std::vector<Point>& points, const std::string& fill);
  void marker(Point at, Marker shape, const std::string& color, std::string_view tooltip = "");
  // style: a class of the page's stylesheet ("", "small", "title", ...).
  void text(Point at, std::string_view text, Anchor anchor, const std::string& style = "");
  void vertical_text(Point at, std::string_view text);  // reads upwards, centred

  std::string str() const;

 private:
  void element(const std::string& open, std::string_view tooltip);

  std::string head_, body_;
};

}  // namespace tierkv::report
