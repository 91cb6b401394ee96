// SPDX-License-Identifier: Apache-2.0
// Which rows take which class of heads, and what their pages hold.
#include <gtest/gtest.h>

#include "tools/analysis/analyze.h"
#include "tools/analysis/scheme/layer_scheme.h"
#include "tools/analysis/scheme/row_pages.h"
#include "tools/presets/preset.h"

namespace tierkv::analysis {
namespace {

constexpr int32_t kLayers = 2, kHeads = 5;

CacheLayout layout() {
  CacheLayout l;
  l.num_layers = kLayers;
  l.num_q_heads = l.num_kv_heads = kHeads;
  l.head_dim = 64;
  return l;
}

// The most sensitive row is number 7, the next 2, 9, 0, 4; the others are alike.
Profile profile() {
  Profile p;
  p.num_layers = kLayers;
  p.num_kv_heads = kHeads;
  p.joint_sensitivity.assign(kLayers * kHeads, 1e-6);
  double value = 1;
  for (const int32_t row : {7, 2, 9, 0, 4}) p.joint_sensitivity[row] = value /= 2;
  return p;
}

// The class of every row, by the bits of its high format.
std::vector<int32_t> high_bits(const Scheme& scheme, const Profile* p) {
  std::vector<int32_t> bits;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    LayerScheme shared;
    take_classes(scheme, layout(), p, layer, &shared);
    for (int32_t h = 0; h < kHeads; ++h) {
      const TierFormat& f = shared.scheme_of(scheme, h).high;
      bits.push_back(10 * f.k.type.bits() + f.v.type.bits());
    }
  }
  return bits;
}

TEST(HeadClasses, TheMostSensitiveRowsTakeTheFirstClass) {
  const Profile p = profile();
  EXPECT_EQ(high_bits(parse_preset("fast")->scheme, &p),
            (std::vector<int32_t>{44, 42, 44, 42, 44, 42, 42, 84, 42, 44}));
  // A share of 0.15 of 10 rows is 1.5 rows: two.
  EXPECT_EQ(high_bits(parse_preset("tiers:classes=0.15*k8v4|k4v4")->scheme, &p),
            (std::vector<int32_t>{44, 44, 84, 44, 44, 44, 44, 84, 44, 44}));
}

TEST(HeadClasses, AProfileIsAskedForOnlyWhereClassesDiffer) {
  Profile p = profile();
  const Scheme fast = parse_preset("fast")->scheme;
  EXPECT_TRUE(check_sensitivities(fast, &p).is_ok());
  EXPECT_NE(check_sensitivities(fast, nullptr).message().find("--profile"), std::string::npos);
  p.joint_sensitivity.clear();
  EXPECT_NE(check_sensitivities(fast, &p).message().find("joint_sensitivity"), std::string::npos);
  for (const char* text :
       {"diffkv", "tiers:classes=k4v4/k4v2", "tiers:classes=0.3*k4v4/k4v2@2|k4v4/k4v2@2"}) {
    const Scheme scheme = parse_preset(text)->scheme;
    EXPECT_TRUE(check_sensitivities(scheme, nullptr).is_ok()) << text;
    EXPECT_EQ(high_bits(scheme, nullptr).size(), 10u) << text;
  }
  EXPECT_FALSE(check_sensitivities(
                   parse_preset("tiers:classes=0.3*k4v4/k4v2@2|k4v4/k4v2@1")->scheme, nullptr)
                   .is_ok());
}

// Default steps are those of a profile with head scales: a profile of dumps has none.
TEST(HeadClasses, DefaultStepsNeedAProfileWithSensitivities) {
  Profile p = profile();
  const Scheme small = parse_preset("small")->scheme;
  EXPECT_TRUE(check_sensitivities(small, nullptr).is_ok());
  EXPECT_NE(check_sensitivities(small, &p).message().find("key_sensitivity"), std::string::npos);
  EXPECT_FALSE(check_sensitivities(parse_preset("small:k=0.5")->scheme, &p).is_ok());
  EXPECT_TRUE(check_sensitivities(parse_preset("small:k=0.5,v=0.4")->scheme, &p).is_ok());
  EXPECT_TRUE(check_sensitivities(parse_preset("step")->scheme, &p).is_ok());
  p.key_sensitivity = p.joint_sensitivity;
  EXPECT_TRUE(check_sensitivities(small, &p).is_ok());
}

TEST(HeadClasses, TheDefaultComparisonHasWhatAProfileServes) {
  const auto names = [](const Profile* p) {
    std::string found;
    for (const Preset& preset : default_comparison(p)) {
      if (preset.text == "small" || preset.text == "fast" || preset.text == "k4v4")
        found += preset.text + " ";
    }
    return found;
  };
  Profile p = profile();
  EXPECT_EQ(names(nullptr), "k4v4 small ");
  EXPECT_EQ(names(&p), "k4v4 fast ");
  p.key_sensitivity = p.joint_sensitivity;
  EXPECT_EQ(names(&p), "k4v4 small fast ");
  p.joint_sensitivity.clear();
  p.key_sensitivity.clear();
  EXPECT_EQ(names(&p), "k4v4 ");
}

// Without a profile means are the row's own and are removed before the rotation.
TEST(HeadClasses, KeysLoseTheirMeansBeforeTheyAreRotated) {
  const Scheme scheme = parse_preset("tiers:classes=k4v2")->scheme;
  EXPECT_TRUE(scheme.needs_statistics());
  LayerData data;
  data.tokens = 100;
  std::vector<RowProfile> statistics(kHeads);
  for (RowProfile& row : statistics) {
    row.key_mean.assign(64, 2.5f);
    row.value_mean.assign(64, 1.0f);
  }
  LayerScheme shared;
  take_classes(scheme, layout(), nullptr, 0, &shared);
  data.significance.resize(kHeads);
  ASSERT_TRUE(place_rows(scheme, data, layout(), statistics, &shared).is_ok());
  for (const auto& context : shared.context) {
    EXPECT_EQ(context[0].basis.kind, BasisKind::kHadamard);
    EXPECT_EQ(context[0].basis.mean, std::vector<float>(64, 2.5f));
    EXPECT_EQ(context[1].basis, Basis::hadamard(64));
  }
}

// 1000 tokens of head_dim 128: 4 + 64 raw ones in 5 tiles of 16, the others in pages of 13312
// bytes.
TEST(HeadClasses, PagesOfAllClassesHaveOneSizeAndRawTokensLieBesideThem) {
  const Scheme fast = parse_preset("fast")->scheme;
  RowPlan plan;
  plan.tokens = 1000;
  const int64_t raw = 80 * 4 * 128;
  plan.count = {68, 932, 0, 0};
  EXPECT_EQ(row_page_bytes(fast.of_class(0), plan, 128, 0), raw + 15 * 13312);  // 64 a page
  plan.count = {68, 97, 835, 0};
  EXPECT_EQ(row_page_bytes(fast.of_class(1), plan, 128, 0), raw + (2 + 7) * 13312);  // 96, 128
  EXPECT_EQ(row_page_bytes(fast.of_class(2), plan, 128, 0), raw + (1 + 5) * 13312);  // 128, 176
}

}  // namespace
}  // namespace tierkv::analysis
