// SPDX-License-Identifier: Apache-2.0
// Calls of coded rows that make a layer's codebooks, in device memory beside host memory: a call
// that gets no pages leaves no codebooks, and sequences before the one that makes them stay raw.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tests/engine/support/coded_shadow.h"
#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store {
namespace {

class EmulatedRefusedCall : public RandomTest {
 protected:
  test::ShadowedStore open(const ConfigChoice& choice) {
    StoreConfig config = make_config(choice);
    config.window_tokens = 30;
    give_pages(choice.pages, &config);
    return {config, &rng_, &seen_};
  }
  Feed draw(int32_t tokens) { return Feed(layout_, tokens, &rng_); }

  CacheLayout layout_ = make_config({}).layout;
  test::Seen seen_;
};

TEST_F(EmulatedRefusedCall, LeavesNoCodebooks) {
  for (const bool with_profile : {true, false}) {
    ConfigChoice choice;
    choice.pages = 6;
    choice.max_tokens = 2000;
    choice.with_profile = with_profile;
    seen_ = {};
    test::ShadowedStore store = open(choice);
    KvStore* const engine = store.engine.get();
    const SequenceId id = *store.add();
    EXPECT_EQ(draw(2000).give(engine, id, 0, 2000).code(), StatusCode::kOutOfPages);
    ASSERT_TRUE(engine->release(id));
    const Status s = draw(360).give(engine, *store.add(), 0, 360);
    ASSERT_TRUE(s) << s.message();
    EXPECT_GT(seen_.blocks, 0);
  }
}

// The first sequence of the step has too few tokens to make codebooks; the second makes them.
TEST_F(EmulatedRefusedCall, CodebooksServeSequencesThatComeAfter) {
  ConfigChoice choice;
  choice.with_profile = true;
  test::ShadowedStore store = open(choice);
  KvStore* const engine = store.engine.get();
  const SequenceId ids[] = {*store.add(), *store.add()};
  const Feed feed = draw(700);
  ASSERT_TRUE(feed.give(engine, ids[0], 0, 20));
  ASSERT_TRUE(feed.give(engine, ids[1], 0, 240));
  const int64_t before = seen_.blocks;
  const Feed twice = draw(160);
  LayerAppend step = twice.call(ids[0], 0, 0, 80);
  step.sequences = {ids, 2};
  ASSERT_TRUE(engine->begin(step.sequences, 80));
  ASSERT_TRUE(engine->append(step));
  EXPECT_GT(seen_.blocks, before);
}

// A call of forks that is refused leaves blocks that it has saved. The next call is captured, so it
// must not free them. Half of the stores have little staging memory; the others save nothing.
TEST_F(EmulatedRefusedCall, ACaptureBehindItFreesNothing) {
  ConfigChoice choice;
  choice.num_layers = 6;
  choice.num_kv_heads = 1;
  choice.pages = 30;
  choice.max_tokens = 2000;
  choice.with_profile = true;
  StoreConfig config = make_config(choice);
  config.window_tokens = 30;
  std::get<CodedFormat>(config.format).unit_tokens = 16;
  give_pages(choice.pages, &config);
  for (int32_t round = 0; round < 6; ++round) {
    test::ShadowedStore store(config, &rng_, &seen_);
    KvStore* const engine = store.engine.get();
    const Feed feed(config.layout, 310, &rng_);
    const SequenceId whole = *store.add(), other = *store.add();
    for (const SequenceId& id : {whole, other}) ASSERT_TRUE(feed.give(engine, id, 0, 310));
    const SequenceId fork = *engine->fork(whole);
    store.rows->fork(whole.slot, fork.slot);
    const SequenceId rest = *store.add();
    const Feed step(config.layout, 60, &rng_);
    Status s = Status::ok();
    while (s) s = step.give(engine, rest, 0, 60);
    ASSERT_EQ(s.code(), StatusCode::kOutOfPages) << s.message();
    const SequenceId ids[] = {whole, fork};
    const Feed twice(config.layout, 1800, &rng_);
    ASSERT_TRUE(engine->begin({ids, 2}, 900));
    s = Status::ok();
    for (int32_t l = 0; s && l < choice.num_layers; ++l) {
      LayerAppend call = twice.call(whole, l, 0, 900);
      call.sequences = {ids, 2};
      s = engine->append(call);
    }
    ASSERT_EQ(s.code(), StatusCode::kOutOfPages) << s.message();
    const int64_t captured = seen_.captured;
    store.rows->captures = true;
    (void)step.give(engine, other, 0, 8);
    EXPECT_GT(seen_.captured, captured);
    if (HasFailure()) return;
  }
}

TEST_F(EmulatedRefusedCall, LongerWordsThanAttentionHasRoomFor) {
  StoreConfig config = make_config({});
  for (const int32_t longest : {11, 12}) {
    std::get<CodedFormat>(config.format).max_length = longest;
    const OpenStore store(config);
    const auto rows = std::move(*make_row_format(config));
    const test::Copy copy(config, *rows, store.place);
    DeviceCodedRows device(config, static_cast<CodedRows*>(rows.get()));
    DeviceFault fault;
    longest_attended_word = 11;
    const Status s = device.bind(copy.view(), &fault, nullptr);
    longest_attended_word = kMaxCodeLength;
    EXPECT_EQ(s.code(), longest > 11 ? StatusCode::kUnsupported : StatusCode::kOk) << s.message();
    EXPECT_EQ(s.message().find("format.max_length") != std::string::npos, longest > 11);
  }
}

}  // namespace
}  // namespace tierkv::store
