// Fixed-rate blocks in a coded store: which blocks become one, and the calls that meet them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "store/coded/coded_bytes.h"
#include "store/coded/coded_fixed.h"
#include "store/coded/coded_values.h"
#include "tests/store/support/coded_world.h"

namespace tierkv::testing {
namespace {

class FixedBlocks : public ::testing::Test {
 protected:
  KvStoreConfig fixed_config() {
    KvStoreConfig c = small_coded_config(&input_);
    c.coded.fixed_blocks = true;
    return c;
  }
  // Which of the first blocks of row 0 are at a fixed rate.
  static std::vector<bool> kinds(const CodedHostStore& store, SequenceId id, int32_t blocks) {
    std::vector<bool> kinds;
    for (int32_t b = 0; b < blocks; ++b) {
      kinds.push_back(is_fixed_block(store.view(), store.view().row_of(id.slot, 0, 0), b));
    }
    return kinds;
  }

  RandomInput input_;
};

TEST_F(FixedBlocks, SinksAndSignificantTokensDecide) {
  KvStoreConfig config = fixed_config();
  config.policy.sink_tokens = 65;  // the last one begins a block
  config.policy.alpha_high = 4;
  CodedWorld world(config, &input_);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 336));
  // Token 200 is as significant as it must be, token 319 of the next block but one a little less.
  std::vector<float> scores(2 * 336);
  scores[200] = std::nextafter(4.0f / 201, 1.0f);
  scores[319] = std::nextafter(4.0f / 320, 0.0f);
  m.scores.assign(4, std::vector<float>(336));
  std::copy_n(scores.begin(), 336, m.scores[0].begin());
  for (int32_t layer = 0; layer < 2; ++layer) {
    if (layer == 1) scores.assign(scores.size(), 0.0f);
    ASSERT_TRUE(world.store().score_prompt({{&m.id, 1}, layer, scores.data(), 336}));
  }
  ASSERT_TRUE(world.end_prompt({&m}));
  EXPECT_EQ(kinds(world.store(), m.id, 5), (std::vector<bool>{true, true, false, true, false}));
  EXPECT_EQ(world.difference(m), "");
  EXPECT_EQ(world.attention_difference(m, 0), "");
  // Rows differ: row 0 has a block more than the other three.
  const StoreStats stats = *world.store().stats();
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kHigh)], (3 + 3 * 2) * 64);
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kLow)], (2 + 3 * 3) * 64);
  EXPECT_EQ(stats.tokens[static_cast<int32_t>(Tier::kWindow)], 4 * 16);
  EXPECT_EQ(broken_law(world.view()), "");
}

TEST_F(FixedBlocks, ScoresAreChecked) {
  KvStoreConfig config = fixed_config();
  CodedWorld world(config, &input_);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 100));
  std::vector<float> scores(200);
  const PromptScores call = {{&m.id, 1}, 1, scores.data(), 100};
  EXPECT_TRUE(world.store().score_prompt(call));
  scores[150] = NAN;
  EXPECT_EQ(world.store().score_prompt(call).code(), StatusCode::kNonFinite);
  scores[150] = -1;
  EXPECT_EQ(world.store().score_prompt(call).code(), StatusCode::kInvalidArgument);
  scores[150] = 0;
  EXPECT_EQ(world.store().score_prompt({{&m.id, 1}, 1, scores.data(), 99}).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(world.store().update_scores({}).code(), StatusCode::kUnsupported);
  ASSERT_TRUE(world.end_prompt({&m}));
  EXPECT_EQ(world.store().score_prompt(call).code(), StatusCode::kInvalidArgument);
}

