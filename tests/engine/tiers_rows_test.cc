// SPDX-License-Identifier: Apache-2.0
// Tiers by class of heads in the one store, in host memory, against a model that knows no pages.
#include <gmock/gmock.h>

#include <algorithm>

#include "codec/format/sound_halves.h"
#include "store/rows/tiers/tiers_shape.h"
#include "tests/engine/support/feed.h"
#include "tests/engine/support/owned_parts.h"
#include "tests/engine/support/tiers_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class TiersRowsTest : public RandomTest {};

TEST_F(TiersRowsTest, SoakOfRandomCalls) {
  int64_t pruned = 0, out_of_pages = 0;
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t pages : {70, 1000}) {
      const StoreConfig config = tiers_config(head_dim, pages, pick(0, 1) == 1, &rng_);
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << ", " << pages << " pages");
      TiersWorld world(config, static_cast<uint32_t>(rng_()));
      for (int32_t i = 0; i < 120; ++i) {
        world.step();
        if (HasFatalFailure()) return;
        if (i % 3 == 0) world.check_all();
        if (HasFatalFailure()) return;
      }
      pruned += world.pruned();
      out_of_pages += world.out_of_pages();
    }
  }
  EXPECT_GT(pruned, 0);
  EXPECT_GT(out_of_pages, 0);
}

TEST_F(TiersRowsTest, ChunksDoNotMatterWithoutSignificances) {
  const StoreConfig config = tiers_config(128, 900, true, &rng_);
  OpenStore store(config);
  const Feed feed(config.layout, 600, &rng_);
  std::vector<uint8_t> first;
  for (int32_t round = 0; round < 4; ++round) {
    const SequenceId id = *store.engine->add_sequence();
    for (int32_t done = 0; done < 600;) {
      const int32_t most = round == 0 ? 600 : round == 1 ? 1 : round == 2 ? 8 : 150;
      const int32_t count = std::min(600 - done, pick(1, most));
      const Status s = feed.give(store.engine.get(), id, done, round == 0 ? 600 : count);
      ASSERT_TRUE(s) << s.message();
      done += round == 0 ? 600 : count;
    }
    const Result<std::vector<uint8_t>> bytes = store.engine->export_sequence(id);
    ASSERT_TRUE(bytes);
    if (round == 0) first = *bytes;
    EXPECT_EQ(*bytes, first) << round;
    ASSERT_TRUE(store.engine->release(id));
  }
}

// Pages that were cut hold what pages hold that were never longer.
TEST_F(TiersRowsTest, CutPagesAreAsIfNeverLonger) {
  const StoreConfig config = tiers_config(64, 900, false, &rng_);
  const Feed feed(config.layout, 500, &rng_);
  const int32_t tokens = pick(100, 400);
  std::vector<std::vector<uint8_t>> pages;
  for (const bool is_cut : {false, true}) {
    OneSequence one(config, feed, is_cut ? 500 : tokens + config.window_tokens);
    ASSERT_TRUE(one.store.engine->truncate(one.id, tokens));
    std::vector<uint8_t> tiles;
    const store::PagesView& view = one.store.place->pages();
    const auto& tiers = std::get<TiersFormat>(config.format);
    const int32_t body = tokens - config.sink_tokens;  // all of the high tier
    for (int32_t r = 0; r < view.allocator.shape.table.rows_per_sequence; ++r) {
      const TierFormat& format = tiers.classes[tiers.class_of_head[r]].high;
      const PageLayout layout = *make_page_layout(format, 64, view.page_bytes, false);
      for (int32_t t = 0; t < body; t += kTileTokens) {
        const uint8_t* page = view.bytes(view.page(r, 0, t / layout.tokens));
        const int32_t tile = t % layout.tokens / kTileTokens;
        for (const Component c : {Component::kKey, Component::kValue}) {
          const uint8_t* codes = page + layout.tile_codes_byte(c, tile);
          const uint8_t* metadata = page + layout.tile_metadata_byte(c, tile);
          tiles.insert(tiles.end(), codes, codes + layout.tile(c).bytes());
          tiles.insert(tiles.end(), metadata, metadata + tile_metadata_bytes(1));
        }
      }
    }
    pages.push_back(tiles);
  }
  EXPECT_EQ(pages[0], pages[1]);
}

