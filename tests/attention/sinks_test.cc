// SPDX-License-Identifier: Apache-2.0
// Learned sinks: the reference against the softmax written out, and apply_sinks() against it.
#include "attention/core/merge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/core/online_softmax.h"
#include "codec/format/element.h"
#include "tests/support/attention_reference.h"
#include "tests/support/page_world.h"

namespace tierkv {
namespace {

using test::make_world;
using test::World;
using test::WorldShape;

// Out and lse of the same call without sinks: each weight e^logit / (e^lse + e^sink).
TEST(Sinks, TheReferenceIsTheSoftmaxWithOneMoreTerm) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (const double scale : {1.0, 30.0}) {
    WorldShape shape;
    shape.q_len = 2;
    shape.group = 8;
    shape.sink_scale = scale;
    shape.tiers = {{0, token_wise_tier(8, 4)}, {1, raw_tier()}};
    shape.tokens = {{40, 30}, {0, 0}, {0, 1}};
    World world = make_world(shape, rng);
    AttendCall call = world.call();
    const Result<ReferenceOutput> got = attend_reference(world.config, call);
    call.sinks = nullptr;
    const Result<ReferenceOutput> bare = attend_reference(world.config, call);
    ASSERT_TRUE(got.is_ok() && bare.is_ok());
    for (size_t i = 0; i < got->lse.size(); ++i) {
      const double sink = world.sinks[i % world.config.num_q_heads];
      const double lse = std::log(std::exp(bare->lse[i]) + std::exp(sink));
      const double share = bare->lse[i] == -INFINITY ? 0.0 : std::exp(bare->lse[i] - lse);
      if (lse == -INFINITY) {
        EXPECT_EQ(got->lse[i], -INFINITY);
      } else {
        // Logits and sinks are some hundreds at most, so exp() stays inside double.
        EXPECT_NEAR(got->lse[i], lse, 1e-12 * (1 + std::fabs(lse)));
      }
      for (int32_t d = 0; d < 128; ++d) {
        const double want = share * bare->out[i * 128 + d];
        EXPECT_NEAR(got->out[i * 128 + d], want, 1e-11 * (1 + std::fabs(want)));
      }
    }
  }
}

TEST(Sinks, FinishOfAStateIsItsJoinWithThem) {
  const SoftmaxState none, some = {3.0f, 5.0f};
  const FinishedState empty = finish(none, 2.5f), bare = finish(some, -INFINITY);
  EXPECT_EQ(empty.scale, 0.0f);
  EXPECT_FLOAT_EQ(empty.lse, 2.5f);
  EXPECT_EQ(bare.scale, output_scale(some));
  EXPECT_EQ(bare.lse, natural_lse(some));
  EXPECT_EQ(finish(none, -INFINITY).lse, -INFINITY);
  EXPECT_EQ(finish(some, 1e30f).scale, 0.0f);
  EXPECT_EQ(finish(some, -1e30f).scale, output_scale(some));
}

double value_at(const std::vector<uint16_t>& x, size_t i, DType dtype) {
  return raw_to_float(dtype, x[i]);
}

TEST(Sinks, ApplyToFinishedResults) {
  constexpr int32_t kRows = 7, kHeads = 5, kDim = 64;
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const bool is_bfloat16 = dtype == DType::kBFloat16;
    std::vector<uint16_t> before(kRows * kHeads * kDim);
    for (uint16_t& x : before) {
      x = is_bfloat16 ? float_to_bfloat16(normal(rng)) : float_to_half(normal(rng));
    }
    std::vector<float> lse_before(kRows * kHeads);
    for (float& x : lse_before) x = 5 * normal(rng);
    // The heads' sinks: two usual ones, none, far above, far below.
    std::vector<float> sinks = {normal(rng), 4 * normal(rng), -INFINITY, 1e4f, -1e4f};
    // Rows without tokens, whose outputs may be anything.
    for (const int32_t i : {0, 7, 13}) {
      lse_before[i] = -INFINITY;
      for (int32_t d = 0; d < kDim; ++d) before[i * kDim + d] = is_bfloat16 ? 0x7fc0 : 0x7e00;
    }
    std::vector<uint16_t> out = before;
    std::vector<float> lse = lse_before;
    ASSERT_TRUE(
        apply_sinks_host({out.data(), lse.data(), sinks.data(), kRows, kHeads, kDim, dtype}));
    for (int32_t i = 0; i < kRows * kHeads; ++i) {
      const double sink = sinks[i % kHeads], old = lse_before[i], most = std::fmax(sink, old);
      const double sum = std::exp(sink - most) + std::exp(old - most);
      if (most == -INFINITY) {
        EXPECT_EQ(lse[i], -INFINITY);
      } else {
        // fp32, and its factors log2(e) and ln(2).
        EXPECT_NEAR(lse[i], most + std::log(sum), 1e-6 + 3e-7 * std::fabs(most)) << i;
      }
      for (int32_t d = 0; d < kDim; ++d) {
        const double got = value_at(out, i * kDim + d, dtype);
        if (old == -INFINITY) {
          EXPECT_EQ(got, 0.0) << i;
          continue;
        }
        const double x = value_at(before, i * kDim + d, dtype);
        const double want = x * std::exp(old - most) / sum;
        // One rounding to 11 or 8 bits, subnormals, and fp32 noise in the exponent.
        const double rounding = is_bfloat16 ? 0x1p-8 : 0x1p-11;
        EXPECT_NEAR(got, want, std::fabs(want) * (rounding + 1e-5) + 0x1p-25) << i;
      }
      if (sinks[i % kHeads] == -INFINITY && old != -INFINITY) {
        EXPECT_TRUE(std::equal(&before[i * kDim], &before[i * kDim] + kDim, &out[i * kDim])) << i;
      }
    }
  }
}

