// SPDX-License-Identifier: Apache-2.0
// Out of pages, in begin() and in append(): nothing changes, the shortage is told, and the call can
// be repeated once there is room.
#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class PagesTest : public RandomTest {};

TEST_F(PagesTest, AnAppendIsRepeatedAfterARelease) {
  ConfigChoice choice;
  choice.pages = 12;
  const StoreConfig config = make_config(choice);
  const Feed feed(config.layout, 600, &rng_);
  OpenStore store(config);
  KvStore* engine = store.engine.get();
  const SequenceId first = *engine->add_sequence(), second = *engine->add_sequence();
  ASSERT_TRUE(feed.give(engine, first, 0, 600));
  ASSERT_TRUE(engine->begin({&second, 1}, 600));
  Status s;
  int32_t layer = 0;
  for (; layer < 2; ++layer) {
    s = engine->append(feed.call(second, layer, 0, 600));
    if (!s) break;
  }
  ASSERT_EQ(s.code(), StatusCode::kOutOfPages);
  const Shortage shortage = store.place->shortage();
  EXPECT_THAT(s.message(), ::testing::HasSubstr(std::to_string(shortage.bytes)));
  const StoreUsage before = *engine->usage();
  EXPECT_EQ(shortage.bytes, shortage.pages * before.page_bytes);
  EXPECT_EQ(engine->append(feed.call(second, layer, 0, 600)).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(engine->usage()->pages_free, before.pages_free);
  ASSERT_TRUE(engine->release(first));
  EXPECT_GE(engine->usage()->pages_free, before.pages_free + shortage.pages);
  for (; layer < 2; ++layer) ASSERT_TRUE(engine->append(feed.call(second, layer, 0, 600)));
  OneSequence alone(config, feed, 600);
  EXPECT_EQ(*engine->export_sequence(second), alone.bytes());
}

// Two sequences in one step, of which together the pages are missing: neither has moved.
TEST_F(PagesTest, AStepIsAllOrNothing) {
  ConfigChoice choice;
  choice.pages = 20;
  choice.max_tokens = 2000;
  const StoreConfig config = make_config(choice);
  const Feed feed(config.layout, 2000, &rng_);
  OpenStore store(config);
  KvStore* engine = store.engine.get();
  const SequenceId ids[] = {*engine->add_sequence(), *engine->add_sequence()};
  int32_t tokens = 0;
  Status s;
  for (; s && tokens + 8 <= 2000; tokens += 8) {
    s = engine->begin({ids, 2}, 8);
    for (int32_t l = 0; s && l < 2; ++l) {
      for (const SequenceId& id : ids) ASSERT_TRUE(engine->append(feed.call(id, l, tokens, 8)));
    }
  }
  tokens -= 8;
  ASSERT_EQ(s.code(), StatusCode::kOutOfPages);
  for (const SequenceId& id : ids) {
    EXPECT_EQ(*engine->num_tokens(id), tokens);
    OneSequence alone(config, feed, tokens);
    EXPECT_EQ(*engine->export_sequence(id), alone.bytes());
  }
  ASSERT_TRUE(engine->release(ids[0]));
  EXPECT_TRUE(feed.give(engine, ids[1], tokens, 8));
}

TEST_F(PagesTest, AForkTakesAnOpenPageALayer) {
  ConfigChoice choice;
  choice.pages = 12;
  const StoreConfig config = make_config(choice);
  const Feed feed(config.layout, 600, &rng_);
  OpenStore store(config);
  KvStore* engine = store.engine.get();
  const SequenceId id = *engine->add_sequence();
  ASSERT_TRUE(feed.give(engine, id, 0, 600));
  const int64_t free = engine->usage()->pages_free;
  std::vector<SequenceId> copies;
  Result<SequenceId> copy = engine->fork(id);
  for (; copy; copy = engine->fork(id)) copies.push_back(*copy);
  const bool full = copy.status().code() == StatusCode::kOutOfRange;
  if (!full) {
    EXPECT_EQ(copy.status().code(), StatusCode::kOutOfPages);
  }
  EXPECT_EQ(engine->usage()->pages_free, free - 2 * static_cast<int64_t>(copies.size()));
  const std::vector<uint8_t> bytes = *engine->export_sequence(id);
  for (const SequenceId& c : copies) EXPECT_EQ(*engine->export_sequence(c), bytes);
}

// Raw blocks that wait for means share pages with a copy: what is rewritten cannot give them back.
TEST_F(PagesTest, AFixTakesPagesBesideThoseThatItShares) {
  ConfigChoice choice;
  choice.num_layers = 1;
  StoreConfig config = make_config(choice);
  config.window_tokens = 8;
  give_pages(9, &config);
  const Feed feed(config.layout, 300, &rng_);
  OpenStore store(config);
  KvStore* engine = store.engine.get();
  const SequenceId id = *engine->add_sequence();
  ASSERT_TRUE(feed.give(engine, id, 0, 260));
  EXPECT_EQ(engine->usage()->pages_free, 1);  // two of sixteen blocks on a page
  const Result<SequenceId> copy = engine->fork(id);
  ASSERT_TRUE(copy) << copy.status().message();
  const std::vector<uint8_t> before = *engine->export_sequence(id);
  EXPECT_EQ(engine->begin({&id, 1}, 8).code(), StatusCode::kOutOfPages);
  EXPECT_EQ(*engine->export_sequence(id), before);
  EXPECT_EQ(*engine->export_sequence(*copy), before);
  ASSERT_TRUE(engine->release(*copy));
  ASSERT_TRUE(feed.give(engine, id, 260, 8));
  EXPECT_GE(engine->usage()->pages_free, 5);
}

// Pages of four raw blocks of 16 tokens, or one of 64: at 80 body tokens all five are full, and a
// copy shares them. The newest block then grows in a page that is not its alone.
TEST_F(PagesTest, ABlockGrowsBesideACopy) {
  ConfigChoice choice;
  choice.num_layers = 1;
  StoreConfig config = make_config(choice);
  config.window_tokens = 8;
  config.page_bytes = 8448;
  const Feed feed(config.layout, 300, &rng_);
  for (const int32_t pages : {5, 6, 7, 40}) {
    give_pages(pages, &config);
    OpenStore store(config);
    KvStore* engine = store.engine.get();
    const SequenceId id = *engine->add_sequence();
    ASSERT_TRUE(feed.give(engine, id, 0, 88));
    EXPECT_EQ(engine->usage()->pages_free, pages - 5);
    const Result<SequenceId> copy = engine->fork(id);
    ASSERT_TRUE(copy);
    EXPECT_EQ(engine->usage()->pages_shared, 5);
    const std::vector<uint8_t> before = *engine->export_sequence(id);
    ASSERT_TRUE(feed.give(engine, id, 88, 8));
    Status s = engine->begin({&id, 1}, 8);
    // The fourth page is exchanged, and two take the fifth one's place.
    ASSERT_EQ(s.is_ok(), pages - 5 >= 3) << s.message();
    EXPECT_EQ(*engine->export_sequence(*copy), before);
    if (!s) {
      EXPECT_EQ(s.code(), StatusCode::kOutOfPages);
      EXPECT_EQ(engine->usage()->pages_free, pages - 5);
      ASSERT_TRUE(engine->truncate(*copy, 0));
      s = engine->begin({&id, 1}, 8);
      ASSERT_EQ(s.is_ok(), pages >= 6) << s.message();
      if (!s) continue;
    }
    ASSERT_TRUE(engine->append(feed.call(id, 0, 96, 8)));
    InvariantChecker laws;
    EXPECT_TRUE(laws.check(store.place->pages().allocator));
    if (pages < 6) continue;
    OneSequence alone(config, feed, 104);
    EXPECT_EQ(*engine->export_sequence(id), alone.bytes());
  }
}

}  // namespace
}  // namespace tierkv
