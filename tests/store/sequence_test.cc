// Lives of sequences, one property each.
#include <gtest/gtest.h>

#include "tests/store/support/modelled_store.h"

namespace tierkv::testing {
namespace {

KvStoreConfig with_head_dim(int32_t head_dim) {
  KvStoreConfig c = small_config();
  c.layout.head_dim = head_dim;
  c.page_bytes = 0;
  c.num_pages = 200;
  c.max_tokens = 400;
  return c;
}

class StoreHeadDims : public ::testing::TestWithParam<int32_t> {};

TEST_P(StoreHeadDims, FollowTheModel) {
  RandomInput input;
  ModelledStore world(with_head_dim(GetParam()), &input);
  ModelSequence s;
  ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.prompt({&s}, 300, true));
  EXPECT_EQ(world.difference(s, true), "");
  ASSERT_TRUE(world.end_prompt({&s}));
  EXPECT_EQ(world.difference(s, true), "");
  for (int32_t i = 0; i < 40; ++i) ASSERT_TRUE(world.step({&s}, 1 + i % 3, true));
  EXPECT_EQ(world.difference(s, true), "");
}
INSTANTIATE_TEST_SUITE_P(All, StoreHeadDims, ::testing::Values(64, 96, 128, 256));

// The bytes that two sequences export are equal when they hold the same.
std::vector<uint8_t> exported(ModelledStore* world, const ModelSequence& s) {
  const auto bytes = world->store().export_sequence(s.id);
  EXPECT_TRUE(bytes.is_ok()) << bytes.status().message();
  return bytes ? *bytes : std::vector<uint8_t>();
}

TEST(StorePrompt, InChunksIsThePromptAsAWhole) {
  RandomInput input;
  const KvStoreConfig c = small_config();
  const auto store = make_store(c);
  const CallValues values(&input, c.layout, 1, 90);
  const std::vector<float> scores = input.scores(2 * 90, 60);
  std::vector<std::vector<uint8_t>> exports;
  const int64_t token_bytes = 2 * 64 * 2;
  for (const std::vector<int32_t>& chunks : {std::vector<int32_t>{90}, {1, 16, 33, 40}, {64, 26}}) {
    const SequenceId id = *store->add_sequence();
    int32_t done = 0;
    for (const int32_t n : chunks) {
      ASSERT_TRUE(store->begin_prompt({&id, 1}, n));
      for (int32_t layer = 0; layer < 2; ++layer) {
        const auto* k = static_cast<const uint8_t*>(values.k()) + done * token_bytes;
        const auto* v = static_cast<const uint8_t*>(values.v()) + done * token_bytes;
        ASSERT_TRUE(store->append({{&id, 1}, layer, n, k, v}));
      }
      done += n;
    }
    for (int32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(store->score_prompt({{&id, 1}, layer, scores.data(), 90}));
    }
    ASSERT_TRUE(store->end_prompt({&id, 1}));
    exports.push_back(*store->export_sequence(id));
    ASSERT_TRUE(store->release(id));
  }
  EXPECT_TRUE(exports[0] == exports[1]);
  EXPECT_TRUE(exports[0] == exports[2]);
}

TEST(StorePrompt, EndsForARaggedBatchAtOnce) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence s[4];
  const int32_t lengths[4] = {0, 1, 8, 77};
  for (int32_t i = 0; i < 4; ++i) {
    ASSERT_TRUE(world.add(&s[i]));
    if (lengths[i] == 0) continue;
    ASSERT_TRUE(world.prompt({&s[i]}, lengths[i], true));
  }
  ASSERT_TRUE(world.end_prompt({&s[0], &s[1], &s[2], &s[3]}));
  for (int32_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(world.step({&s[3], &s[0], &s[2], &s[1]}, 1 + i % 2, true));
    for (const ModelSequence& one : s) ASSERT_EQ(world.difference(one, true), "");
  }
}

TEST(StorePrompt, ReturnsTheSurplus) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence s;
  ASSERT_TRUE(world.add(&s));
  ASSERT_TRUE(world.prompt({&s}, 120, true));
  ASSERT_TRUE(world.end_prompt({&s}));
  int32_t needed = 0;
  for (int32_t r = 0; r < world.rows(); ++r) {
    const SideCounts tokens = world.view().allocator.tokens[s.id.slot * world.rows() + r];
    needed += static_cast<int32_t>(total(pages_of(world.view(), tokens)));
  }
  const StoreStats stats = *world.store().stats();
  EXPECT_EQ(stats.pages - stats.pages_free, needed);
}

