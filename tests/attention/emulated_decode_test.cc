// SPDX-License-Identifier: Apache-2.0
// The decode kernel's source on the host, against the double reference: fragment mapping, scale
// folding, masks, mixed tiers, rows shared by items in any order of arrival. What it cannot see is
// timing, memory order and real rounding of the tensor cores; tests/gpu/attention/attention_test.cu
// covers those.
#include "tests/attention/emulated_decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "attention/core/workspace.h"
#include "attention/tiers/decode.h"

namespace tierkv {
namespace {

using test::check;
using test::DecodeOutput;
using test::emulate_decode;
using test::make_world;
using test::relative_error;
using test::tier;
using test::World;
using test::WorldShape;

TEST(EmulatedDecode, EveryPairOfFormats) {
  for (const int32_t k : {16, 8, 4, 2}) {
    for (const int32_t v : {16, 8, 4, 2}) {
      SCOPED_TRACE(::testing::Message() << "k" << k << "v" << v);
      WorldShape shape;
      shape.tiers = {tier(0, k, v)};
      shape.tokens = {{37}, {96}};
      check(shape, 3);
    }
  }
}

TEST(EmulatedDecode, MixedTiersOfRaggedRows) {
  WorldShape shape;
  shape.tiers = {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
  shape.tokens = {{20, 70, 130}, {0, 0, 0}, {0, 1, 0}, {16, 0, 15}, {0, 0, 240}};
  for (const int32_t ctas : {1, 2, 5, 40}) check(shape, ctas);
}

TEST(EmulatedDecode, EveryGroupSize) {
  for (const int32_t group : {1, 2, 3, 4, 5, 8, 9, 12, 16}) {
    WorldShape shape;
    shape.group = group;
    shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
    shape.tokens = {{65, 17}, {5, 200}};
    check(shape, 4);
  }
}

// Rows shorter than q_len, empty ones, new tokens on two pages and behind the cut of an item.
TEST(EmulatedDecode, SeveralQueriesSeeTheTokensUpToTheirs) {
  for (const int32_t q_len : {2, 3, 4, 8}) {
    for (const int32_t group : {1, 2, 5, 16}) {
      SCOPED_TRACE(::testing::Message() << "q_len " << q_len << " group " << group);
      WorldShape shape;
      shape.q_len = q_len;
      shape.group = group;
      shape.num_kv_heads = group > 4 ? 1 : 2;
      shape.tiers = {tier(1, 4, 2), tier(0, 8, 4)};
      shape.tokens = {{17, 66}, {0, 0}, {0, 1}, {0, q_len - 1}, {40, q_len}, {0, 130}};
      check(shape, q_len % 2 == 0 ? 5 : 2);
    }
  }
}

TEST(EmulatedDecode, SeveralQueriesOfEveryHeadDim) {
  for (const int32_t head_dim : {64, 96, 256}) {
    for (const int32_t group : {2, 4}) {
      WorldShape shape;
      shape.q_len = 3;
      shape.group = group;
      shape.head_dim = head_dim;
      shape.num_kv_heads = 1;
      shape.tiers = {tier(0, 8, 4), tier(1, 4, 2), tier(2, 16, 16)};
      shape.tokens = {{30, 130, 65}, {0, 0, 2}};
      check(shape, 3);
    }
  }
}

// The newest tokens in a ring behind sinks, wrapped or not, in the first tier.
TEST(EmulatedDecode, TheNewestTokensMayLieInARing) {
  WorldShape shape;
  shape.q_len = 4;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(2, 16, 16), tier(1, 4, 2)};
  constexpr int32_t kSinks = 3, kRing = 32;
  shape.tokens = {{35, 70}, {35, 0}, {20, 0}, {3, 0}, {35, 300}, {5, 0}};
  shape.newest = {kSinks + 1, kSinks, 19, 2, 34, 4};
  shape.tail = {0, nullptr, kSinks, kRing};
  for (const int32_t ctas : {1, 7}) check(shape, ctas);
}

// As a store's: the ring in the last tier, which in a prompt holds all tokens in order.
TEST(EmulatedDecode, TheRingOfAStore) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4), tier(1, 4, 2), tier(2, 16, 16)};
  constexpr int32_t kSinks = 3, kRing = 11;
  shape.tail = {2, nullptr, kSinks, kRing};
  shape.tokens = {{30, 70, 14}, {0, 0, 200}, {40, 0, 14}, {0, 0, 9}, {0, 20, 14}};
  shape.newest = {kSinks + 1, 199, 13, 8, kSinks};
  for (const int32_t q_len : {2, 8}) {
    shape.q_len = q_len;
    check(shape, q_len);
  }
}

