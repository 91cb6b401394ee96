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
  void open(const ConfigChoice& choice) {
    StoreConfig config = make_config(choice);
    config.window_tokens = 30;
    give_pages(choice.pages, &config);
    auto format = std::make_unique<test::Shadowed>(config, &rng_);
    shadow_ = format.get();
    auto place = HostPlace::make(config, std::move(format));
    shadow_->host_pages_ = &(*place)->pages();
    shadow_->begin(place->get());
    const TokenLaws laws = (*place)->laws();
    engine_ = store::Engine::make(config, laws, std::move(*place));
  }
  SequenceId add() {
    const SequenceId id = *engine_->add_sequence();
    shadow_->open(id.slot);
    return id;
  }
  Feed draw(int32_t tokens) { return Feed(layout_, tokens, &rng_); }

  CacheLayout layout_ = make_config({}).layout;
  test::Shadowed* shadow_ = nullptr;
  std::unique_ptr<KvStore> engine_;
};

TEST_F(EmulatedRefusedCall, LeavesNoCodebooks) {
  for (const bool with_profile : {true, false}) {
    ConfigChoice choice;
    choice.pages = 6;
    choice.max_tokens = 2000;
    choice.with_profile = with_profile;
    open(choice);
    const SequenceId id = add();
    EXPECT_EQ(draw(2000).give(engine_.get(), id, 0, 2000).code(), StatusCode::kOutOfPages);
    ASSERT_TRUE(engine_->release(id));
    const Status s = draw(360).give(engine_.get(), add(), 0, 360);
    ASSERT_TRUE(s) << s.message();
    EXPECT_GT(shadow_->blocks(), 0);
  }
}

// The first sequence of the step has too few tokens to make codebooks; the second makes them.
TEST_F(EmulatedRefusedCall, CodebooksServeSequencesThatComeAfter) {
  ConfigChoice choice;
  choice.with_profile = true;
  open(choice);
  const SequenceId ids[] = {add(), add()};
  const Feed feed = draw(700);
  ASSERT_TRUE(feed.give(engine_.get(), ids[0], 0, 20));
  ASSERT_TRUE(feed.give(engine_.get(), ids[1], 0, 240));
  const int64_t before = shadow_->blocks();
  const Feed twice = draw(160);
  LayerAppend step = twice.call(ids[0], 0, 0, 80);
  step.sequences = {ids, 2};
  ASSERT_TRUE(engine_->begin(step.sequences, 80));
  ASSERT_TRUE(engine_->append(step));
  EXPECT_GT(shadow_->blocks(), before);
}

}  // namespace
}  // namespace tierkv::store
