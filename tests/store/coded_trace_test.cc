// Random lives of coded stores, and the corners of each call.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/store/support/coded_world.h"

namespace tierkv::testing {
namespace {

class CodedTrace {
 public:
  explicit CodedTrace(const KvStoreConfig& config, RandomInput* input)
      : world_(config, input), input_(input) {
    // From blocks of a few code words to raw ones.
    world_.set_spread(std::exp2(input->real(-2, 6)));
  }

  void run(int32_t calls) {
    for (int32_t i = 0; i < calls; ++i) {
      const Status status = call();
      if (!status) {
        const bool expected =
            status.code() == StatusCode::kOutOfPages || status.code() == StatusCode::kOutOfRange;
        ASSERT_TRUE(expected) << status.message();
        ++refused_;
      }
      ASSERT_EQ(broken_law(world_.view()), "") << "after call " << i;
      for (const auto& m : models_)
        ASSERT_EQ(world_.difference(*m), "") << "after call " << i << ", " << status.message();
    }
    for (const auto& m : models_) EXPECT_EQ(world_.attention_difference(*m, 1), "");
    for (const auto& m : models_) ASSERT_TRUE(world_.store().release(m->id));
    EXPECT_EQ(world_.store().stats()->pages_free, world_.config().num_pages);
  }
  int32_t coded_blocks() const { return coded_blocks_; }  // of one row, fixed-rate ones among them
  int32_t fixed_blocks() const { return fixed_blocks_; }
  int32_t refused() const { return refused_; }

 private:
  std::vector<CodedModel*> some(bool live) {
    std::vector<CodedModel*> list;
    for (const auto& m : models_) {
      if (m->live == live && input_->chance(0.7)) list.push_back(m.get());
    }
    return list;
  }
  Status call() {
    const int32_t kind = input_->uniform(0, 99);
    if (models_.empty() || kind < 8) {
      auto m = std::make_unique<CodedModel>();
      Status s = world_.add(m.get());
      if (s) models_.push_back(std::move(m));
      return s;
    }
    std::vector<CodedModel*> prompts = some(false);
    const std::vector<CodedModel*> live = some(true);
    if (kind < 20) return prompts.empty() ? Status::ok() : world_.prompt(prompts, tokens());
    if (kind < 28) {
      const auto is_refused = [this](const CodedModel* m) {
        return m->tokens == 0 && world_.config().coded.steps == StepSource::kPrompt;
      };
      prompts.erase(std::remove_if(prompts.begin(), prompts.end(), is_refused), prompts.end());
      return prompts.empty() ? Status::ok() : world_.end_prompt(prompts);
    }
    if (kind < 80) {
      return live.empty() ? Status::ok() : world_.step(live, input_->uniform(1, kMaxStepTokens));
    }
    const size_t i =
        static_cast<size_t>(input_->uniform(0, static_cast<int32_t>(models_.size()) - 1));
    CodedModel& m = *models_[i];
    coded_blocks_ += m.coded / 64;
    fixed_blocks_ += static_cast<int32_t>(std::count(m.fixed[0].begin(), m.fixed[0].end(), true));
    if (kind < 86) {
      const bool prompt = !m.live;
      return world_.truncate(&m, prompt ? input_->uniform(0, m.tokens) : cut(m.tokens));
    }
    if (kind < 90) {
      const Status s = world_.store().release(m.id);
      models_.erase(models_.begin() + static_cast<int64_t>(i));
      return s;
    }
    if (!m.live) return Status::ok();
    auto copy = std::make_unique<CodedModel>();
    Status s = kind < 95 ? world_.fork(m, copy.get()) : world_.transfer(m, copy.get());
    if (s) models_.push_back(std::move(copy));
    return s;
  }
  int32_t tokens() { return input_->uniform(1, input_->chance(0.5) ? 20 : 200); }
  int32_t cut(int32_t n) {
    return std::max(0, n - input_->uniform(0, input_->chance(0.5) ? 10 : 150));
  }

