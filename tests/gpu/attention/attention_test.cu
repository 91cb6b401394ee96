// SPDX-License-Identifier: Apache-2.0
// The attention kernels on a GPU against the double reference. Tests named Small* are small enough
// for compute-sanitizer.
#include "tests/gpu/attention/attention_world.cuh"

namespace tierkv {
namespace {

using test::check;
using test::three_tiers;
using test::tier;
using test::WorldShape;

TEST(Attention, SmallMixedRaggedRows) {
  WorldShape shape;
  shape.tiers = three_tiers();
  shape.tokens = {{20, 70, 130}, {0, 0, 0}, {0, 1, 0}, {16, 0, 15}, {0, 0, 240}, {64, 300, 500}};
  check(shape);
}

TEST(Attention, SmallEveryPairOfFormats) {
  for (const int32_t k : {16, 8, 4, 2}) {
    for (const int32_t v : {16, 8, 4, 2}) {
      SCOPED_TRACE(::testing::Message() << "k" << k << "v" << v);
      WorldShape shape;
      shape.num_kv_heads = 1;
      shape.tiers = {tier(0, k, v)};
      shape.tokens = {{33}, {129}};
      check(shape);
    }
  }
}

TEST(Attention, SmallEveryHeadDimAndPairOfFormats) {
  for (const int32_t head_dim : {64, 96, 256}) {
    for (const int32_t k : {16, 8, 4, 2}) {
      for (const int32_t v : {16, 8, 4, 2}) {
        SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " k" << k << "v" << v);
        WorldShape shape;
        shape.head_dim = head_dim;
        shape.num_kv_heads = 1;
        shape.tiers = {tier(0, k, v)};
        shape.tokens = {{33}, {129}};
        check(shape);
      }
    }
  }
}

TEST(Attention, EveryHeadDimWithMixedTiers) {
  for (const int32_t head_dim : {64, 96, 256}) {
    for (const int32_t group : {1, 4, 8}) {
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " group " << group);
      WorldShape shape;
      shape.head_dim = head_dim;
      shape.group = group;
      shape.tiers = three_tiers();
      shape.tokens = {{64, 700, 1500}, {0, 0, 0}, {1, 0, 7}, {17, 3000, 90}};
      check(shape);
    }
  }
}

TEST(Attention, ManyRowsOfRandomTiers) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = 4;
  shape.tiers = three_tiers();
  shape.jitter = 9;
  for (int32_t i = 0; i < 80; ++i) {
    const auto draw = [&](int32_t most) {
      return std::uniform_int_distribution<int32_t>(0, most)(rng);
    };
    shape.tokens.push_back({draw(80), draw(300), draw(500)});
  }
  check(shape);
}

// As on devices with 99 KB of shared memory for a CTA, and on one with still less.
TEST(Attention, SmallSharedMemoryTakesFewerWarps) {
  bool few = false;
  for (const int32_t kilobytes : {99, 64}) {
    for (const int32_t head_dim : {64, 96, 128, 256}) {
      for (const int32_t group : {1, 8, 16}) {
        WorldShape shape;
        shape.head_dim = head_dim;
        shape.group = group;
        if (group == 1) shape.q_len = 3;
        shape.dtype = group == 8 ? DType::kBFloat16 : DType::kFloat16;
        shape.tiers = three_tiers();
        shape.tokens = {{64, 700, 1500}, {0, 0, 0}, {1, 0, 7}, {17, 3000, 90}};
        SCOPED_TRACE(::testing::Message() << kilobytes << " KB, head_dim " << head_dim << " group "
                                          << group << " q_len " << shape.q_len);
        if (shape.q_len > 1) {
          shape.tail.tier = 0;
          shape.tokens = {{64, 700, 1500}, {5, 0, 0}, {17, 3000, 90}};
        }
        int32_t warps = 0;
        check(shape, kilobytes << 10, &warps);
        if (::testing::Test::HasFailure()) return;
        few |= warps < 8;
      }
    }
  }
  EXPECT_TRUE(few);
}

TEST(Attention, OneLongRow) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
  shape.tokens = {{43000, 88072}};
  check(shape);
}

TEST(Attention, ValueScales) {
  for (const double scale : {1e-4, 1e-3, 1e-2, 1e-1, 1e1, 1e2, 1e3, 1e4}) {
    SCOPED_TRACE(::testing::Message() << "value scale " << scale);
    WorldShape shape;
    shape.value_scale = scale;
    shape.tiers = three_tiers();
    shape.tokens = {{40, 500, 900}, {17, 3000, 0}, {0, 0, 3000}};
    check(shape);
  }
}

