// SPDX-License-Identifier: Apache-2.0
// The sources of the rungs on the host, against the double reference; what the emulator cannot see
// is in tests/gpu/baselines/rungs_test.cu.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "bench/baselines/rungs/diffkv_kernel.cuh"
#include "bench/baselines/rungs/kv_as_a_kernel.cuh"
#include "bench/baselines/rungs/merge_splits.cuh"
#include "bench/baselines/rungs/query_as_a_kernel.cuh"
#include "bench/baselines/rungs/rung_kernel.h"
#include "tests/support/page_world.h"
#include "tests/support/rung_pages.h"

namespace tierkv {

__align__(128) uint8_t shared_bytes[1 << 18];

namespace {

using test::in_diffkv_layout;
using test::make_world;
using test::relative_error;
using test::World;
using test::WorldShape;

// docs/notes/2026-11-22-attention-ladder.md, "Error".
constexpr double kTolerance = 2e-3;
constexpr double kLseTolerance = 2e-3;
constexpr int32_t kSlotBytes = 8704;  // of the rings: some pages fit, others do not

struct Output {
  std::vector<double> out;
  std::vector<float> lse;
  std::vector<int32_t> arrivals;
};

// rung_kernel() of rungs.cu names kernels of the device; these are the host's.
RungKernel emulated_kernel(Rung rung, const RungShape& shape) {
  RungKernel k;
  k.slot_bytes = kMaxPageBytes;
  k.chunk_tiles = kAnyTiles;
  const auto kv = [&](void (*kernel)(RungParams), Loads loads, bool merges) {
    k.kernel = kernel;
    k.threads = kKvThreads;
    k.slot_bytes = kSlotBytes;
    k.shared_bytes = kv_shared(loads, shape.group, k.slot_bytes).bytes;
    k.merges = merges;
  };
  using enum Loads;
  using enum Sharing;
  using enum Merge;
  switch (rung) {
    case Rung::kDiffkv:
      k.kernel = diffkv_kernel;
      k.threads = kDiffkvThreads;
      k.shared_bytes = diffkv_shared().bytes;
      k.row_ctas = shape.group;
      break;
    case Rung::kQueryAsA:
      k.kernel = query_as_a_kernel;
      k.threads = kCoopThreads;
      k.slot_bytes = kCoopTiles * shape.tile_bytes;
      k.chunk_tiles = kCoopTiles;
      k.shared_bytes = coop_shared(k.slot_bytes).bytes;
      break;
    case Rung::kKvAsA:
      kv(kv_as_a_kernel<kBulkCopies, kCtaRounds, kSecondKernel>, kBulkCopies, false);
      break;
    case Rung::kSyncLoads:
      kv(kv_as_a_kernel<kThroughRegisters, kWarpItems, kLastToArrive>, kThroughRegisters, true);
      break;
    case Rung::kCtaRounds:
      kv(kv_as_a_kernel<kBulkCopies, kCtaRounds, kLastToArrive>, kBulkCopies, true);
      break;
    case Rung::kSecondMerge:
      kv(kv_as_a_kernel<kBulkCopies, kWarpItems, kSecondKernel>, kBulkCopies, false);
      break;
    case Rung::kFixedSplit:
      kv(kv_as_a_kernel<kBulkCopies, kWarpItems, kLastToArrive>, kBulkCopies, true);
      break;
  }
  return k;
}

void run_ctas(const RungKernel& k, int32_t ctas, const RungParams& p, std::mt19937_64& rng) {
  std::vector<int32_t> order(ctas);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  for (const int32_t cta : order) {
    std::fill_n(shared_bytes, k.shared_bytes, 0xff);
    emulator::cta().run(cta, k.threads, [&] { k.kernel(p); });
  }
}

Output run_rung_here(Rung rung, World& world, int32_t splits, std::mt19937_64& rng) {
  const AttentionConfig& config = world.config;
  const std::vector<uint8_t> ours = world.pool_bytes;
  if (rung == Rung::kDiffkv) in_diffkv_layout(world);
  const RungKernel k = emulated_kernel(rung, rung_shape(config, 0));
  const size_t columns = static_cast<size_t>(world.sequences()) * config.num_q_heads;
  std::vector<uint16_t> out(columns * kRungHeadDim, 0xffff);
  Output result;
  result.lse.assign(columns, NAN);
  RungGrid grid;
  grid.splits = splits;
  std::vector<uint64_t> memory(rung_workspace_bytes(config, grid, world.sequences()) / 8,
                               ~uint64_t{0});
  std::memset(memory.data(), 0, columns * 4);
  AttendCall call = world.call();
  call.out = out.data();
  call.lse = result.lse.data();
  EXPECT_TRUE(validate_rung_config(rung, config, world.sequences()).is_ok());
  const RungParams p = rung_params(config, grid, call, memory.data(), k);
  run_ctas(k, p.rows.num_rows * splits * k.row_ctas, p, rng);
  if (splits > 1 && !k.merges) {
    RungKernel merge;
    merge.kernel = merge_splits_kernel;
    merge.threads = kMergeSplitsWarps * 32;
    run_ctas(merge, ceil_div(p.rows.num_rows * p.group, kMergeSplitsWarps), p, rng);
  }
  world.pool_bytes = ours;
  for (const uint16_t x : out) result.out.push_back(half_to_float(x));
  result.arrivals.assign(p.arrivals, p.arrivals + columns);
  return result;
}

AttentionTier tier(int32_t side, int32_t k_bits, int32_t v_bits) {
  return {side, token_wise_tier(k_bits, v_bits)};
}

class EmulatedRungs : public ::testing::TestWithParam<Rung> {
 protected:
  static void check(const WorldShape& shape, const std::vector<int32_t>& splits) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE(::testing::Message() << rung_name(GetParam()) << ", seed " << seed);
    std::mt19937_64 rng(seed);
    World world = make_world(shape, rng);
    const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
    ASSERT_TRUE(expected.is_ok()) << expected.status().message();
    for (const int32_t n : splits) {
      SCOPED_TRACE(::testing::Message() << n << " splits");
      const Output got = run_rung_here(GetParam(), world, n, rng);
      EXPECT_LT(relative_error(got.out, expected->out), kTolerance);
      for (size_t i = 0; i < got.lse.size(); ++i) {
        if (expected->lse[i] == -INFINITY) {
          EXPECT_EQ(got.lse[i], -INFINITY) << i;
        } else {
          EXPECT_NEAR(got.lse[i], expected->lse[i], kLseTolerance) << i;
        }
      }
      EXPECT_THAT(got.arrivals, ::testing::Each(0));
    }
  }
};

TEST_P(EmulatedRungs, EveryFormat) {
  for (const auto& [k, v] : {std::pair{16, 16}, {8, 4}, {4, 4}, {4, 2}}) {
    SCOPED_TRACE(::testing::Message() << "k" << k << "v" << v);
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(0, k, v)};
    shape.tokens = {{37}, {150}};
    check(shape, {1, 3});
  }
}

