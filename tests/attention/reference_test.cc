// SPDX-License-Identifier: Apache-2.0
#include "tests/support/attention_reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "codec/host/page_codec.h"
#include "tests/support/page_world.h"

namespace tierkv {
namespace {

using test::make_world;
using test::World;
using test::WorldShape;

// Two tokens whose attention can be worked out by hand: q = (1, 0, ...), sm_scale = 1.
TEST(Reference, TwoTokensByHand) {
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.group = 1;
  shape.tiers = {{0, raw_tier()}};
  shape.tokens = {{2}};
  std::mt19937_64 rng(1);
  World world = make_world(shape, rng);
  world.config.sm_scale = 1;
  const PageLayout layout = *make_page_layout(raw_tier(), 128, world.config.page_bytes);
  uint8_t* page = world.pages().base + world.slots[0] * world.config.page_bytes;
  const auto put = [&](Component c, int32_t token, int32_t dim, float x) {
    const CodePosition at = code_position(layout.tile(c), c, token, dim);
    const uint16_t bits = float_to_half(x);
    std::memcpy(page + layout.tile_codes_byte(c, 0) + at.byte + at.bit / 8, &bits, 2);
  };
  world.q.assign(world.q.size(), 0);
  world.q[0] = float_to_half(1.0f);
  put(Component::kKey, 0, 0, 0.0f);
  put(Component::kKey, 1, 0, 1.0f);
  put(Component::kValue, 0, 7, 2.0f);
  put(Component::kValue, 1, 7, 4.0f);
  const Result<ReferenceOutput> got = attend_reference(world.config, world.call());
  ASSERT_TRUE(got.is_ok());
  const double e = std::exp(1.0);
  EXPECT_NEAR(got->out[7], (2 + 4 * e) / (1 + e), 1e-12);
  EXPECT_NEAR(got->lse[0], std::log(1 + e), 1e-12);
}

TEST(Reference, ValuesAreThoseOfThePageCodec) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 rng(seed);
  for (const int32_t bits : {16, 8, 4, 2}) {
    WorldShape shape;
    shape.num_kv_heads = 1;
    shape.tiers = {{0, token_wise_tier(bits, bits)}};
    shape.tokens = {{16}};
    World world = make_world(shape, rng);
    const PageLayout layout =
        *make_page_layout(shape.tiers[0].format, 128, world.config.page_bytes);
    const HostPage page{world.pages().base + world.slots[0] * world.config.page_bytes, layout};
    std::vector<float> k(16 * 128), v(16 * 128);
    TokenOutput output;
    output.k = k.data();
    output.v = v.data();
    output.count = 16;
    ASSERT_TRUE(decode_tokens(page, 0, output).is_ok());
    for (int32_t i = 0; i < 16 * 128; ++i) {
      const double key = page_value(layout, page.bytes, Component::kKey, i / 128, i % 128);
      const double value = page_value(layout, page.bytes, Component::kValue, i / 128, i % 128);
      EXPECT_NEAR(k[i], key, 1e-6 * (1 + std::fabs(key))) << "seed " << seed;
      EXPECT_NEAR(v[i], value, 1e-6 * (1 + std::fabs(value))) << "seed " << seed;
    }
  }
}

TEST(Reference, TiersOfARowAreOneCache) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {{0, token_wise_tier(8, 4)}, {1, token_wise_tier(4, 2)}};
  shape.tokens = {{40, 30}};
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> both = attend_reference(world.config, world.call());
  const SideCounts counts = world.tokens[0];
  world.tokens[0].of[1] = 0;
  const Result<ReferenceOutput> high = attend_reference(world.config, world.call());
  world.tokens[0] = counts;
  world.tokens[0].of[0] = 0;
  const Result<ReferenceOutput> low = attend_reference(world.config, world.call());
  ASSERT_TRUE(both.is_ok() && high.is_ok() && low.is_ok());
  for (size_t i = 0; i < both->out.size(); ++i) {
    const double a = std::exp(high->lse[i / 128]), b = std::exp(low->lse[i / 128]);
    EXPECT_NEAR(both->out[i], (a * high->out[i] + b * low->out[i]) / (a + b), 1e-9);
  }
}

TEST(Reference, RefusesWhatLiesOutside) {
  std::mt19937_64 rng(2);
  WorldShape shape;
  shape.num_kv_heads = 1;
  shape.tiers = {{0, token_wise_tier(4, 4)}};
  shape.tokens = {{20}};
  World world = make_world(shape, rng);
  world.slots[0] = world.num_pages;
  EXPECT_EQ(attend_reference(world.config, world.call()).status().code(), StatusCode::kCorrupt);
  world.slots[0] = 0;
  world.tokens[0].of[0] = -1;
  EXPECT_EQ(attend_reference(world.config, world.call()).status().code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace tierkv
