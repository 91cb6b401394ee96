// SPDX-License-Identifier: Apache-2.0
#include "codec/host/page_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "tests/support/page_fixture.h"

namespace tierkv {
namespace {

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
constexpr int32_t kBits[] = {16, 8, 4, 2};

class PageMovesTest : public PageFixture {};

TEST_F(PageMovesTest, OverwritingATokenKeepsItsNeighbours) {
  for (int trial = 0; trial < 40; ++trial) {
    const int32_t head_dim = kHeadDims[uniform(0, 3)];
    const TierFormat format = token_wise_tier(kBits[uniform(0, 3)], kBits[uniform(0, 3)]);
    RandomTokens tokens = random_tokens(33, head_dim);
    const PoisonedPage p(layout_of(format, head_dim, 48), DType::kFloat16);
    ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, 32)));
    const int32_t slot = uniform(0, 31);
    ASSERT_TRUE(overwrite_token(p.page(), slot, tokens.batch(32, 1)));
    for (auto* x : {&tokens.k, &tokens.v}) {
      std::copy_n(x->begin() + 32 * head_dim, head_dim, x->begin() + slot * head_dim);
    }
    tokens.scores[slot] = tokens.scores[32];
    tokens.positions[slot] = tokens.positions[32];
    expect_tokens(p.page(), format, tokens, 32);
    if (HasFatalFailure()) return;
  }
}

// DiffKV's downgrade: the low codes come from the values the high codes stand for, not from the
// original.
TEST_F(PageMovesTest, MovingToAnotherFormatQuantisesTheDequantisedValues) {
  for (int trial = 0; trial < 60; ++trial) {
    const int32_t head_dim = kHeadDims[uniform(0, 3)];
    TierFormat high = token_wise_tier(kBits[uniform(0, 3)], kBits[uniform(0, 3)]);
    TierFormat low = token_wise_tier(kBits[uniform(0, 3)], kBits[uniform(0, 3)]);
    for (ComponentFormat* f : {&high.k, &high.v, &low.k, &low.v}) {
      if (f->type == kCodes2 && uniform(0, 1)) *f = norm_clipped();
    }
    const RandomTokens tokens = random_tokens(20, head_dim);
    const PoisonedPage a(layout_of(high, head_dim, 32), DType::kFloat16, high);
    const PoisonedPage b(layout_of(low, head_dim, 32), DType::kFloat16, low);
    ASSERT_TRUE(append_tokens(a.page(), 0, tokens.batch(0, 20)));
    ASSERT_TRUE(append_tokens(b.page(), 0, tokens.batch(0, 9)));
    const int32_t from = uniform(0, 19);
    const auto source = defined_bytes(a.page(), 20);
    ASSERT_TRUE(move_token(a.page(), from, b.page(), 9));
    EXPECT_EQ(defined_bytes(a.page(), 20), source);
    const Decoded d = decode_all(a.page(), 20), e = decode_all(b.page(), 10);
    const ComponentFormat* formats[2] = {&low.k, &low.v};
    for (int c = 0; c < 2; ++c) {
      const auto& was = c == 0 ? d.k : d.v;
      const auto& is = c == 0 ? e.k : e.v;
      const bool same = c == 0 ? high.k == low.k : high.v == low.v;
      const float* x = was.data() + from * head_dim;
      const auto want = same ? std::vector<float>(x, x + head_dim)
                             : expected_values(*formats[c], head_dim, DType::kFloat16, x);
      for (int32_t i = 0; i < head_dim; ++i) ASSERT_EQ(is[9 * head_dim + i], want[i]);
    }
    EXPECT_EQ(e.scores[9], tokens.scores[from]);
    EXPECT_EQ(e.positions[9], tokens.positions[from]);
  }
}

