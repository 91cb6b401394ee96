// Random lives of coded stores on the GPU beside the host's: equal states after each call, byte for
// byte, and attention that agrees.
#include "tests/gpu/store/coded_store_twins.cuh"
#include "tests/gpu/store/twin_trace.cuh"

namespace tierkv::testing {
namespace {

// With values of any spread, prompts that are scored where blocks may have a fixed rate, and the
// stores' statistics compared.
class TracedTwins : public CodedTwins {
 public:
  TracedTwins(const KvStoreConfig& config, RandomInput* input) : CodedTwins(config, input) {
    set_spread(std::exp2(input->real(-2, 5)));
  }
  Status prompt(SequenceList l, int32_t tokens) {
    const Status s = CodedTwins::prompt(l, tokens);
    if (!s || !config().coded.fixed_blocks) return s;
    int32_t longest = 0;
    for (int32_t i = 0; i < l.count; ++i) {
      longest = std::max(longest, *host().num_tokens(l.ids[i]));
    }
    return score(l, input().uniform(0, 1), longest);
  }
  std::string difference() {
    const std::string text = CodedTwins::difference();
    return text.empty() ? stats_difference() : text;
  }
  // A prompt without tokens has no step of its own.
  bool is_expected(const Status& s) const {
    const bool relative = config().coded.steps == StepSource::kPrompt;
    return CodedTwins::is_expected(s) || (relative && s.code() == StatusCode::kInvalidArgument);
  }
};

void live(const KvStoreConfig& config, RandomInput* input, int32_t calls) {
  TracedTwins twins(config, input);
  TwinTrace<TracedTwins>(&twins, input).run(calls);
}

TEST(GpuCodedStore, KeepsTheSameBlocksAtAFixedRate) {
  for (int32_t i = 0; i < 6; ++i) {
    RandomInput input;
    KvStoreConfig config = coded_config(&input, i % 3 == 0 ? 64 : i % 3 == 1 ? 128 : 96);
    config.coded.fixed_blocks = true;
    config.coded.fixed_format = token_wise_tier(i % 2 == 0 ? 8 : 4, i < 3 ? 4 : 8);
    config.policy.sink_tokens = i % 2 == 0 ? 0 : input.uniform(1, 80);
    config.policy.alpha_high = i == 5 ? 0 : input.real(0.5f, 20);
    if (i == 4) config.coded.streams_per_lane = 1;
    if (i == 1) config.coded.max_length = 11;
    live(config, &input, 90);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(GpuCodedStore, IsTheHostStoreByteForByte) {
  constexpr int32_t kHeadDims[] = {64, 128, 96, 256};
  for (int32_t i = 0; i < 12; ++i) {
    RandomInput input;
    KvStoreConfig config =
        coded_config(&input, kHeadDims[i % 3 == 2 ? input.uniform(0, 3) : (i + i / 4) % 4]);
    if (i % 2 == 1) config.coded.streams_per_lane = 1;
    if (i % 4 == 1) config.coded.max_length = 9;
    if (i % 4 == 2) config.policy.window_tokens = 64;
    if (i % 4 == 3) config.num_pages = 60;
    if (i % 3 == 1) config.coded.codebooks = CodebookSource::kDevice;
    if (i % 2 == 0) config.layout.num_q_heads = 2 * input.uniform(1, 16);
    if (i % 3 == 2) give_family(&config, 1 + i % 4);
    if (i % 5 == 4) config.coded.means = MeanSource::kNone;
    if (i % 5 == 3) {
      config.coded.means = MeanSource::kGiven;
      for (int32_t j = 0; j < 4 * config.layout.head_dim; ++j) {
        config.coded.key_means.push_back(input.real(-3, 3));
        config.coded.value_means.push_back(input.real(-3, 3));
      }
    }
    if (i >= 6) {
      config.coded.steps = StepSource::kPrompt;
      config.coded.key_steps.clear();
      config.coded.value_steps.clear();
      config.coded.key_relative = std::exp2(input.real(-10, 0));
      config.coded.value_relative = std::exp2(input.real(-8, 0));
    }
    live(config, &input, 60);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// A long life of steps alone: blocks that steps code, on pages that steps take.
TEST(GpuCodedStore, StepsCodeTheirBlocks) {
  RandomInput input;
  KvStoreConfig config = coded_config(&input, 128);
  config.max_tokens = 1000;
  CodedTwins twins(config, &input);
  SequenceId ids[2];
  ASSERT_TRUE(twins.add(&ids[0]));
  ASSERT_TRUE(twins.add(&ids[1]));
  ASSERT_TRUE(twins.prompt({ids, 1}, 130));
  ASSERT_TRUE(twins.prompt({ids + 1, 1}, 7));
  ASSERT_TRUE(twins.end_prompt({ids, 2}));
  for (int32_t i = 0; i < 110; ++i) {
    ASSERT_TRUE(twins.step({ids, 2}, 1 + i % 5));
    if (i % 10 != 9) continue;
    ASSERT_EQ(twins.difference(), "") << i;
    ASSERT_EQ(twins.attention_difference({ids, 2}), "") << i;
  }
  const StoreStats a = *twins.host().stats(), b = *twins.device().stats();
  EXPECT_EQ(a.nominal_bytes, b.nominal_bytes);
  EXPECT_EQ(a.pages_free, b.pages_free);
}

// Blocks of two slices and of families of codebooks among those at a fixed rate.
TEST(GpuCodedStore, KeepsTheSameFixedRateBlocksInSlicesAndFamilies) {
  for (int32_t i = 0; i < 4; ++i) {
    RandomInput input;
    KvStoreConfig config = coded_config(&input, i < 2 ? 256 : i == 2 ? 128 : 64);
    config.coded.fixed_blocks = true;
    config.coded.fixed_format = token_wise_tier(i % 2 == 0 ? 8 : 4, 4);
    config.policy.sink_tokens = input.uniform(0, 80);
    config.policy.alpha_high = input.real(0.5f, 20);
    if (i > 0) give_family(&config, 1 + i);
    live(config, &input, 60);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Coded, fixed-rate and raw tokens in each row, and a cut through a fixed-rate block.
TEST(GpuCodedStore, ARowOfThreeKinds) {
  RandomInput input;
  KvStoreConfig config = coded_config(&input, 128);
  config.coded.fixed_blocks = true;
  config.policy.sink_tokens = 1;
  CodedTwins twins(config, &input);
  SequenceId ids[2];
  ASSERT_TRUE(twins.add(&ids[0]));
  ASSERT_TRUE(twins.add(&ids[1]));
  ASSERT_TRUE(twins.prompt({ids, 2}, 350));
  ASSERT_TRUE(twins.score({ids, 2}, 0, 350));
  ASSERT_TRUE(twins.end_prompt({ids, 2}));
  ASSERT_EQ(twins.difference(), "");
  ASSERT_EQ(twins.stats_difference(), "");
  const StoreStats stats = *twins.host().stats();
  for (const Tier tier : {Tier::kWindow, Tier::kHigh, Tier::kLow}) {
    EXPECT_GT(stats.tokens[static_cast<int32_t>(tier)], 0);
  }
  ASSERT_EQ(twins.attention_difference({ids, 2}), "");
  ASSERT_TRUE(twins.truncate(ids[1], 40));
  ASSERT_EQ(twins.attention_difference({ids, 2}), "");
  for (int32_t i = 0; i < 12; ++i) ASSERT_TRUE(twins.step({ids, 2}, 6));
  ASSERT_EQ(twins.difference(), "");
  ASSERT_EQ(twins.attention_difference({ids, 2}), "");
}

}  // namespace
}  // namespace tierkv::testing