// A sequence with full pages in both tiers.
ModelSequence grown(ModelledStore* world, int32_t tokens) {
  ModelSequence s;
  EXPECT_TRUE(world->add(&s));
  EXPECT_TRUE(world->prompt({&s}, tokens, true));
  EXPECT_TRUE(world->end_prompt({&s}));
  return s;
}

TEST(StoreFork, SharesFullPagesAndNothingElse) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  const ModelSequence source = grown(&world, 120);
  const int32_t before = world.store().stats()->pages_free;
  ModelSequence copy;
  ASSERT_TRUE(world.fork(source, &copy));
  EXPECT_TRUE(exported(&world, source) == exported(&world, copy));
  const StoreView& v = world.view();
  int32_t full = 0, own = 0;
  for (int32_t r = 0; r < world.rows(); ++r) {
    const SideCounts tokens = v.allocator.tokens[source.id.slot * world.rows() + r];
    for (const int32_t side : {kHighSide, kLowSide}) {
      full += tokens.of[side] / v.page_tokens(side);
      own += tokens.of[side] % v.page_tokens(side) != 0;
    }
    own += pages_of(v, tokens).of[kWindowSide];
  }
  const StoreStats stats = *world.store().stats();
  EXPECT_GT(full, 0);
  EXPECT_EQ(stats.pages_shared, full);
  EXPECT_EQ(before - stats.pages_free, own);
}

TEST(StoreFork, SharedPagesStayAsTheyAreUntilOneOwnerIsLeft) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence source = grown(&world, 100), copy;
  ASSERT_TRUE(world.fork(source, &copy));
  std::vector<std::pair<int32_t, std::vector<uint8_t>>> shared;
  const StoreView& v = world.view();
  for (int32_t page = 0; page < v.pages.num_pages; ++page) {
    if (!is_frozen(v.allocator, page)) continue;
    const uint8_t* bytes = v.page_bytes(page);
    shared.push_back({page, {bytes, bytes + v.pages.page_bytes}});
  }
  ASSERT_FALSE(shared.empty());
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&copy, &source}, 1, true));
  for (const auto& [page, bytes] : shared) {
    EXPECT_EQ(std::memcmp(v.page_bytes(page), bytes.data(), bytes.size()), 0) << "page " << page;
  }
  ASSERT_TRUE(world.store().release(copy.id));
  EXPECT_EQ(world.store().stats()->pages_shared, 0);
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&source}, 1, true));
  EXPECT_EQ(world.difference(source, true), "");
}

TEST(StoreTruncate, ReplacesSharedPagesThatLoseTokens) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence source = grown(&world, 110), copy;
  ASSERT_TRUE(world.fork(source, &copy));
  const std::vector<uint8_t> before = exported(&world, source);
  ASSERT_TRUE(world.truncate(&copy, 30));
  EXPECT_EQ(world.difference(copy, true), "");
  EXPECT_TRUE(exported(&world, source) == before);
  for (int32_t i = 0; i < 30; ++i) ASSERT_TRUE(world.step({&copy}, 1, true));
  EXPECT_EQ(world.difference(copy, true), "");
}

TEST(StoreTruncate, OfAStepGivesTheWindowThatWasThere) {
  // Rejected speculative tokens: what was demoted stays demoted, the window refills.
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence s = grown(&world, 60);
  ASSERT_TRUE(world.step({&s}, 8, true));
  ASSERT_TRUE(world.truncate(&s, 61));
  EXPECT_EQ(world.view().allocator.tokens[s.id.slot * world.rows()].of[kWindowSide], 1);
  for (int32_t i = 0; i < 12; ++i) {
    ASSERT_TRUE(world.step({&s}, 1, true));
    ASSERT_EQ(world.difference(s, true), "");
  }
}

TEST(StoreTruncate, ToNothingLeavesAnEmptySequence) {
  RandomInput input;
  ModelledStore world(small_config(), &input);
  ModelSequence s = grown(&world, 60);
  ASSERT_TRUE(world.truncate(&s, 0));
  EXPECT_EQ(world.store().stats()->pages_free, world.config().num_pages);
  EXPECT_EQ(*world.store().num_tokens(s.id), 0);
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(world.step({&s}, 1, true));
  EXPECT_EQ(world.difference(s, true), "");
}

}  // namespace
}  // namespace tierkv::testing
