// SPDX-License-Identifier: Apache-2.0
// The rungs on a GPU against the double reference. Tests named Small* are small enough for
// compute-sanitizer.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "bench/baselines/rungs/rungs.h"
#include "tests/gpu/device_array.cuh"
#include "tests/support/page_world.h"
#include "tests/support/rung_pages.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

using test::DeviceArray;
using test::in_diffkv_layout;
using test::make_world;
using test::relative_error;
using test::World;
using test::WorldShape;

// docs/notes/2026-11-22-attention-ladder.md, "Error".
constexpr double kTolerance = 2e-3;
constexpr double kLseTolerance = 2e-3;

// A world's copy on the device, and the buffers of a call.
struct DeviceWorld {
  explicit DeviceWorld(World& world)
      : host(world),
        pool(std::vector<uint8_t>(world.pages().base,
                                  world.pages().base + world.num_pages * world.config.page_bytes)),
        slots(world.slots),
        tokens(world.tokens),
        q(world.q),
        out(std::vector<uint16_t>(world.q.size(), 0xffff)),
        lse(std::vector<float>(world.q.size() / world.config.head_dim, NAN)) {}

  AttendCall call() const {
    AttendCall call;
    call.table = {host.table_shape, slots.get(), tokens.get(), nullptr};
    call.pages = {pool.get(), host.config.page_bytes, host.num_pages};
    call.batch = {nullptr, host.sequences()};
    call.q = q.get();
    call.out = out.get();
    call.lse = lse.get();
    return call;
  }

  World& host;
  DeviceArray<uint8_t> pool;
  DeviceArray<int32_t> slots;
  DeviceArray<SideCounts> tokens;
  DeviceArray<uint16_t> q, out;
  DeviceArray<float> lse;
};

void expect_output(const DeviceWorld& device, const ReferenceOutput& expected, double rounding) {
  std::vector<double> out;
  for (const uint16_t x : device.out.read()) out.push_back(half_to_float(x));
  EXPECT_LT(relative_error(out, expected.out), kTolerance * rounding);
  const std::vector<float> lse = device.lse.read();
  for (size_t i = 0; i < lse.size(); ++i) {
    if (expected.lse[i] == -INFINITY) {
      EXPECT_EQ(lse[i], -INFINITY) << "column " << i;
    } else {
      EXPECT_NEAR(lse[i], expected.lse[i], kLseTolerance * rounding) << "column " << i;
    }
  }
}

class Rungs : public ::testing::TestWithParam<Rung> {
 protected:
  // Twice each with the splits that the device suggests, with one and with many.
  static void check(const WorldShape& shape) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE(::testing::Message() << rung_name(GetParam()) << ", seed " << seed);
    std::mt19937_64 rng(seed);
    World world = make_world(shape, rng);
    const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
    ASSERT_TRUE(expected.is_ok()) << expected.status().message();
    if (GetParam() == Rung::kDiffkv) in_diffkv_layout(world);
    // Keys, and queries times their scale, that are rounded to fp16: each by 2^-12 of itself or so,
    // a score of 128 products by 3.5e-4 of the keys' scale. The largest of some thousand scores is
    // off by five times as much.
    const double rounding =
        GetParam() == Rung::kQueryAsA ? 2 * std::max(1.0, shape.key_scale) : 1.0;
    const Result<RungGrid> suggested = rung_grid(GetParam(), world.config, world.sequences());
    ASSERT_TRUE(suggested.is_ok()) << suggested.status().message();
    for (const int32_t splits : {suggested->splits, 1, 13}) {
      SCOPED_TRACE(::testing::Message() << splits << " splits");
      RungGrid grid = *suggested;
      grid.splits = splits;
      const size_t bytes = rung_workspace_bytes(world.config, grid, world.sequences());
      const DeviceArray<uint8_t> memory(std::vector<uint8_t>(bytes, 0));
      for (int repeat = 0; repeat < 2; ++repeat) {
        const DeviceWorld device(world);
        const Status run =
            run_rung(GetParam(), world.config, grid, device.call(), {memory.get(), bytes}, nullptr);
        ASSERT_TRUE(run.is_ok()) << run.message();
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
        expect_output(device, *expected, rounding);
      }
    }
  }
};

