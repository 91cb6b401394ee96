#include "tools/report/svg.h"

#include <fmt/format.h>

namespace tierkv::report {
namespace {

constexpr const char* kAnchors[] = {"start", "middle", "end"};

std::string point_list(const std::vector<Point>& points) {
  std::string list;
  for (const Point& p : points)
    list += fmt::format("{}{:.1f},{:.1f}", list.empty() ? "" : " ", p.x, p.y);
  return list;
}

std::string attributes(const Stroke& s) {
  std::string out = fmt::format(R"(stroke="{}" stroke-width="{:g}")", s.color, s.width);
  if (!s.dashes.empty()) out += fmt::format(R"( stroke-dasharray="{}")", s.dashes);
  return out;
}

// A path around the origin, about 9 units wide.
const char* outline(Marker shape) {
  switch (shape) {
    case Marker::kCircle:
      return "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z";
    case Marker::kSquare:
      return "M-3.6 -3.6H3.6V3.6H-3.6Z";
    case Marker::kDiamond:
      return "M0 -5L5 0L0 5L-5 0Z";
    case Marker::kTriangle:
      return "M0 -5L4.6 3.6H-4.6Z";
    case Marker::kCross:
      return "M-4.5 -3L-3 -4.5L0 -1.5L3 -4.5L4.5 -3L1.5 0L4.5 3L3 4.5L0 1.5L-3 4.5L-4.5 3L-1.5 0Z";
    case Marker::kPlus:
      return "M-1.2 -4.8H1.2V-1.2H4.8V1.2H1.2V4.8H-1.2V1.2H-4.8V-1.2H-1.2Z";
    case Marker::kStar:
      return "M0 -5.4L1.4 -1.7L5.3 -1.6L2.2 0.8L3.3 4.6L0 2.4L-3.3 4.6L-2.2 0.8L-5.3 -1.6L-1.4 "
             "-1.7Z";
  }
  return "";
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += byte < 0x20 || byte == 0x7f ? ' ' : c;
    }
  }
  return out;
}

Svg::Svg(double width, double height, std::string_view name)
    : head_(fmt::format(
          R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">)",
          width, height, escaped(name))) {}

void Svg::element(const std::string& open, std::string_view tooltip) {
  const std::string tag = open.substr(1, open.find(' ') - 1);
  body_ += open;
  body_ +=
      tooltip.empty() ? "/>\n" : fmt::format("><title>{}</title></{}>\n", escaped(tooltip), tag);
}

void Svg::rectangle(Point corner, Point size, const std::string& fill, std::string_view tooltip) {
  element(fmt::format(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}")",
                      corner.x, corner.y, size.x, size.y, fill),
          tooltip);
}

void Svg::line(Point from, Point to, const Stroke& stroke) {
  element(fmt::format(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" {})", from.x, from.y,
                      to.x, to.y, attributes(stroke)),
          "");
}

void Svg::polyline(const std::vector<Point>& points, const Stroke& stroke) {
  element(fmt::format(R"(<polyline points="{}" fill="none" stroke-linejoin="round" {})",
                      point_list(points), attributes(stroke)),
          "");
}

void Svg::area(const std::vector<Point>& points, const std::string& fill) {
  element(fmt::format(R"(<polygon points="{}" fill="{}")", point_list(points), fill), "");
}

void Svg::marker(Point at, Marker shape, const std::string& color, std::string_view tooltip) {
  element(fmt::format("<path d=\"{}\" transform=\"translate({:.1f} {:.1f})\" fill=\"{}\" "
                      "stroke=\"#fff\" stroke-width=\"0.7\"",
                      outline(shape), at.x, at.y, color),
          tooltip);
}

void Svg::text(Point at, std::string_view text, Anchor anchor, const std::string& style) {
  body_ += fmt::format(R"(<text x="{:.1f}" y="{:.1f}" text-anchor="{}")", at.x, at.y,
                       kAnchors[static_cast<int>(anchor)]);
  if (!style.empty()) body_ += fmt::format(R"( class="{}")", style);
  body_ += fmt::format(">{}</text>\n", escaped(text));
}

void Svg::vertical_text(Point at, std::string_view text) {
  body_ += fmt::format(
      "<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
      at.x, at.y, escaped(text));
}

std::string Svg::str() const {
  return head_ + "\n" + body_ + "</svg>\n";
}

}  // namespace tierkv::report