  CodedWorld world_;
  RandomInput* input_;
  std::vector<std::unique_ptr<CodedModel>> models_;
  int32_t refused_ = 0, coded_blocks_ = 0, fixed_blocks_ = 0;
};

TEST(CodedTrace, HoldsItsLawsAndItsValues) {
  int32_t blocks = 0, refused = 0;
  for (int32_t i = 0; i < 12; ++i) {
    RandomInput input;
    KvStoreConfig config = small_coded_config(&input);
    if (i % 3 == 1) config.coded.means = MeanSource::kNone;
    if (i % 3 == 2) {
      config.coded.means = MeanSource::kGiven;
      for (int32_t d = 0; d < 4 * 64; ++d) {
        config.coded.key_means.push_back(input.real(-3, 3));
        config.coded.value_means.push_back(input.real(-3, 3));
      }
    }
    if (i % 4 == 3) config.coded.streams_per_lane = 1;
    if (i / 6 == 1) use_prompt_steps(&config, &input);
    if (i % 4 == 1) config.policy.window_tokens = 70;
    if (i % 4 == 2) config.num_pages = 40;  // refused now and then
    CodedTrace trace(config, &input);
    trace.run(120);
    if (::testing::Test::HasFatalFailure()) return;
    blocks += trace.coded_blocks();
    refused += trace.refused();
  }
  EXPECT_GT(blocks, 0);
  EXPECT_GT(refused, 0);
}

TEST(CodedTrace, FixedRateBlocksLieBesideCodedOnes) {
  int32_t fixed = 0, coded = 0;
  for (int32_t i = 0; i < 10; ++i) {
    RandomInput input;
    KvStoreConfig config = small_coded_config(&input);
    config.num_pages = i % 4 == 2 ? 40 : 120;
    config.coded.fixed_blocks = true;
    config.coded.fixed_format = token_wise_tier(i % 2 == 0 ? 8 : 4, i % 3 == 0 ? 8 : 4);
    config.policy.alpha_high = input.real(0.5f, 20);
    config.policy.sink_tokens = i % 3 == 1 ? 0 : input.uniform(1, 80);
    if (i % 5 == 4) config.policy.alpha_high = 0;  // all blocks are
    CodedTrace trace(config, &input);
    trace.run(120);
    if (::testing::Test::HasFatalFailure()) return;
    fixed += trace.fixed_blocks();
    coded += trace.coded_blocks() - trace.fixed_blocks();
  }
  EXPECT_GT(fixed, 0);
  EXPECT_GT(coded, 0);
}

TEST(CodedTrace, EveryHeadDim) {
  for (const int32_t head_dim : {96, 128, 256}) {
    RandomInput input;
    KvStoreConfig config = small_coded_config(&input);
    config.layout.num_layers = 1;
    config.layout.head_dim = head_dim;
    config.coded.key_steps.resize(2);
    config.coded.value_steps.resize(2);
    config.coded.fixed_blocks = input.chance(0.5);
    if (config.coded.fixed_blocks) config.policy.sink_tokens = 70;
    CodedWorld world(config, &input);
    CodedModel m;
    ASSERT_TRUE(world.add(&m));
    ASSERT_TRUE(world.prompt({&m}, 150));
    ASSERT_TRUE(world.end_prompt({&m}));
    for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&m}, 5));
    EXPECT_EQ(m.coded, 192);
    EXPECT_EQ(broken_law(world.view()), "");
    EXPECT_EQ(world.difference(m), "");
    EXPECT_EQ(world.attention_difference(m, 0), "");
    ASSERT_TRUE(world.truncate(&m, 137));
    EXPECT_EQ(world.difference(m), "");
    EXPECT_EQ(world.attention_difference(m, 0), "");
  }
}

// Lengths around the block and the window, and none at all.
TEST(CodedTrace, EveryPromptLength) {
  RandomInput input;
  KvStoreConfig config = small_coded_config(&input);
  CodedWorld world(config, &input);
  for (const int32_t tokens : {0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 143, 144, 145}) {
    CodedModel m;
    ASSERT_TRUE(world.add(&m));
    ASSERT_TRUE(tokens == 0 || world.prompt({&m}, tokens));
    EXPECT_EQ(world.attention_difference(m, 0), "") << "in a prompt of " << tokens;
    ASSERT_TRUE(world.end_prompt({&m}));
    EXPECT_EQ(broken_law(world.view()), "") << tokens;
    EXPECT_EQ(world.difference(m), "") << tokens;
    EXPECT_EQ(world.attention_difference(m, 1), "") << tokens;
    for (int32_t i = 0; i < 90; ++i) ASSERT_TRUE(world.step({&m}, 1));
    EXPECT_EQ(world.difference(m), "") << tokens;
    ASSERT_TRUE(world.store().release(m.id));
  }
}

// A fork shares full pages; what either does afterwards the other does not see.
TEST(CodedTrace, ForkSharesBlocks) {
  RandomInput input;
  KvStoreConfig config = small_coded_config(&input);
  config.num_pages = 200;
  config.max_tokens = 1500;
  CodedWorld world(config, &input);
  world.set_spread(3);
  CodedModel a, b;
  ASSERT_TRUE(world.add(&a));
  ASSERT_TRUE(world.prompt({&a}, 1300));
  ASSERT_TRUE(world.end_prompt({&a}));
  ASSERT_TRUE(world.fork(a, &b));
  EXPECT_GT(world.store().stats()->pages_shared, 0);
  ASSERT_TRUE(world.truncate(&a, 700));
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&a}, 7));
  for (int32_t i = 0; i < 30; ++i) ASSERT_TRUE(world.step({&b}, 3));
  EXPECT_EQ(broken_law(world.view()), "");
  EXPECT_EQ(world.difference(a), "");
  EXPECT_EQ(world.difference(b), "");
  EXPECT_EQ(world.attention_difference(a, 0), "");
  EXPECT_EQ(world.attention_difference(b, 1), "");
}

}  // namespace
}  // namespace tierkv::testing