TEST(EmulatedDecode, BFloat16) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const int32_t group : {3, 16}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group);
      WorldShape shape;
      shape.dtype = DType::kBFloat16;
      shape.head_dim = head_dim;
      shape.group = group;
      shape.num_kv_heads = 1;
      shape.tiers = {tier(0, 16, 16), tier(1, 4, 2), tier(2, 16, 8)};
      shape.tokens = {{40, 30, 17}, {0, 33, 0}, {17, 0, 0}, {0, 0, 0}, {0, 20, 40}};
      check(shape, 3);
      shape.tiers = {tier(0, 8, 16), tier(1, 2, 4), tier(2, 4, 16)};
      check(shape, 2);
    }
  }
}

// In rows of one item and of several, without tokens too; of several queries; far above all scores
// and far below.
TEST(EmulatedDecode, LearnedSinks) {
  const struct {
    int32_t head_dim, group, q_len;
    DType dtype;
    double scale;
  } cases[] = {{64, 1, 1, DType::kFloat16, 3},    {128, 5, 3, DType::kFloat16, 3},
               {128, 16, 1, DType::kBFloat16, 3}, {256, 5, 2, DType::kBFloat16, 3},
               {256, 4, 1, DType::kFloat16, 3},   {96, 4, 1, DType::kFloat16, 1e4}};
  for (const auto& c : cases) {
    SCOPED_TRACE(::testing::Message() << "head_dim " << c.head_dim << " group " << c.group << " "
                                      << dtype_name(c.dtype) << " scale " << c.scale);
    WorldShape shape;
    shape.sink_scale = c.scale;
    shape.dtype = c.dtype;
    shape.head_dim = c.head_dim;
    shape.group = c.group;
    shape.q_len = c.q_len;
    shape.tiers = {tier(0, 8, 4), tier(1, 4, 2), tier(2, 16, 16)};
    shape.tokens = {{65, 17, 40}, {0, 0, 0}, {0, 200, 3}, {0, 0, 1}};
    check(shape, 4);
  }
}

// Beyond what fp16 holds, with scores of the usual size.
TEST(EmulatedDecode, BFloat16QueriesOfAnySize) {
  for (const double scale : {1e-9, 1e-3, 1e6, 1e12}) {
    SCOPED_TRACE(::testing::Message() << "scale " << scale);
    WorldShape shape;
    shape.dtype = DType::kBFloat16;
    shape.query_scale = scale;
    shape.sm_scale = 0.1 / scale;
    shape.tiers = {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
    shape.tokens = {{20, 70, 30}};
    check(shape, 2);
  }
}

// The plan gives an item more tiles than are left from its row to the last one.
TEST(EmulatedDecode, CountsThatShrinkAfterThePlanLeadNowhere) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 rng(seed);
  for (const int32_t ctas : {1, 3}) {
    for (const size_t kept : {0, 1, 4}) {
      WorldShape shape;
      shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
      shape.tokens = {{65, 17}, {5, 200}, {0, 40}};
      World world = make_world(shape, rng);
      const auto shrink = [&] {
        for (size_t row = kept; row < world.tokens.size(); ++row) world.tokens[row] = {};
      };
      EXPECT_TRUE(test::stays_in_batch(world, ctas, rng, shrink)) << ctas << ", " << kept;
    }
  }
}

// Raw pages of three tiles fill their slots: behind the values of the last one lies the next slot.
TEST(EmulatedDecode, OddChunksOfRawValuesEndBeforeTheNextSlot) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    WorldShape shape;
    shape.dtype = dtype;
    shape.head_dim = 64;
    shape.num_kv_heads = 1;
    shape.page_bytes = 3 * 16 * (4 * 64 + 8);
    shape.tiers = {tier(0, 16, 16)};
    shape.tokens = {{48 * 9}, {48 * 3 + 17}, {100}};
    for (const int32_t ctas : {1, 2, 3, 4}) check(shape, ctas);
  }
}

// Pages of an odd number of tiles that fill their slots, of keys and values that are read in steps
// of two tiles. Behind K8V2 the keys of a step would pass the slot, elsewhere its values would.
TEST(EmulatedDecode, StepsOfOddChunksOfCodesEndBeforeTheNextSlot) {
  const struct {
    int32_t k_bits, v_bits, tiles;
  } cases[] = {{4, 4, 3}, {8, 4, 1}, {8, 2, 3}, {2, 8, 1}, {4, 2, 5}};
  for (const auto& c : cases) {
    SCOPED_TRACE(::testing::Message() << "k" << c.k_bits << "v" << c.v_bits);
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.page_bytes = c.tiles * (256 * (c.k_bits + c.v_bits) + 256);
    shape.tiers = {tier(0, c.k_bits, c.v_bits)};
    shape.tokens = {{16 * c.tiles * 20}, {16 * c.tiles * 3 + 1}};
    for (const int32_t ctas : {1, 2}) check(shape, ctas);
  }
}