// Parts without sinks, merged, then the sinks: the same as attention with them.
TEST(Sinks, FollowTheMergeOfParts) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.sink_scale = 2;
  shape.tiers = {{0, token_wise_tier(8, 4)}, {1, token_wise_tier(4, 2)}};
  shape.tokens = {{40, 30}};
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> whole = attend_reference(world.config, world.call());
  AttendCall bare = world.call();
  bare.sinks = nullptr;
  const std::vector<SideCounts> tokens = world.tokens;
  std::vector<uint16_t> out[2];
  std::vector<float> lse[2];
  for (int32_t part = 0; part < 2; ++part) {
    world.tokens = tokens;
    for (SideCounts& row : world.tokens) row.of[1 - part] = 0;
    const Result<ReferenceOutput> of_part = attend_reference(world.config, bare);
    ASSERT_TRUE(of_part.is_ok());
    for (const double x : of_part->out) out[part].push_back(float_to_half(static_cast<float>(x)));
    for (const double x : of_part->lse) lse[part].push_back(static_cast<float>(x));
  }
  const AttentionConfig& c = world.config;
  const auto rows = static_cast<int64_t>(lse[0].size());
  ASSERT_TRUE(merge_attention_host({{out[0].data(), lse[0].data()},
                                    {out[1].data(), lse[1].data()},
                                    out[0].data(),
                                    lse[0].data(),
                                    rows,
                                    c.head_dim,
                                    DType::kFloat16}));
  ASSERT_TRUE(apply_sinks_host({out[0].data(), lse[0].data(), world.sinks.data(),
                                rows / c.num_q_heads, c.num_q_heads, c.head_dim, DType::kFloat16}));
  std::vector<double> got;
  for (const uint16_t x : out[0]) got.push_back(half_to_float(x));
  // Three roundings to fp16, each up to 2^-11 of an element.
  EXPECT_LT(test::relative_error(got, whole->out), 3 * 0x1p-11);
  for (int64_t i = 0; i < rows; ++i) EXPECT_NEAR(lse[0][i], whole->lse[i], 1e-5);
}

// A head whose sink is the least float has none that counts; a row without tokens stays zeros.
TEST(Sinks, TheLeastFloatIsANumber) {
  constexpr int32_t kDim = 64;
  const uint16_t some = float_to_half(1.5f);
  std::vector<uint16_t> out(kDim, some);
  out.resize(2 * kDim, 0x7e00);  // NaN
  std::vector<float> lse = {1.0f, -INFINITY};
  const float least = std::numeric_limits<float>::lowest();
  ASSERT_TRUE(apply_sinks_host({out.data(), lse.data(), &least, 2, 1, kDim, DType::kFloat16}));
  for (int32_t i = 0; i < 2 * kDim; ++i) EXPECT_EQ(out[i], i < kDim ? some : 0);
  EXPECT_EQ(lse[0], 1.0f);
  EXPECT_TRUE(std::isfinite(lse[1]));
}

TEST(Sinks, RefusedByName) {
  std::vector<uint16_t> out(4, 0x5a5a);
  std::vector<float> lse(2, 1.0f), sinks(2, 0.0f);
  const SinkCall good = {out.data(), lse.data(), sinks.data(), 1, 2, 2, DType::kFloat16};
  const auto code = [&](auto&& spoil) {
    SinkCall call = good;
    spoil(call);
    return apply_sinks_host(call).code();
  };
  constexpr StatusCode kInvalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](SinkCall& c) { c.out = nullptr; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.lse = nullptr; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.sinks = nullptr; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.rows = -1; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.rows = INT64_MAX; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.num_q_heads = 0; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.head_dim = 3; }), kInvalid);
  EXPECT_EQ(code([](SinkCall& c) { c.dtype = DType::kFloat32; }), StatusCode::kUnsupported);
  EXPECT_EQ(out, std::vector<uint16_t>(4, 0x5a5a));
  EXPECT_EQ(code([](SinkCall&) {}), StatusCode::kOk);
  EXPECT_NE(out, std::vector<uint16_t>(4, 0x5a5a));
}

}  // namespace
}  // namespace tierkv
