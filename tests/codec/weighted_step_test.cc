// SPDX-License-Identifier: Apache-2.0
// The laws of weighted steps against high precision, and RoPE undone and redone.
#include "codec/format/weighted_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "tests/codec/support/weighted_source.h"
#include "tests/support/plain_weighted_rows.h"
#include "tools/analysis/scheme/importance.h"

namespace tierkv {
namespace {

class WeightedStepTest : public testing::Test {
 protected:
  WeightedStepTest() : seed_(std::random_device{}()), rows_(seed_) {
    RecordProperty("seed", seed_);
  }
  uint32_t seed_;
  WeightedSourceOfRows rows_;
};

TEST_F(WeightedStepTest, FactorsAreTheNearestPowers) {
  for (int32_t e = kLeastExponent; e <= kMostExponent; ++e) {
    EXPECT_EQ(exponent_factor(e), static_cast<float>(exp2l(e / 8.0L))) << e;
  }
}

TEST_F(WeightedStepTest, NormExponentIsTheRoundedLogarithm) {
  const auto exact = [](float m) { return static_cast<int32_t>(roundl(4 * log2l(m))); };
  for (int32_t octave = -126; octave <= 127; ++octave) {
    for (int32_t j = 0; j < 4; ++j) {
      const auto near = static_cast<float>(exp2l(octave + (2 * j + 1) / 8.0L));
      for (float m : {std::nextafter(near, 0.0f), near, std::nextafter(near, 1e38f)}) {
        EXPECT_EQ(norm_exponent(m), exact(m)) << m;
      }
    }
    const float m = std::ldexp(1 + static_cast<float>(rows_.source.uniform()), octave);
    if (is_finite(m)) {
      EXPECT_EQ(norm_exponent(m), exact(m)) << m << " seed " << seed_;
    }
  }
  EXPECT_EQ(norm_exponent(0.0f), kLeastExponent);
  EXPECT_EQ(norm_exponent(1e-40f), kLeastExponent);
}

TEST_F(WeightedStepTest, ImportanceExponentFollowsTheLaw) {
  const auto exact = [](long double u) {
    const long double g = std::clamp(powl(u, -0.15L), 0.5L, 1.4L);
    return static_cast<int32_t>(roundl(8 * log2l(g)));
  };
  for (int32_t k = -7; k <= 4; ++k) {
    // A long double has 64 bits: it tells the doubles beside a threshold from it.
    const auto near = static_cast<double>(exp2l((0.5L - k) / 1.2L));
    EXPECT_EQ(importance_exponent(std::nextafter(near, 0.0)), k);
    EXPECT_EQ(importance_exponent(near), k);
    EXPECT_EQ(importance_exponent(std::nextafter(near, 1e9)), k - 1);
    EXPECT_EQ(exact(static_cast<long double>(near) * (1 - 1e-12L)), k);
    EXPECT_EQ(exact(static_cast<long double>(near) * (1 + 1e-12L)), k - 1);
  }
  for (int i = 0; i < 10000; ++i) {
    const double u = std::exp(20 * rows_.source.uniform() - 10);
    EXPECT_EQ(importance_exponent(u), exact(u)) << u << " seed " << seed_;
  }
  EXPECT_EQ(importance_exponent(0), 4);
  EXPECT_EQ(importance_exponent(1), 0);
  EXPECT_EQ(importance_exponent(1e300), -8);
}

TEST_F(WeightedStepTest, SumOfSquaresIsTheTreeOfLanes) {
  for (int32_t dims : {1, 31, 32, 33, 64, 80, 96, 128, 256}) {
    const std::vector<float> x = rows_.rows(1, dims);
    // All 32 lanes in lockstep, as a warp shuffles.
    std::vector<float> lane(32, 0.0f);
    for (int32_t d = 0; d < dims; ++d) lane[d % 32] += x[d] * x[d];
    for (int32_t offset : {16, 8, 4, 2, 1}) {
      const std::vector<float> before = lane;
      for (int32_t l = 0; l < 32; ++l) lane[l] = before[l] + before[l ^ offset];
    }
    for (float sum : lane) ASSERT_EQ(sum_of_squares(x.data(), dims), sum) << "seed " << seed_;
  }
}

TEST_F(WeightedStepTest, RefusesImpossibleSignificances) {
  int8_t g[3] = {9, 9, 9};
  const float good[] = {0.0f, 0.5f, 0.25f};
  EXPECT_TRUE(importance_exponents(good, 3, 0, g));
  EXPECT_EQ(g[0], 4);
  EXPECT_EQ(g[1], importance_exponent(2 * 0.5));
  EXPECT_EQ(g[2], importance_exponent(3 * 0.25));
  for (float wrong : {NAN, INFINITY, -1.0f}) {
    int8_t h[3] = {9, 9, 9};
    const float bad[] = {0.1f, 0.2f, wrong};
    EXPECT_EQ(importance_exponents(bad, 3, 0, h).code(),
              wrong == -1.0f ? StatusCode::kInvalidArgument : StatusCode::kNonFinite);
    for (int8_t e : h) EXPECT_EQ(e, 9);
  }
}

// Entries of the tables are the true values rounded, but for the rounding of double arithmetic: at
// most 2^-25 + 2^-45.
TEST_F(WeightedStepTest, TurnsAreAccurateForLongContexts) {
  for (int i = 0; i < 20000; ++i) {
    const auto position = static_cast<int64_t>(std::exp2(31 * rows_.source.uniform())) - 1;
    const auto f = static_cast<float>(std::exp2(-20 * rows_.source.uniform()));
    const Turn turn = rope_turn(position, f);
    // 31 + 24 bits fit in a long double.
    const long double angle = static_cast<long double>(position) * f;
    ASSERT_NEAR(turn.cos, static_cast<double>(cosl(angle)), 0x1p-25 + 0x1p-45)
        << position << " " << f;
    ASSERT_NEAR(turn.sin, static_cast<double>(sinl(angle)), 0x1p-25 + 0x1p-45)
        << position << " " << f;
  }
  EXPECT_EQ(rope_turn(0, 1).cos, 1.0f);
  EXPECT_EQ(rope_turn(0, 1).sin, 0.0f);
}

// Composing two entries: each is 2^-25 off, times at most sqrt(2) of the other's two, and three
// roundings of numbers up to 1: below 2 sqrt(2) 2^-25 + 2^-24 + 2^-25 < 2^-22. Turning a pair of
// norm n there and back again: each way the angle's error and 2^-24 n for the roundings of each of
// two products, and the norm of the turn squared: below 2^-20 n together.
TEST_F(WeightedStepTest, RopeComesBack) {
  for (RopePairing pairing : {RopePairing::kHalves, RopePairing::kNeighbours}) {
    for (int32_t dims : {2, 20, 64, 80, 128}) {
      const Rope rope = rows_.rope(pairing, dims);
      const auto table = make_rope_table(rope, dims + 6, 100000);
      ASSERT_TRUE(table.is_ok());
      for (int i = 0; i < 50; ++i) {
        const int64_t position = rows_.source.below(100000);
        const std::vector<float> key = rows_.rows(1, dims + 6);
        std::vector<float> x = key;
        undo_rope(*table, position, x.data());
        for (int32_t p = 0; p < dims / 2; ++p) {
          const bool halves = pairing == RopePairing::kHalves;
          const int32_t a = halves ? p : 2 * p, b = halves ? p + dims / 2 : 2 * p + 1;
          const long double angle = static_cast<long double>(position) * rope.inv_freq[p];
          const long double c = cosl(angle), s = sinl(angle);
          const double norm = std::hypot(key[a], key[b]);
          ASSERT_NEAR(x[a], static_cast<double>(key[a] * c + key[b] * s), norm * 0x1p-21);
          ASSERT_NEAR(x[b], static_cast<double>(key[b] * c - key[a] * s), norm * 0x1p-21);
        }
        for (int32_t d = dims; d < dims + 6; ++d) ASSERT_EQ(x[d], key[d]);
        reference::redo_rope(*table, position, x.data());
        for (int32_t p = 0; p < dims / 2; ++p) {
          const bool halves = pairing == RopePairing::kHalves;
          const int32_t a = halves ? p : 2 * p, b = halves ? p + dims / 2 : 2 * p + 1;
          const double norm = std::hypot(key[a], key[b]);
          ASSERT_NEAR(x[a], key[a], norm * 0x1p-20) << "seed " << seed_;
          ASSERT_NEAR(x[b], key[b], norm * 0x1p-20) << "seed " << seed_;
        }
      }
    }
  }
}

TEST_F(WeightedStepTest, RopeTablesAreChecked) {
  Rope rope = Rope::plain(10000, 64);
  EXPECT_EQ(make_rope_table(rope, 32, 10).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(make_rope_table(rope, 64, 0).status().code(), StatusCode::kOutOfRange);
  rope.inv_freq[0] = 1e30f;
  EXPECT_EQ(make_rope_table(rope, 64, 10).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(make_rope_table(Rope{}, 64, 65)->blocks, 2);
}

// The angle of the last block's first position counts, and that of position 63.
TEST_F(WeightedStepTest, TurnsEndAtAngle2To32) {
  const auto code = [](float frequency, int64_t positions) {
    return make_rope_table({RopePairing::kHalves, 2, {frequency}}, 2, positions).status().code();
  };
  EXPECT_EQ(code(0x1p16f, 65536 + 64), StatusCode::kOk);
  EXPECT_EQ(code(0x1p16f, 65536 + 65), StatusCode::kOutOfRange);
  EXPECT_EQ(code(0x1p26f, 1), StatusCode::kOk);
  EXPECT_EQ(code(0x1.1p26f, 1), StatusCode::kOutOfRange);
  EXPECT_EQ(code(1, (int64_t{1} << 31) + 1), StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace tierkv
