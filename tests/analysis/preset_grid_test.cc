// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/preset_grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tools/analysis/sweep.h"
#include "tools/presets/preset.h"

namespace tierkv::analysis {
namespace {

using testing::ElementsAre;

std::vector<std::string> grid(const std::string& text) {
  const Result<std::vector<std::string>> g = expand_grid(text);
  EXPECT_TRUE(g.is_ok()) << g.status().message();
  return g ? *g : std::vector<std::string>();
}

TEST(PresetGrid, TheLastAlternativeVariesFastest) {
  EXPECT_THAT(grid("step"), ElementsAre("step"));
  EXPECT_THAT(grid("step:k=0.2/0.4,v=0.3/0.25"),
              ElementsAre("step:k=0.2,v=0.3", "step:k=0.2,v=0.25", "step:k=0.4,v=0.3",
                          "step:k=0.4,v=0.25"));
  EXPECT_THAT(grid("k4v4/k8v4:window=0/64+rot"),
              ElementsAre("k4v4:window=0+rot", "k4v4:window=64+rot", "k8v4:window=0+rot",
                          "k8v4:window=64+rot"));
  EXPECT_THAT(grid("k4v4+/huffman"), ElementsAre("k4v4", "k4v4+huffman"));
  EXPECT_THAT(grid("tiers:classes=0.1*k8v4|k4v4/k4v2@1,window=32/64"),
              ElementsAre("tiers:classes=0.1*k8v4|k4v4/k4v2@1,window=32",
                          "tiers:classes=0.1*k8v4|k4v4/k4v2@1,window=64"));
  EXPECT_THAT(grid("k4v4+rot/huffman+"), ElementsAre("k4v4+rot+", "k4v4+huffman+"));
}

TEST(PresetGrid, WhatIsNoGridIsLeftToTheParserOfPresets) {
  for (const std::string text : {"", "nonsense", "k8v4:", "k8v4:window", "k8v4:=1", "+", "a:b=c+d"})
    EXPECT_THAT(grid(text), ElementsAre(text));
}

TEST(PresetGrid, EmptyAndTooManyAreRefused) {
  for (const std::string text : {"/k4v4", "k4v4/", "step:k=/0.2", "step:k=0.2/,v=1"})
    EXPECT_EQ(expand_grid(text).status().code(), StatusCode::kInvalidArgument) << text;
  std::string ten = "0/1/2/3/4/5/6/7/8/9";
  std::string text = "x:a=" + ten + ",b=" + ten + ",c=" + ten + ",d=" + ten;
  EXPECT_EQ(grid(text).size(), 10000u);
  EXPECT_EQ(expand_grid(text + ",e=0/1").status().code(), StatusCode::kInvalidArgument);
}

TEST(PresetGrid, TheDefaultSweepIsFortyFourDifferentPresets) {
  std::vector<std::string> presets = default_sweep();
  EXPECT_EQ(presets.size(), 44u);
  for (const std::string& p : presets) EXPECT_TRUE(parse_preset(p).is_ok()) << p;
  std::sort(presets.begin(), presets.end());
  EXPECT_EQ(std::unique(presets.begin(), presets.end()), presets.end());
}

}  // namespace
}  // namespace tierkv::analysis
