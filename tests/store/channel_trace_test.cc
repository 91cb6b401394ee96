// Random lives of stores of channel blocks, and the corners of each call.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/store/support/channel_store_world.h"

namespace tierkv::testing {
namespace {

class ChannelTrace {
 public:
  ChannelTrace(const KvStoreConfig& config, RandomInput* input)
      : world_(config, input), input_(input) {}

  void run(int32_t calls) {
    for (int32_t i = 0; i < calls; ++i) {
      const Status status = call();
      if (!status) {
        const bool expected =
            status.code() == StatusCode::kOutOfPages || status.code() == StatusCode::kOutOfRange;
        ASSERT_TRUE(expected) << status.message();
        ++refused_;
      }
      ASSERT_EQ(broken_channel_law(world_.view()), "") << "after call " << i;
      for (const auto& m : models_) ASSERT_EQ(world_.difference(*m), "") << "after call " << i;
    }
    for (const auto& m : models_) EXPECT_EQ(world_.attention_difference(*m, 1), "");
    for (const auto& m : models_) ASSERT_TRUE(world_.store().release(m->id));
    EXPECT_EQ(world_.store().stats()->pages_free, world_.config().num_pages);
  }
  int32_t blocks() const { return blocks_; }
  int32_t refused() const { return refused_; }

 private:
  ChannelStoreWorld::List some(bool live) {
    ChannelStoreWorld::List list;
    for (const auto& m : models_) {
      if (m->live == live && input_->chance(0.7)) list.push_back(m.get());
    }
    return list;
  }
  Status add() {
    auto m = std::make_unique<ChannelModel>();
    const Status s = world_.add(m.get());
    if (s) models_.push_back(std::move(m));
    return s;
  }
  Status call() {
    const int32_t kind = input_->uniform(0, 99);
    if (models_.empty() || kind < 8) return add();
    const ChannelStoreWorld::List prompts = some(false), live = some(true);
    if (kind < 20) return prompts.empty() ? Status::ok() : world_.prompt(prompts, tokens());
    if (kind < 28) return prompts.empty() ? Status::ok() : world_.end_prompt(prompts);
    if (kind < 80) {
      return live.empty() ? Status::ok() : world_.step(live, input_->uniform(1, kMaxStepTokens));
    }
    const auto i =
        static_cast<size_t>(input_->uniform(0, static_cast<int32_t>(models_.size()) - 1));
    ChannelModel& m = *models_[i];
    blocks_ += m.in_blocks / world_.config().channel.block_tokens;
    if (kind < 86) return world_.truncate(&m, cut(m.tokens));
    if (kind < 90) {
      const Status s = world_.store().release(m.id);
      models_.erase(models_.begin() + static_cast<int64_t>(i));
      return s;
    }
    if (!m.live) return Status::ok();
    auto copy = std::make_unique<ChannelModel>();
    Status s = kind < 95 ? world_.fork(m, copy.get()) : world_.transfer(m, copy.get());
    if (s) models_.push_back(std::move(copy));
    return s;
  }
  int32_t tokens() { return input_->uniform(1, input_->chance(0.5) ? 20 : 200); }
  int32_t cut(int32_t n) {
    return std::max(0, n - input_->uniform(0, input_->chance(0.5) ? 10 : 150));
  }

  ChannelStoreWorld world_;
  RandomInput* input_;
  std::vector<std::unique_ptr<ChannelModel>> models_;
  int32_t refused_ = 0, blocks_ = 0;
};

TEST(ChannelTrace, HoldsItsLawsAndItsValues) {
  constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  int32_t blocks = 0, refused = 0;
  for (int32_t i = 0; i < 12; ++i) {
    RandomInput input;
    KvStoreConfig config = small_channel_config();
    config.layout.dtype = kDTypes[i % 3];
    config.channel.k_bits = i % 2 == 0 ? 4 : 2;
    config.channel.v_bits = i / 2 % 2 == 0 ? 4 : 2;
    if (i % 4 == 1) config.policy.window_tokens = 70;
    if (i % 4 == 3) config.channel.block_tokens = 128;
    if (i % 5 == 2) config.num_pages = 60;  // refused now and then
    ChannelTrace trace(config, &input);
    trace.run(120);
    if (::testing::Test::HasFatalFailure()) return;
    blocks += trace.blocks();
    refused += trace.refused();
  }
  EXPECT_GT(blocks, 0);
  EXPECT_GT(refused, 0);
}

TEST(ChannelTrace, EveryHeadDimAndFormat) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (int32_t i = 0; i < 8; ++i) {
      RandomInput input;
      KvStoreConfig config = small_channel_config();
      config.layout.num_layers = 1;
      config.layout.head_dim = head_dim;
      config.channel.k_bits = i % 2 == 0 ? 4 : 2;
      config.channel.v_bits = i / 2 % 2 == 0 ? 4 : 2;
      config.channel.block_tokens = i < 4 ? 64 : 128;
      if (head_dim == 256 && i >= 4) continue;
      SCOPED_TRACE(to_json(config.channel) + " of " + std::to_string(head_dim));
      ChannelStoreWorld world(config, &input);
      ChannelModel m;
      ASSERT_TRUE(world.add(&m));
      ASSERT_TRUE(world.prompt({&m}, 150));
      ASSERT_TRUE(world.end_prompt({&m}));
      for (int32_t step = 0; step < 20; ++step) ASSERT_TRUE(world.step({&m}, 5));
      EXPECT_EQ(m.in_blocks, i < 4 ? 192 : 128);
      EXPECT_EQ(broken_channel_law(world.view()), "");
      EXPECT_EQ(world.difference(m), "");
      EXPECT_EQ(world.attention_difference(m, 0), "");
      EXPECT_EQ(world.attention_difference(m, 0, 8), "");
      ASSERT_TRUE(world.truncate(&m, 137));
      EXPECT_EQ(world.difference(m), "");
      ASSERT_TRUE(world.truncate(&m, 101));
      EXPECT_EQ(world.difference(m), "");
      EXPECT_EQ(world.attention_difference(m, 0), "");
    }
  }
}

