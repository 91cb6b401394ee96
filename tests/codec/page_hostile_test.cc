// SPDX-License-Identifier: Apache-2.0
#include "codec/host/page_codec.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/page_fixture.h"

namespace tierkv {
namespace {

class PageHostileTest : public PageFixture {};

TEST_F(PageHostileTest, RefusesWhatIsOutsideThePage) {
  const PageLayout layout = layout_of(token_wise_tier(8, 4), 64, 32);
  const RandomTokens tokens = random_tokens(32, 64);
  const PoisonedPage p(layout, DType::kFloat16);
  const auto before = p.storage();
  const auto append = [&](int32_t used, const TokenBatch& b) {
    return append_tokens(p.page(), used, b).code();
  };
  constexpr StatusCode kBad = StatusCode::kInvalidArgument;
  EXPECT_EQ(append(-1, tokens.batch(0, 1)), kBad);
  EXPECT_EQ(append(32, tokens.batch(0, 1)), kBad);
  EXPECT_EQ(append(1, tokens.batch(0, 32)), kBad);
  EXPECT_EQ(append(2147483647, tokens.batch(0, 2147483647)), kBad);
  EXPECT_EQ(append(0, tokens.batch(0, -1)), kBad);
  TokenBatch b = tokens.batch(0, 1);
  b.scores = nullptr;
  EXPECT_EQ(append(0, b), kBad);
  b = tokens.batch(0, 1);
  b.row_stride = 63;
  EXPECT_EQ(append(0, b), kBad);
  b = tokens.batch(0, 1);
  const int32_t negative = -1;
  b.rows = &negative;
  EXPECT_EQ(append(0, b), kBad);
  b = tokens.batch(0, 1);
  b.positions = &negative;
  EXPECT_EQ(append(0, b), kBad);
  b = tokens.batch(0, 1);
  const float nan = NAN;
  b.scores = &nan;
  EXPECT_EQ(append(0, b), StatusCode::kNonFinite);
  b = tokens.batch(0, 1);
  b.dtype = static_cast<DType>(9);
  EXPECT_EQ(append(0, b), kBad);

  EXPECT_EQ(decode_tokens(p.page(), 32, {.count = 1}).code(), kBad);
  EXPECT_EQ(decode_tokens(p.page(), 0, {.count = 33}).code(), kBad);
  EXPECT_EQ(decode_tokens(p.page(), 0, {.count = 1, .dtype = static_cast<DType>(-1)}).code(), kBad);
  EXPECT_EQ(clear_token(p.page(), -1).code(), kBad);
  EXPECT_EQ(p.storage(), before);
}

TEST_F(PageHostileTest, RefusesForgedLayoutsAndViews) {
  const PageLayout layout = layout_of(token_wise_tier(8, 4), 64, 16);
  const PoisonedPage p(layout, DType::kFloat16);
  const RandomTokens tokens = random_tokens(1, 64);
  const auto refused = [&](const HostPage& page) {
    return append_tokens(page, 0, tokens.batch(0, 1)).code() == StatusCode::kInvalidArgument;
  };
  HostPage forged = p.page();
  forged.bytes = nullptr;
  EXPECT_TRUE(refused(forged));
  forged = p.page();
  forged.raw_dtype = DType::kFloat32;
  EXPECT_TRUE(refused(forged));
  for (int32_t PageLayout::*field :
       {&PageLayout::k_groups, &PageLayout::v_groups, &PageLayout::tokens, &PageLayout::k_codes,
        &PageLayout::k_metadata, &PageLayout::v_codes, &PageLayout::v_metadata, &PageLayout::scores,
        &PageLayout::positions, &PageLayout::used_bytes}) {
    for (const int32_t value : {-1, 1 << 30, 2147483647, -2147483647 - 1, 3}) {
      forged = p.page();
      forged.layout.*field = value;
      EXPECT_TRUE(refused(forged));
    }
  }
  for (const int32_t value : {0, -64, 80, 512, 1 << 30}) {
    forged = p.page();
    forged.layout.k_tile.head_dim = value;
    EXPECT_TRUE(refused(forged));
    forged = p.page();
    forged.layout.v_tile.type = CodeType(value);
    EXPECT_TRUE(refused(forged));
  }
  for (const int32_t bits : {1, 3, 16, 255}) {
    forged = p.page();
    forged.layout.k_tile.type = CodeType::uniform(bits);
    EXPECT_TRUE(refused(forged)) << bits;
  }
}

}  // namespace
}  // namespace tierkv