// Means of the largest values that fp16 holds, which rounding carries past them.
TEST(EmulatedDecode, OutputsSaturate) {
  for (const int32_t bits : {2, 4, 8}) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", " << bits << " bits");
    std::mt19937_64 rng(seed);
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(0, 8, bits)};
    shape.tokens = {{20}};
    shape.keys.assign(20 * 128, 0.25f);
    shape.queries.assign(4 * 128, 0.25f);
    // (2 * 65504) / (2^bits - 1) as fp16, times the largest code: 65536 and more.
    for (int32_t i = 0; i < 20 * 128; ++i)
      shape.values.push_back(i % 2 == 0 ? 65504.0f : -65504.0f);
    World world = make_world(shape, rng);
    const DecodeOutput got = emulate_decode(world, 2, rng);
    for (size_t i = 0; i < got.out.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got.out[i])) << i;
      ASSERT_EQ(got.out[i], i % 2 == 0 ? 65504 : -65504) << i;
    }
  }
}

TEST(EmulatedDecode, EveryHeadDim) {
  for (const int32_t head_dim : {64, 96, 256}) {
    SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim);
    WorldShape shape;
    shape.head_dim = head_dim;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
    shape.tokens = {{20, 70, 130}, {0, 0, 0}, {1, 40, 0}};
    check(shape, 3);
    shape.tiers = {tier(0, 2, 8), tier(1, 8, 2)};
    shape.tokens = {{70, 130}};
    check(shape, 2);
  }
}

TEST(EmulatedDecode, LengthsAroundTilesAndPages) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(1, 4, 2)};
  for (const int32_t tokens : {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 111, 112, 113}) {
    shape.tokens.push_back({tokens});
  }
  check(shape, 6);
}

TEST(EmulatedDecode, RowsOfManyItems) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
  shape.tokens = {{1100, 900}};
  check(shape, 24);
}

// Full pages one after another, and more of them than a warp holds ids at once.
TEST(EmulatedDecode, ManyPagesOfOneWarp) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.group = 1;
  shape.head_dim = 64;
  shape.page_bytes = 1280;  // one tile of K4V2
  shape.tiers = {tier(1, 4, 2)};
  shape.tokens = {{37 * 32 * kDecodeWarps}, {9}};
  check(shape, 1);
}

TEST(EmulatedDecode, ValueScales) {
  for (const double scale : {1e-4, 1e-2, 1e2, 1e4}) {
    SCOPED_TRACE(::testing::Message() << "value scale " << scale);
    WorldShape shape;
    shape.value_scale = scale;
    shape.tiers = {tier(2, 16, 16), tier(0, 8, 4), tier(1, 4, 2)};
    shape.tokens = {{18, 90, 100}};
    check(shape, 3);
  }
}

TEST(EmulatedDecode, StrayPagesAreLeftOutAndReported) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4)};
  shape.tokens = {{200}, {200}, {64}};
  World world = make_world(shape, rng);
  const std::vector<SideCounts> tokens = world.tokens;
  world.tokens[1].of[0] = 192;
  world.tokens[2].of[0] = 0;
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  ASSERT_TRUE(expected.is_ok());
  world.tokens = tokens;
  const int32_t stride = world.table_shape.row_stride();
  world.slots[stride + 3] = world.num_pages;  // row 1: its last page, with 8 tokens
  world.slots[2 * stride] = -7;               // row 2: its only page
  const DecodeOutput got = emulate_decode(world, 3, rng);
  EXPECT_LT(relative_error(got.out, expected->out), 2e-3);
  const auto corrupt = static_cast<int32_t>(StatusCode::kCorrupt);
  EXPECT_THAT(got.row_status, ::testing::ElementsAre(0, corrupt, corrupt));
}

// A page in the middle of many: its neighbours count, it does not.
TEST(EmulatedDecode, AStrayPageAmongFullOnesIsLeftOut) {
  std::mt19937_64 rng(std::random_device{}());
  for (const int32_t stray : {INT32_MIN, -1, 1 << 20}) {
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.tiers = {tier(0, 4, 2)};  // whose pages fit into a slot
    shape.tokens = {{64 * 33}};
    World world = make_world(shape, rng);
    constexpr int32_t kAt = 2;  // neither the first nor the last of a warp
    const int32_t page = world.slots[kAt];
    const std::vector<int32_t> slots = world.slots;
    world.slots.erase(world.slots.begin() + kAt);
    world.slots.push_back(kNoPage);
    world.tokens[0].of[0] -= 64;
    const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
    ASSERT_TRUE(expected.is_ok());
    ASSERT_NE(page, kNoPage);
    world.tokens[0].of[0] += 64;
    world.slots = slots;
    world.slots[kAt] = stray;
    const DecodeOutput got = emulate_decode(world, 1, rng);
    EXPECT_LT(relative_error(got.out, expected->out), 2e-3);
    EXPECT_THAT(got.row_status, ::testing::ElementsAre(static_cast<int32_t>(StatusCode::kCorrupt)));
  }
}

}  // namespace
}  // namespace tierkv