// Lengths around the block and the window, and none at all; and what steps make of each.
TEST(ChannelTrace, EveryPromptLength) {
  RandomInput input;
  const KvStoreConfig config = small_channel_config();
  ChannelStoreWorld world(config, &input);
  for (const int32_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 143, 144, 145}) {
    ChannelModel m;
    ASSERT_TRUE(world.add(&m));
    ASSERT_TRUE(tokens == 0 || world.prompt({&m}, tokens));
    EXPECT_EQ(world.attention_difference(m, 0), "") << "in a prompt of " << tokens;
    ASSERT_TRUE(world.end_prompt({&m}));
    EXPECT_EQ(m.in_blocks, std::max(0, tokens - 16) / 64 * 64);
    EXPECT_EQ(broken_channel_law(world.view()), "") << tokens;
    EXPECT_EQ(world.difference(m), "") << tokens;
    EXPECT_EQ(world.attention_difference(m, 1), "") << tokens;
    for (int32_t i = 0; i < 90; ++i) {
      ASSERT_TRUE(world.step({&m}, 1));
      ASSERT_EQ(broken_channel_law(world.view()), "") << tokens << " + " << i;
    }
    EXPECT_EQ(world.difference(m), "") << tokens;
    ASSERT_TRUE(world.store().release(m.id));
  }
}

// A prompt in pieces is the prompt in one.
TEST(ChannelTrace, PiecesOfAPrompt) {
  for (int32_t i = 0; i < 20; ++i) {
    RandomInput input;
    KvStoreConfig config = small_channel_config();
    config.policy.window_tokens = input.uniform(8, 100);
    ChannelStoreWorld world(config, &input);
    ChannelModel m;
    ASSERT_TRUE(world.add(&m));
    while (m.tokens < 390) {
      ASSERT_TRUE(world.prompt({&m}, input.uniform(1, std::min(150, 400 - m.tokens))));
      ASSERT_EQ(broken_channel_law(world.view()), "");
      ASSERT_EQ(world.difference(m), "") << m.tokens;
    }
    ASSERT_TRUE(world.end_prompt({&m}));
    EXPECT_EQ(world.attention_difference(m, 0), "");
  }
}

// A fork shares full pages; what either does afterwards the other does not see.
TEST(ChannelTrace, ForkSharesBlocks) {
  for (const int32_t bits : {4, 2}) {
    RandomInput input;
    KvStoreConfig config = small_channel_config();
    config.channel.k_bits = config.channel.v_bits = bits;
    config.num_pages = 300;
    config.max_tokens = 1500;
    ChannelStoreWorld world(config, &input);
    ChannelModel a, b;
    ASSERT_TRUE(world.add(&a));
    ASSERT_TRUE(world.prompt({&a}, 1300));
    ASSERT_TRUE(world.end_prompt({&a}));
    ASSERT_TRUE(world.fork(a, &b));
    EXPECT_GT(world.store().stats()->pages_shared, 0);
    ASSERT_TRUE(world.truncate(&a, 700));
    for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&a}, 7));
    for (int32_t i = 0; i < 30; ++i) ASSERT_TRUE(world.step({&b}, 3));
    EXPECT_EQ(broken_channel_law(world.view()), "");
    EXPECT_EQ(world.difference(a), "");
    EXPECT_EQ(world.difference(b), "");
    EXPECT_EQ(world.attention_difference(a, 0), "");
    EXPECT_EQ(world.attention_difference(b, 1), "");
  }
}

}  // namespace
}  // namespace tierkv::testing