TEST_F(TiersRowsTest, OutOfPagesChangesNothing) {
  StoreConfig config = tiers_config(128, 40, false, &rng_);
  OpenStore store(config);
  const SequenceId a = *store.engine->add_sequence(), b = *store.engine->add_sequence();
  const Feed feed(config.layout, 900, &rng_);
  int32_t tokens = 0;
  Status s;
  while (tokens < 900) {
    s = feed.give(store.engine.get(), a, tokens, 4);
    if (!s) break;
    ASSERT_NE(feed.give(store.engine.get(), b, tokens, 1).code(), StatusCode::kInvalidArgument);
    tokens += 4;
  }
  ASSERT_EQ(s.code(), StatusCode::kOutOfPages) << s.message();
  EXPECT_GT(store.place->shortage().pages, 0);
  EXPECT_EQ(*store.engine->num_tokens(a), tokens);
  const auto before = *store.engine->export_sequence(a);
  EXPECT_EQ(store.engine->begin({&a, 1}, 8).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(*store.engine->export_sequence(a), before);
  ASSERT_TRUE(store.engine->release(b));
  EXPECT_TRUE(feed.give(store.engine.get(), a, tokens, 4));
}

// As many tokens as tokens_that_fit() promises fit, whatever their tiers.
TEST_F(TiersRowsTest, WhatIsPromisedFits) {
  for (int32_t round = 0; round < 6; ++round) {
    StoreConfig config = tiers_config(64, pick(40, 300), round % 2 == 1, &rng_);
    const Result<TokenCapacity> capacity = tokens_that_fit(config);
    ASSERT_TRUE(capacity) << capacity.status().message();
    EXPECT_LE(capacity->least, capacity->typical);
    OpenStore store(config);
    const auto each = static_cast<int32_t>(capacity->least / config.max_sequences);
    for (int32_t i = 0; i < config.max_sequences; ++i) {
      const SequenceId id = *store.engine->add_sequence();
      const Feed feed(config.layout, each, &rng_);
      ASSERT_TRUE(store.engine->begin({&id, 1}, each));
      for (int32_t l = 0; l < config.layout.num_layers; ++l) {
        LayerAppend call = feed.call(id, l, 0, each);
        call.significance = feed.significance.data() + l * config.layout.num_kv_heads * each;
        call.stride = each;
        const Status s = store.engine->append(call);
        ASSERT_TRUE(s) << s.message();
      }
    }
  }
}

TEST_F(TiersRowsTest, SensitiveHeadsTakeTheFirstClasses) {
  StoreConfig config = tiers_config(64, 500, false, &rng_);
  auto& tiers = std::get<TiersFormat>(config.format);
  const size_t heads = tiers.class_of_head.size();  // 6
  tiers.class_of_head.clear();
  tiers.classes[0].share = 0.17;
  tiers.classes[1].share = 0.5;
  config.profile = nullptr;
  EXPECT_EQ(config.validate().code(), StatusCode::kInvalidArgument);
  const auto profile = std::make_shared<Profile>(*random_profile(config.layout, {}, &rng_));
  profile->joint_sensitivity.assign(heads, 0);
  for (size_t i = 0; i < heads; ++i)
    profile->joint_sensitivity[(i * 5 + 2) % heads] = 1.0 / (1 + i);
  profile->key_sensitivity = profile->value_sensitivity = profile->joint_sensitivity;
  config.profile = profile;
  ASSERT_TRUE(config.validate()) << config.validate().message();
  // The same as given: 1, 3 and 2 heads.
  StoreConfig given = config;
  auto& classes = std::get<TiersFormat>(given.format).class_of_head;
  classes.assign(heads, 2);
  for (size_t i = 0; i < 4; ++i) classes[(i * 5 + 2) % heads] = i == 0 ? 0 : 1;
  OpenStore by_profile(config), by_hand(given);
  EXPECT_EQ(by_profile.place->identity(), by_hand.place->identity());
  std::swap(classes[2], classes[1]);
  EXPECT_NE(by_profile.place->identity(), OpenStore(given).place->identity());
}

TEST_F(TiersRowsTest, BadFormatsAreRefusedByName) {
  const StoreConfig good = tiers_config(128, 500, false, &rng_);
  const auto refused = [&](const char* name, StatusCode code, auto change) {
    StoreConfig config = good;
    change(&std::get<TiersFormat>(config.format), &config);
    const Status s = config.validate();
    EXPECT_EQ(s.code(), code) << name << ": " << s.message();
    EXPECT_THAT(std::string(s.message()), ::testing::HasSubstr(name));
  };
  const auto invalid = StatusCode::kInvalidArgument, unsupported = StatusCode::kUnsupported;
  refused("format.classes", invalid, [](auto* f, auto*) { f->classes.clear(); });
  refused("format.classes", invalid, [](auto* f, auto*) { f->classes.resize(5); });
  refused("format.classes[1]: high", unsupported,
          [](auto* f, auto*) { f->classes[1].high = token_wise_tier(16, 16); });
  refused("format.classes[0]: low", unsupported,
          [](auto* f, auto*) { f->classes[0].low = token_wise_tier(2, 4); });
  refused("format.classes[2]: low", unsupported,
          [](auto* f, auto*) { f->classes[2].low.k = token_wise(4, 32); });
  refused("alpha_low", invalid, [](auto* f, auto*) { f->classes[0].alpha_low = 2; });
  refused("alpha_low", invalid, [](auto* f, auto*) { f->classes[0].alpha_high = NAN; });
  refused("share", invalid, [](auto* f, auto*) { f->classes[0].share = -0.1; });
  refused("class_of_head", invalid, [](auto* f, auto*) { f->class_of_head.pop_back(); });
  refused("class_of_head", invalid, [](auto* f, auto*) { f->class_of_head[3] = 3; });
  refused("page_bytes", invalid, [](auto*, auto* c) { c->page_bytes = 1024; });
}

// Every change of a body is found out or leaves one that can be read.
TEST_F(TiersRowsTest, HostileBodies) {
  const StoreConfig config = tiers_config(64, 900, true, &rng_);
  OneSequence one(config, Feed(config.layout, 300, &rng_), 300);
  store::HostPlace* const place = one.store.place;
  const store::LayerMoves moves = one.layers(300);
  const OwnedParts parts(*place->export_parts(moves));
  int32_t corrupt = 0;
  for (int32_t round = 0; round < 300; ++round) {
    OwnedParts damaged = parts;
    std::vector<uint8_t>& body = damaged.bodies[rng_() % damaged.bodies.size()];
    const int32_t what = pick(0, 5);
    if (what == 0) body.resize(rng_() % body.size());
    if (what == 1) body.push_back(0);
    // The last zero point, or the last value of a raw layer; the scale before it.
    if (what == 2) body.end()[-1] = 0x7c;
    const bool is_raw = &body - damaged.bodies.data() >= 3 && &body - damaged.bodies.data() < 6;
    if (what == 3) body.end()[-3] = is_raw ? 0xfc : 0x81;
    for (int32_t i = 0; what > 3 && i < 3; ++i) {
      const size_t most = what == 4 ? body.size() : size_t{300};  // the tiers
      body[rng_() % most] = static_cast<uint8_t>(rng_());
    }
    const Status s = place->import_parts(3, damaged.views());
    corrupt += s.code() == StatusCode::kCorrupt;
    EXPECT_TRUE(what > 3 || s.code() == StatusCode::kCorrupt) << what;
    if (!s) {
      EXPECT_EQ(s.code(), StatusCode::kCorrupt) << s.message();
      continue;
    }
    for (store::LayerMove move : moves) {
      move.slot = 3;
      std::vector<uint16_t> k(300 * 3 * 64), v(k);
      LayerRange range;
      range.layer = move.layer;
      range.end = 300;
      range.k = k.data();
      range.v = v.data();
      ASSERT_TRUE(place->decode(range, move));
      EXPECT_TRUE(std::all_of(k.begin(), k.end(), is_finite_half));
    }
    ASSERT_TRUE(place->release(3));
  }
  EXPECT_GT(corrupt, 100);
}

// A device attends to the high side of a raw layer alone.
TEST_F(TiersRowsTest, LowTokensOfRawLayersAreRefused) {
  const StoreConfig config = tiers_config(64, 900, true, &rng_);
  OneSequence one(config, Feed(config.layout, 300, &rng_), 300);
  OwnedParts parts(*one.store.place->export_parts(one.layers(300)));
  std::vector<uint8_t>& body = parts.bodies[3];  // layer 1
  constexpr int32_t kMean = 16, kTileBytes = kTileTokens * 64 * 2 * sizeof(uint16_t);
  store::set_tier(body.data() + kMean, config.sink_tokens + 1, store::BodyTier::kLow);
  body.insert(body.end(), kTileBytes, 0);
  const Status s = one.store.place->import_parts(3, parts.views());
  EXPECT_EQ(s.code(), StatusCode::kCorrupt);
  EXPECT_THAT(std::string(s.message()), ::testing::HasSubstr("low tier"));
}

}  // namespace
}  // namespace tierkv
