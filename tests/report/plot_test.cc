#include "tools/report/plot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/support/fresh_random.h"

namespace tierkv::report {
namespace {

class PlotTest : public RandomTest {
 protected:
  double draw(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(rng_);
  }
};

void expect_sound(const Scale& s, int count) {
  const std::vector<double> ticks = s.ticks(count);
  ASSERT_FALSE(ticks.empty()) << s.low << " to " << s.high;
  EXPECT_LE(static_cast<int>(ticks.size()), 2 * count + 6) << s.low << " to " << s.high;
  for (size_t i = 0; i < ticks.size(); ++i) {
    EXPECT_GE(ticks[i], s.low * (1 - 1e-9) - 1e-12);
    EXPECT_LE(ticks[i], s.high * (1 + 1e-9));
    if (i > 0) {
      EXPECT_GT(ticks[i], ticks[i - 1]);
    }
  }
}

TEST_F(PlotTest, NiceScalesHoldTheirRangeAndHaveTicks) {
  for (int i = 0; i < 2000; ++i) {
    const double low = std::pow(10, draw(-9, 5)), high = low * std::pow(10, draw(0.001, 9));
    for (const bool logarithmic : {false, true}) {
      const Scale s = nice_scale(low, high, logarithmic);
      EXPECT_LE(s.low, low * (1 + 1e-9));
      EXPECT_GE(s.high, high * (1 - 1e-9));
      EXPECT_LT(s.low, s.high);
      for (const int count : {2, 5, 11}) expect_sound(s, count);
    }
  }
  EXPECT_LT(nice_scale(0.5, 0.5, true).low, nice_scale(0.5, 0.5, true).high);
  EXPECT_LT(nice_scale(0, 0, false).low, nice_scale(0, 0, false).high);
}

TEST_F(PlotTest, ScalesGoFromEndToEnd) {
  for (const bool logarithmic : {false, true}) {
    const Scale s = {2, 200, 500, 100, logarithmic};
    EXPECT_NEAR(s(2), 500, 1e-9);
    EXPECT_NEAR(s(200), 100, 1e-9);
    EXPECT_NEAR(s(logarithmic ? 20 : 101), 300, 1e-9);
  }
}

TEST_F(PlotTest, NumbersAreShort) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.05), "0.05");
  EXPECT_EQ(short_number(30000), "30k");
  EXPECT_EQ(short_number(1e-5), "1e-05");
  for (int i = 0; i < 2000; ++i) {
    const double x = std::pow(10, draw(-12, 12));
    const std::string text = short_number(x);
    EXPECT_LE(text.size(), 8u) << text;
    const double factor = text.back() == 'k' ? 1000 : 1;
    EXPECT_NEAR(factor * std::strtod(text.c_str(), nullptr), x, 0.06 * x) << text;
  }
}

// Lighter for larger shares, so that a print in grey keeps the order.
TEST_F(PlotTest, HeatColorsAreOrderedByLightness) {
  double before = -1;
  for (int i = 0; i <= 40; ++i) {
    const long rgb = std::strtol(heat_color(i / 40.0).c_str() + 1, nullptr, 16);
    const double light = 0.2126 * (rgb >> 16) + 0.7152 * (rgb >> 8 & 255) + 0.0722 * (rgb & 255);
    EXPECT_GT(light, before);
    before = light;
  }
  EXPECT_EQ(heat_color(-1), heat_color(0));
  EXPECT_EQ(heat_color(2), heat_color(1));
}

TEST_F(PlotTest, TextIsEscaped) {
  EXPECT_EQ(escaped("a<b>&\"c\"\n"), "a&lt;b&gt;&amp;&quot;c&quot; ");
  Svg svg(10, 10, "\"<&");
  svg.text({1, 2}, "", Anchor::kStart);
  svg.text({1, 2}, "<x>", Anchor::kEnd, "small");
  EXPECT_EQ(svg.str().find("<x>"), std::string::npos);
  EXPECT_NE(svg.str().find("text-anchor=\"end\" class=\"small\">&lt;x&gt;</text>"),
            std::string::npos);
}

}  // namespace
}  // namespace tierkv::report
