// SPDX-License-Identifier: Apache-2.0
// Queries of any size, through the decode kernel's source on the host.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/attention/emulated_decode.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

using test::DecodeOutput;
using test::emulate_decode;
using test::make_world;
using test::tier;
using test::World;
using test::WorldShape;

struct EmulatedQueries : RandomTest {
  std::mt19937_64 random_{seed_};
  std::normal_distribution<float> normal_;

  // A row of one token, whose log-sum-exps are its scores.
  WorldShape one_token(int32_t bits, int32_t head_dim, int32_t group, DType dtype) {
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.head_dim = head_dim;
    shape.group = group;
    shape.dtype = dtype;
    shape.tiers = {tier(0, bits, 4)};
    shape.tokens = {{1}};
    for (int32_t i = 0; i < head_dim; ++i) {
      shape.keys.push_back(normal_(rng_));
      shape.values.push_back(normal_(rng_));
    }
    for (int32_t i = 0; i < group * head_dim; ++i) shape.queries.push_back(normal_(rng_));
    return shape;
  }
  DecodeOutput attend(World& world) { return emulate_decode(world, 1, random_); }

  // Log-sum-exps against the reference. Tensor cores cut terms off at 2^-24 of the largest and sums
  // at 2^-23; elements of q that are divided by up to 2^6 lose 2^-25 (docs/internals/attention.md,
  // "Error").
  void check_scores(const WorldShape& shape) {
    World world = make_world(shape, random_);
    const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
    ASSERT_TRUE(expected.is_ok()) << expected.status().message();
    const DecodeOutput got = attend(world);
    const auto [least, most] = std::minmax_element(shape.keys.begin(), shape.keys.end());
    for (int32_t h = 0; h < shape.group; ++h) {
      double terms = shape.head_dim * 0x1p-5;
      for (int32_t i = 0; i < shape.head_dim; ++i) {
        terms += std::abs(shape.queries[h * shape.head_dim + i]);
      }
      const double rounding = 0x1p-19 * terms * (*most - *least) / std::sqrt(shape.head_dim);
      EXPECT_NEAR(got.lse[h], expected->lse[h], rounding + 1e-6) << h;
    }
  }
};

TEST_F(EmulatedQueries, ScoresAreSumsOfExactProducts) {
  for (const int32_t bits : {8, 4, 2}) {
    for (const int32_t head_dim : {64, 96, 128, 256}) {
      for (const int32_t group : {1, 4, 8, 16}) {
        for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
          SCOPED_TRACE(::testing::Message() << bits << " bits, head_dim " << head_dim << ", group "
                                            << group << ", " << static_cast<int32_t>(dtype));
          WorldShape shape = one_token(bits, head_dim, group, dtype);
          // Columns differ in size; each has an element that is larger than its others.
          for (int32_t h = 0; h < group; ++h) {
            float* const q = &shape.queries[h * head_dim];
            for (int32_t i = 0; i < head_dim; ++i) q[i] *= std::ldexp(1.0f, h % 5 - 6);
            q[pick(0, head_dim - 1)] *= 50;
          }
          check_scores(shape);
        }
      }
    }
  }
}

TEST_F(EmulatedQueries, ZerosAndTheSmallestNumbersAreQueries) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const float size : {0.0f, dtype == DType::kFloat16 ? 0x1p-24f : 0x1p-133f, 6e4f}) {
      WorldShape shape = one_token(4, 128, 4, dtype);
      for (float& q : shape.queries) q = q < 0 ? -size : size;
      check_scores(shape);
    }
  }
}

// A query that has NaN or infinity makes its own outputs NaN, and leaves those of others alone.
TEST_F(EmulatedQueries, WhatIsNoNumberStaysNone) {
  for (const int32_t group : {4, 8}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const bool is_infinite : {false, true}) {
        World world = make_world(one_token(pick(0, 1) == 0 ? 4 : 8, 128, group, dtype), random_);
        const int32_t column = pick(0, group - 1);
        const uint16_t inf = dtype == DType::kFloat16 ? 0x7c00 : 0x7f80;
        world.q[column * 128 + pick(0, 127)] = static_cast<uint16_t>(is_infinite ? inf : inf + 1);
        const DecodeOutput got = attend(world);
        for (int32_t h = 0; h < group; ++h) {
          EXPECT_EQ(std::isnan(got.lse[h]), h == column);
          EXPECT_EQ(std::isnan(got.out[h * 128]), h == column);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