TEST(Attention, SharpAndFlatSoftmax) {
  for (const double scale : {1e-3, 0.1, 10.0, 40.0}) {
    SCOPED_TRACE(::testing::Message() << "key scale " << scale);
    WorldShape shape;
    shape.key_scale = scale;
    shape.tiers = {tier(0, 8, 8), tier(1, 8, 4)};
    shape.tokens = {{500, 900}, {17, 3000}};
    check(shape);
  }
}

TEST(Attention, EveryGroupSizeAndRaggedLengths) {
  for (const int32_t group : {1, 2, 4, 5, 8, 9, 10, 16}) {
    SCOPED_TRACE(::testing::Message() << "group " << group);
    WorldShape shape;
    shape.group = group;
    shape.tiers = {tier(0, 8, 4), tier(1, 4, 2)};
    for (const int32_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 112, 113, 1000, 4096}) {
      shape.tokens.push_back({tokens / 3, tokens - tokens / 3});
      shape.tokens.push_back({tokens, 0});
      shape.tokens.push_back({0, tokens});
    }
    check(shape);
  }
}

TEST(Attention, SmallSeveralQueriesSeeTheTokensUpToTheirs) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t q_len = 2; q_len <= kMaxQueryTokens; ++q_len) {
      for (const int32_t group : {1, 2, 5, 16}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " q_len " << q_len << " group " << group);
        WorldShape shape;
        shape.head_dim = head_dim;
        shape.q_len = q_len;
        shape.group = group;
        shape.num_kv_heads = 1;
        shape.tiers = {tier(1, 4, 2), tier(0, 8, 4), tier(2, 16, 16)};
        shape.tokens = {{17, 40, 66},   {0, 0, 0},   {0, 0, 1},    {0, 0, q_len - 1},
                        {40, 0, q_len}, {0, 0, 130}, {300, 90, 17}};
        check(shape);
      }
    }
  }
}

TEST(Attention, SmallBFloat16OfEveryPairOfFormats) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t k : {16, 8, 4, 2}) {
      for (const int32_t v : {16, 8, 4, 2}) {
        SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << " k" << k << "v" << v);
        WorldShape shape;
        shape.dtype = DType::kBFloat16;
        shape.head_dim = head_dim;
        shape.num_kv_heads = 1;
        shape.tiers = {tier(0, k, v), tier(2, 16, 16)};
        shape.tokens = {{33, 40}, {129, 0}, {0, 20}, {0, 0}};
        check(shape);
      }
    }
  }
}

TEST(Attention, BFloat16OfManyColumns) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const int32_t q_len : {1, 4}) {
      for (const int32_t group : {4, 12}) {
        SCOPED_TRACE(::testing::Message()
                     << "head_dim " << head_dim << " q_len " << q_len << " group " << group);
        WorldShape shape;
        shape.dtype = DType::kBFloat16;
        shape.head_dim = head_dim;
        shape.q_len = q_len;
        shape.group = group;
        shape.tiers = {tier(0, 8, 4), tier(1, 4, 2), tier(2, 16, 16)};
        shape.tokens = {{700, 1500, 64}, {0, 0, 0}, {0, 7, 1}, {3000, 90, 17}};
        check(shape);
      }
    }
  }
}

TEST(Attention, BFloat16QueriesOfAnySize) {
  for (const double scale : {1e-9, 1e-3, 1e6, 1e12}) {
    SCOPED_TRACE(::testing::Message() << "scale " << scale);
    WorldShape shape;
    shape.dtype = DType::kBFloat16;
    shape.query_scale = scale;
    shape.sm_scale = 0.1 / scale;
    shape.tiers = three_tiers();
    shape.tokens = {{20, 700, 300}, {0, 0, 1000}};
    check(shape);
  }
}

TEST(Attention, SeveralQueriesOfLongRows) {
  for (const int32_t group : {1, 4, 8}) {
    WorldShape shape;
    shape.q_len = 4;
    shape.group = group;
    shape.tiers = {tier(0, 4, 2)};
    shape.tokens = {{4096}, {4097}, {7000}, {3}, {112}, {113}};
    check(shape);
  }
}

// Behind sinks, wrapped or not, in the first tier.
TEST(Attention, SmallTheNewestTokensMayLieInARing) {
  WorldShape shape;
  shape.q_len = 4;
  shape.tiers = {tier(2, 16, 16), tier(1, 4, 2)};
  constexpr int32_t kSinks = 3, kRing = 32;
  shape.tokens = {{35, 70}, {35, 0}, {20, 0}, {3, 0}, {35, 300}, {5, 0}};
  shape.newest = {kSinks + 1, kSinks, 19, 2, 34, 4};
  shape.tail = {0, nullptr, kSinks, kRing};
  check(shape);
}

}  // namespace
}  // namespace tierkv