// Codes that do not reach both ends of their range, as a second quantisation would make them do.
TEST_F(PageMovesTest, MovingWithinAFormatCopiesBits) {
  const PageLayout layout = layout_of(token_wise_tier(8, 2), 128, 16);
  const RandomTokens tokens = random_tokens(16, 128);
  const PoisonedPage a(layout, DType::kFloat16), b(layout, DType::kFloat16);
  ASSERT_TRUE(append_tokens(a.page(), 0, tokens.batch(0, 16)));
  TokenCodes odd;
  load_token(a.page(), 5, &odd);
  for (int32_t d = 0; d < 128; ++d) {
    odd.k.codes[d] = static_cast<uint16_t>(uniform(100, 140));
    odd.v.codes[d] = static_cast<uint16_t>(uniform(1, 2));
  }
  store_token(a.page(), 5, odd);
  const auto before = defined_bytes(a.page(), 16);
  ASSERT_TRUE(move_token(a.page(), 5, a.page(), 5));  // in place
  EXPECT_EQ(defined_bytes(a.page(), 16), before);
  ASSERT_TRUE(open_slot(b.page(), 0));
  ASSERT_TRUE(move_token(a.page(), 5, b.page(), 0));
  TokenCodes moved;
  load_token(b.page(), 0, &moved);
  for (int32_t d = 0; d < 128; ++d) {
    ASSERT_EQ(moved.k.codes[d], odd.k.codes[d]);
    ASSERT_EQ(moved.v.codes[d], odd.v.codes[d]);
  }
  EXPECT_EQ(moved.k.params[0], odd.k.params[0]);
}

// A row's tier of three pages, tokens removed at random: what is left is what a plain list keeps,
// and the bytes are those of a tier that was written in that order from the start.
TEST_F(PageMovesTest, RemovalFillsTheHoleWithTheLastToken) {
  const TierFormat format = token_wise_tier(4, 2);
  const PageLayout layout = layout_of(format, 64, 16);
  const RandomTokens tokens = random_tokens(48, 64);
  std::vector<std::unique_ptr<PoisonedPage>> pages;
  std::vector<int32_t> order;
  for (int32_t i = 0; i < 3; ++i) {
    pages.push_back(std::make_unique<PoisonedPage>(layout, DType::kFloat16));
    ASSERT_TRUE(append_tokens(pages[i]->page(), 0, tokens.batch(16 * i, 16)));
  }
  for (int32_t i = 0; i < 48; ++i) order.push_back(i);
  while (!order.empty()) {
    const int32_t last = static_cast<int32_t>(order.size()) - 1, hole = uniform(0, last);
    ASSERT_TRUE(
        remove_token(pages[hole / 16]->page(), hole % 16, pages[last / 16]->page(), last % 16));
    order[hole] = order[last];
    order.pop_back();
    for (int32_t i = 0; i < 3; ++i) {
      const int32_t used = std::clamp<int32_t>(static_cast<int32_t>(order.size()) - 16 * i, 0, 16);
      const PoisonedPage fresh(layout, DType::kFloat16);
      if (used > 0) {
        TokenBatch b = tokens.batch(0, used);
        b.rows = order.data() + 16 * i;
        ASSERT_TRUE(append_tokens(fresh.page(), 0, b));
      }
      ASSERT_EQ(defined_bytes(pages[i]->page(), used), defined_bytes(fresh.page(), used));
    }
  }
}

TEST_F(PageMovesTest, RecordNamesTheLeastScoreAndThenTheLowestPosition) {
  const PageLayout layout = layout_of(token_wise_tier(8, 4), 64, 32);
  RandomTokens tokens = random_tokens(24, 64);
  for (int32_t i = 0; i < 24; ++i) {
    tokens.scores[i] = static_cast<float>(uniform(1, 4));
    tokens.positions[i] = (i * 7) % 24;  // distinct, out of order
  }
  const PoisonedPage p(layout, DType::kFloat16);
  ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, 24)));
  const PageRecord before{3, 0, 0, 0};
  const auto r = scan_page_record(p.page(), 24, 4, 20, before);
  ASSERT_TRUE(r);
  int32_t want = -1;
  for (int32_t position = 4; position < 20; ++position) {
    const auto slot =
        static_cast<int32_t>(std::find(tokens.positions.begin(), tokens.positions.end(), position) -
                             tokens.positions.begin());
    if (want < 0 || tokens.scores[slot] < tokens.scores[want]) want = slot;
  }
  EXPECT_EQ(r->min_slot, want);
  EXPECT_EQ(r->min_score, tokens.scores[want]);
  EXPECT_EQ(r->min_position, tokens.positions[want]);
  EXPECT_EQ(r->reference_count, 3);
  const auto none = scan_page_record(p.page(), 24, 24, 100, before);
  ASSERT_TRUE(none);
  EXPECT_EQ(none->min_slot, kNoSlot);
  EXPECT_EQ(none->min_score, std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace tierkv