AttentionTier tier(int32_t side, int32_t k_bits, int32_t v_bits) {
  return {side, token_wise_tier(k_bits, v_bits)};
}
std::vector<AttentionTier> three_tiers() {
  return {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
}

TEST_P(Rungs, SmallEveryFormat) {
  for (const auto& [k, v] : {std::pair{16, 16}, {8, 4}, {4, 4}, {4, 2}}) {
    SCOPED_TRACE(::testing::Message() << "k" << k << "v" << v);
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(0, k, v)};
    shape.tokens = {{33}, {129}};
    check(shape);
  }
}

TEST_P(Rungs, SmallMixedRaggedRows) {
  WorldShape shape;
  shape.tiers = three_tiers();
  shape.tokens = {{20, 70, 130}, {0, 0, 0}, {0, 1, 0}, {16, 0, 15}, {0, 0, 240}, {64, 300, 500}};
  check(shape);
}

TEST_P(Rungs, EveryGroupSizeAndRaggedLengths) {
  for (int32_t group = 1; group <= 8; ++group) {
    SCOPED_TRACE(::testing::Message() << "group " << group);
    WorldShape shape;
    shape.group = group;
    shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
    for (const int32_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 112, 113, 1000}) {
      shape.tokens.push_back({tokens / 3, tokens - tokens / 3});
      shape.tokens.push_back({tokens, 0});
      shape.tokens.push_back({0, tokens});
    }
    check(shape);
  }
}

TEST_P(Rungs, OneLongRow) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
  shape.tokens = {{13000, 20072}};
  check(shape);
}

TEST_P(Rungs, SharpAndFlatSoftmax) {
  for (const double scale : {1e-3, 4.0}) {
    SCOPED_TRACE(::testing::Message() << "key scale " << scale);
    WorldShape shape;
    shape.key_scale = scale;
    shape.tiers = {tier(0, 8, 4)};
    shape.tokens = {{900}, {3017}};
    check(shape);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Rungs,
                         ::testing::Values(Rung::kDiffkv, Rung::kQueryAsA, Rung::kKvAsA,
                                           Rung::kSyncLoads, Rung::kCtaRounds, Rung::kSecondMerge,
                                           Rung::kFixedSplit),
                         [](const auto& rung) { return std::string(rung_name(rung.param)); });

TEST(RungPages, SmallTranscodedPagesEqualTheHosts) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  WorldShape shape;
  shape.tiers = three_tiers();
  shape.tokens = {{20, 70, 130}, {0, 0, 0}, {64, 300, 500}};
  World world = make_world(shape, rng);
  const DeviceWorld device(world);
  const AttendCall call = device.call();
  const Status s = transcode_pages(world.config, call, call.pages.base, nullptr);
  ASSERT_TRUE(s.is_ok()) << s.message();
  in_diffkv_layout(world);
  const std::vector<uint8_t> got = device.pool.read();
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], world.pages().base[i]) << i;
}

TEST(RungErrors, WhatIsNotSupportedIsRefusedByName) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tokens = {{40}};
  shape.tiers = {tier(0, 2, 2)};
  World two_bits = make_world(shape, rng);
  const Status layout = rung_grid(Rung::kDiffkv, two_bits.config, 1).status();
  EXPECT_EQ(layout.code(), StatusCode::kUnsupported);
  EXPECT_THAT(layout.message(), ::testing::HasSubstr("2 bits"));
  shape.tiers = {tier(0, 8, 4)};
  shape.group = 16;
  World wide = make_world(shape, rng);
  EXPECT_EQ(rung_grid(Rung::kDiffkv, wide.config, 1).status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace tierkv
