// SPDX-License-Identifier: Apache-2.0
#include "codec/policy/profile.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

namespace tierkv {
namespace {

TEST(HeadScales, AreTheFourthRootOfSensitivitiesAroundOne) {
  const std::vector<double> scales = head_scales({1, 16, 256});
  ASSERT_EQ(scales.size(), 3u);
  EXPECT_NEAR(scales[0], 2, 1e-12);
  EXPECT_NEAR(scales[1], 1, 1e-12);
  EXPECT_NEAR(scales[2], 0.5, 1e-12);
}

TEST(HeadScales, AreClampedAfterTheyAreNormalised) {
  // Normalised to powers of 16^(1/2) around 4 heads' mean: the geometric mean of what comes out is
  // not 1, because the clamp comes last.
  const std::vector<double> scales = head_scales({1, 1, 1, 1e20});
  EXPECT_EQ(scales[3], 1.0 / 8);
  EXPECT_EQ(scales[0], 8);
  const std::vector<double> less = head_scales({1, 1, 1, 1e8});
  EXPECT_NEAR(less[0], std::pow(1e8, 1.0 / 16), 1e-9);
  EXPECT_EQ(less[3], 1.0 / 8);
}

TEST(HeadScales, HaveAGeometricMeanOfOneAndIgnoreTheUnit) {
  const unsigned seed = std::random_device{}();
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> exponent(-3, 3);
  std::vector<double> sensitivities, scaled;
  for (int i = 0; i < 90; ++i) {
    sensitivities.push_back(std::exp2(exponent(rng)));
    scaled.push_back(1e-7 * sensitivities.back());
  }
  const std::vector<double> a = head_scales(sensitivities), b = head_scales(scaled);
  double sum = 0;
  for (int i = 0; i < 90; ++i) {
    sum += std::log(a[i]);
    EXPECT_NEAR(a[i], b[i], 1e-9) << "seed " << seed;
  }
  EXPECT_NEAR(sum, 0, 1e-9) << "seed " << seed;
  EXPECT_TRUE(head_scales({}).empty());
}

TEST(AssignClasses, TakesSharesFromTheMostSensitiveOn) {
  const std::vector<double> s = {0.3, 0.9, 0.1, 0.5, 0.7, 0.2, 0.4, 0.8, 0.6, 0.05};
  EXPECT_EQ(assign_classes({0.1, 0.4}, s), (std::vector<int32_t>{2, 0, 2, 1, 1, 2, 2, 1, 1, 2}));
  EXPECT_EQ(assign_classes({}, s), std::vector<int32_t>(10, 0));
  EXPECT_EQ(assign_classes({0, 1}, s), std::vector<int32_t>(10, 1));
  EXPECT_EQ(assign_classes({0.75, 0.75}, {3, 2, 1, 4}), (std::vector<int32_t>{0, 0, 1, 0}));
}

TEST(AssignClasses, TiesGoByRowAndHalvesRoundUp) {
  EXPECT_EQ(assign_classes({0.5}, {1, 1, 1, 1}), (std::vector<int32_t>{0, 0, 1, 1}));
  EXPECT_EQ(assign_classes({0.5}, {1, 1, 1}), (std::vector<int32_t>{0, 0, 1}));
  std::vector<int32_t> counts(3);
  for (const int32_t c : assign_classes({0.1, 0.4}, std::vector<double>(90, 1.0))) ++counts[c];
  EXPECT_EQ(counts, (std::vector<int32_t>{9, 36, 45}));
}

TEST(ProfileModel, AnotherModelIsRefusedByName) {
  Profile p;
  p.model_id = "one";
  p.num_layers = 2;
  p.num_q_heads = 4;
  p.num_kv_heads = 2;
  p.head_dim = 64;
  p.sm_scale = 0.125;
  CacheLayout layout;
  layout.num_layers = 2;
  layout.num_q_heads = 4;
  layout.num_kv_heads = 2;
  layout.head_dim = 64;
  layout.sm_scale = 0.125;
  EXPECT_TRUE(p.check_model(layout, "one"));
  EXPECT_TRUE(p.check_model(layout, ""));
  const Status other = p.check_model(layout, "two");
  EXPECT_EQ(other.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(other.message().find("the profile is of 'one' (2 layers"), std::string::npos)
      << other.message();
  EXPECT_NE(other.message().find("the cache of 'two'"), std::string::npos) << other.message();
  const std::function<void(CacheLayout*)> changes[] = {
      [](CacheLayout* l) { ++l->num_layers; }, [](CacheLayout* l) { l->num_q_heads = 8; },
      [](CacheLayout* l) { l->num_kv_heads = 1; }, [](CacheLayout* l) { l->head_dim = 128; },
      [](CacheLayout* l) { l->sm_scale = 0.126; }};
  for (const auto& change : changes) {
    CacheLayout changed = layout;
    change(&changed);
    EXPECT_FALSE(p.check_model(changed, "one"));
  }
}

}  // namespace
}  // namespace tierkv