TEST_P(EmulatedRungs, MixedTiersOfRaggedRows) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
  shape.tokens = {{20, 70, 130}, {0, 0, 0}, {0, 1, 0}, {16, 0, 15}, {0, 0, 240}};
  check(shape, {1, 2, 7});
}

TEST_P(EmulatedRungs, EveryGroupSize) {
  for (const int32_t group : {1, 2, 3, 5, 8}) {
    SCOPED_TRACE(::testing::Message() << "group " << group);
    WorldShape shape;
    shape.group = group;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
    shape.tokens = {{65, 17}};
    check(shape, {2});
  }
}

TEST_P(EmulatedRungs, LengthsAroundTilesAndPages) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.group = 1;
  shape.tiers = {tier(1, 4, 2)};
  for (const int32_t tokens : {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 111, 112, 113}) {
    shape.tokens.push_back({tokens});
  }
  check(shape, {2});
}

TEST_P(EmulatedRungs, StrayPagesAreLeftOut) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4)};
  shape.tokens = {{200}, {64}};
  World world = make_world(shape, rng);
  const std::vector<SideCounts> tokens = world.tokens;
  world.tokens[0].of[0] = 192;
  world.tokens[1].of[0] = 0;
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok());
  world.tokens = tokens;
  world.slots[3] = world.num_pages;
  world.slots[world.table_shape.row_stride()] = -7;
  const Output got = run_rung_here(GetParam(), world, 2, rng);
  EXPECT_LT(relative_error(got.out, expected->out), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(All, EmulatedRungs,
                         ::testing::Values(Rung::kDiffkv, Rung::kQueryAsA, Rung::kKvAsA,
                                           Rung::kSyncLoads, Rung::kCtaRounds, Rung::kSecondMerge,
                                           Rung::kFixedSplit),
                         [](const auto& rung) { return std::string(rung_name(rung.param)); });

TEST(ChooseSplits, FillsTheDevice) {
  EXPECT_EQ(choose_splits(264, 1, 264), 1);
  EXPECT_EQ(choose_splits(4096, 1, 264), 1);
  const int32_t few = choose_splits(8, 1, 264);
  EXPECT_GE(few, 28);
  EXPECT_LE(few, 33);
  EXPECT_EQ(choose_splits(8, 4, 1056), 32);
}

}  // namespace
}  // namespace tierkv