// A page that was used before holds other scores: tokens that nobody scored have none.
TEST_F(FixedBlocks, UnscoredTokensHaveNoSignificance) {
  KvStoreConfig config = fixed_config();
  config.num_pages = 16;
  config.policy.alpha_high = 1;
  CodedWorld world(config, &input_);
  for (const bool scored : {true, false}) {
    CodedModel m;
    ASSERT_TRUE(world.add(&m));
    ASSERT_TRUE(world.store().begin_prompt({&m.id, 1}, 160));
    std::vector<uint16_t> x(160 * 128, float_to_half(0.5f));
    const std::vector<float> scores(320, 1.0f);
    for (int32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(world.store().append({{&m.id, 1}, layer, 160, x.data(), x.data()}));
      ASSERT_TRUE(!scored || world.store().score_prompt({{&m.id, 1}, layer, scores.data(), 160}));
    }
    ASSERT_TRUE(world.store().end_prompt({&m.id, 1}));
    EXPECT_EQ(kinds(world.store(), m.id, 2), (std::vector<bool>{scored, scored}));
    ASSERT_TRUE(world.store().release(m.id));
  }
}

// A min-max code can read as more than its block's largest value, and that has no code of the step:
// the block that is cut becomes raw values which a step can code.
TEST_F(FixedBlocks, ACutBlockCanBeCoded) {
  KvStoreConfig config = fixed_config();
  config.policy.sink_tokens = 1;
  config.coded.means = MeanSource::kNone;
  config.coded.key_steps.assign(4, 1.0f);
  config.coded.value_steps.assign(4, 1.0f);
  auto store = std::move(*CodedHostStore::make(config));
  const SequenceId id = *store->add_sequence();
  ASSERT_TRUE(store->begin_prompt({&id, 1}, 90));
  std::vector<uint16_t> x(90 * 128);
  for (uint16_t& value : x) value = float_to_half(input_.chance(0.5) ? 32752.0f : -32768.0f);
  for (int32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(store->append({{&id, 1}, layer, 90, x.data(), x.data()}));
  }
  ASSERT_TRUE(store->end_prompt({&id, 1}));
  ASSERT_TRUE(store->truncate(id, 40));
  const SequenceInfo& info = store->view().infos[id.slot];
  std::vector<uint16_t> raw(64);
  for (int32_t p = 0; p < 40; ++p) {
    get_raw_token(store->view(), store->view().row_of(id.slot, 1, 1), info, Component::kKey, p,
                  raw.data());
    for (const uint16_t y : raw) ASSERT_EQ(check_centred(y, 1.0f), StatusCode::kOk);
  }
  x.resize(128);
  for (int32_t i = 0; i < 60; ++i) {
    ASSERT_TRUE(store->begin_step({&id, 1}, 1));
    for (int32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(store->append({{&id, 1}, layer, 1, x.data(), x.data()}));
    }
  }
  EXPECT_EQ(store->view().infos[id.slot].window_first, 64);
}

// Checksums that agree do not make a block whose kinds contradict each other one to import.
TEST_F(FixedBlocks, KeysAndValuesAreOfOneKind) {
  KvStoreConfig config = fixed_config();
  config.policy.sink_tokens = 1;
  CodedWorld world(config, &input_);
  CodedModel m;
  ASSERT_TRUE(world.add(&m));
  ASSERT_TRUE(world.prompt({&m}, 220));
  const std::vector<float> none(440);  // so that block 0 alone is at a fixed rate
  for (int32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(world.store().score_prompt({{&m.id, 1}, layer, none.data(), 220}));
  }
  ASSERT_TRUE(world.end_prompt({&m}));
  const std::vector<uint8_t> bytes = *world.store().export_sequence(m.id);
  CodedSequenceContent content = *split_coded_sequence(config, bytes.data(), bytes.size());
  const auto code_of = [&] {
    std::vector<uint8_t> out = export_coded_header(config, content.books, content.info);
    for (int32_t w = 0; w < 4; ++w) export_coded_row(content.rows[w], &out);
    return world.store().import_sequence(out.data(), out.size()).status().code();
  };
  EXPECT_EQ(code_of(), StatusCode::kOk);
  const auto rows = content.rows;
  std::swap(content.rows[2].blocks[1][0], content.rows[2].blocks[1][1]);
  EXPECT_EQ(code_of(), StatusCode::kCorrupt);
  content.rows = rows;
  std::swap(content.rows[2].blocks[0][0], content.rows[2].blocks[1][0]);
  EXPECT_EQ(code_of(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace tierkv::testing
