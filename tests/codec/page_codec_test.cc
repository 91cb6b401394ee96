// SPDX-License-Identifier: Apache-2.0
#include "codec/host/page_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tests/support/page_fixture.h"

namespace tierkv {
namespace {

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
constexpr int32_t kBits[] = {16, 8, 4, 2};

class PageCodecTest : public PageFixture {};

TEST_F(PageCodecTest, RoundTripsEveryFormatAndCount) {
  for (int32_t head_dim : kHeadDims) {
    for (int32_t kb : kBits) {
      for (int32_t vb : kBits) {
        for (int32_t count : {1, 15, 16, 17, 32}) {
          SCOPED_TRACE(testing::Message()
                       << "d " << head_dim << " k" << kb << "v" << vb << " n " << count);
          const TierFormat format = token_wise_tier(kb, vb);
          const DType dtype =
              std::array{DType::kFloat16, DType::kBFloat16, DType::kFloat32}[uniform(0, 2)];
          const DType raw = dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
          const RandomTokens tokens = random_tokens(count, head_dim, dtype);
          const PoisonedPage p(layout_of(format, head_dim, 32), raw);
          ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, count)));
          expect_tokens(p.page(), format, tokens, count);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// The same bytes but for the records, from batches without scores and positions; what lies behind
// the page stays.
TEST_F(PageCodecTest, PagesWithoutRecordsHoldTheSameCodes) {
  for (int32_t head_dim : kHeadDims) {
    for (int32_t kb : kBits) {
      for (int32_t vb : kBits) {
        const TierFormat format = token_wise_tier(kb, vb);
        SCOPED_TRACE(to_string(format));
        const int32_t count = uniform(1, 48), first = uniform(0, count);
        const RandomTokens tokens = random_tokens(count, head_dim);
        const PoisonedPage with(layout_of(format, head_dim, 48), DType::kFloat16);
        const PoisonedPage without(layout_of(format, head_dim, 48, false), DType::kFloat16);
        ASSERT_TRUE(append_tokens(with.page(), 0, tokens.batch(0, count)));
        TokenBatch head = tokens.batch(0, first), tail = tokens.batch(first, count - first);
        head.scores = tail.scores = nullptr;
        head.positions = tail.positions = nullptr;
        ASSERT_TRUE(append_tokens(without.page(), 0, head));
        ASSERT_TRUE(reference::append_tokens(without.page(), first, tail));
        const std::vector<uint8_t> bytes = defined_bytes(without.page(), count);
        std::vector<uint8_t> expected = defined_bytes(with.page(), count);
        ASSERT_EQ(expected.size() - bytes.size(), (count + 15) / 16 * 128u);
        expected.resize(bytes.size());
        EXPECT_EQ(bytes, expected);
        ASSERT_TRUE(clear_token(without.page(), 0));
        const uint8_t* end = without.page().bytes + without.page().layout.used_bytes;
        for (const uint8_t* p = end; p < without.storage().data() + without.storage().size(); ++p) {
          ASSERT_EQ(*p, 0xa5) << p - end << " bytes behind the page";
        }
      }
    }
  }
}

TEST_F(PageCodecTest, PagesWithoutRecordsRefuseTheirScores) {
  const PoisonedPage p(layout_of(token_wise_tier(8, 4), 64, 16, false), DType::kFloat16);
  ASSERT_TRUE(append_tokens(p.page(), 0, random_tokens(3, 64).batch(0, 3)));
  float scores[3];
  int32_t positions[3];
  TokenOutput out;
  out.count = 3;
  EXPECT_TRUE(decode_tokens(p.page(), 0, out));
  out.scores = scores;
  EXPECT_EQ(decode_tokens(p.page(), 0, out).code(), StatusCode::kInvalidArgument);
  out.scores = nullptr;
  out.positions = positions;
  EXPECT_EQ(reference::decode_tokens(p.page(), 0, out).code(), StatusCode::kInvalidArgument);
}

TEST_F(PageCodecTest, RoundTripsSubGroups) {
  for (int32_t head_dim : kHeadDims) {
    for (int32_t k_group : {16, 32, head_dim / 2}) {
      for (int32_t v_group : {16, 32, head_dim / 2, 0}) {
        const TierFormat format{token_wise(kBits[uniform(1, 3)], k_group),
                                token_wise(kBits[uniform(1, 3)], v_group)};
        SCOPED_TRACE(to_string(format));
        const RandomTokens tokens = random_tokens(23, head_dim);
        const PoisonedPage p(layout_of(format, head_dim, 48), DType::kFloat16);
        ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, 23)));
        expect_tokens(p.page(), format, tokens, 23);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// One word of each width written out by hand from the table in docs/reference/format.md: lane 4g +
// t with g = 1, t = 2.
TEST_F(PageCodecTest, WordsAreAsDocumented) {
  const auto value = [](int32_t token, int32_t dim, int32_t levels) {
    // Codes equal values: each token spans [0, levels - 1], so scale = 1 and zero point = 0.
    return dim == 0 ? 0 : dim == 8 ? levels - 1 : (token * 7 + dim * 3) % levels;
  };
  for (int32_t bits : {8, 4, 2}) {
    const PoisonedPage p(layout_of(token_wise_tier(bits, bits), 64, 16), DType::kFloat16);
    std::vector<float> x(16 * 64), scores(16, 0.5f);
    std::vector<int32_t> positions(16, 3);
    for (int32_t i = 0; i < 16 * 64; ++i) x[i] = value(i / 64, i % 64, 1 << bits);
    TokenBatch b;
    b.k = b.v = x.data();
    b.scores = scores.data();
    b.positions = positions.data();
    b.count = 16;
    b.dtype = DType::kFloat32;
    ASSERT_TRUE(append_tokens(p.page(), 0, b));
    const auto c = [&](int32_t token, int32_t dim) -> uint32_t {
      return value(token, dim, 1 << bits);
    };
    uint32_t k_want = 0, v_want = 0;
    int32_t byte = 0;
    if (bits == 8) {  // word 2f + token half, f = 1, upper half: word 3 of lane 6
      byte = 6 * 16 + 12;
      k_want = c(9, 20) | c(9, 28) << 8 | c(9, 21) << 16 | c(9, 29) << 24;
      v_want = c(12, 17) | c(12, 25) << 8 | c(13, 17) << 16 | c(13, 25) << 24;
    } else if (bits == 4) {  // word f = 3
      byte = 6 * 16 + 12;
      k_want = c(1, 52) | c(1, 60) << 4 | c(9, 52) << 8 | c(9, 60) << 12 | c(1, 53) << 16 |
               c(1, 61) << 20 | c(9, 53) << 24 | c(9, 61) << 28;
      v_want = c(4, 49) | c(4, 57) << 4 | c(12, 49) << 8 | c(12, 57) << 12 | c(5, 49) << 16 |
               c(5, 57) << 20 | c(13, 49) << 24 | c(13, 57) << 28;
    } else {  // word f / 2 = 1 holds dim blocks 2 and 3; two words a lane, 8 bytes an access
      byte = 6 * 8 + 4;
      const auto k_byte = [&](int32_t token, int32_t t) {
        return c(token, 32 + t) | c(token, 40 + t) << 2 | c(token, 48 + t) << 4 |
               c(token, 56 + t) << 6;
      };
      k_want = k_byte(1, 4) | k_byte(9, 4) << 8 | k_byte(1, 5) << 16 | k_byte(9, 5) << 24;
      v_want = k_byte(4, 1) | k_byte(12, 1) << 8 | k_byte(5, 1) << 16 | k_byte(13, 1) << 24;
    }
    uint32_t k_got, v_got;
    memcpy(&k_got, p.page().bytes + p.page().layout.k_codes + byte, 4);
    memcpy(&v_got, p.page().bytes + p.page().layout.v_codes + byte, 4);
    EXPECT_EQ(k_got, k_want) << bits << " bits";
    EXPECT_EQ(v_got, v_want) << bits << " bits";
    uint16_t metadata[2];
    memcpy(metadata, p.page().bytes + p.page().layout.k_metadata + 3 * 8 + 4, 4);  // token 11
    EXPECT_EQ(metadata[0], 0x3c00);                                                // scale 1
    EXPECT_EQ(metadata[1], 0);                                                     // zero point 0
  }
}

TEST_F(PageCodecTest, UnusedSlotsAreDefinedAndNothingElseIsWritten) {
  const TierFormat format = token_wise_tier(4, 2);
  const PageLayout layout = layout_of(format, 96, 64);
  const RandomTokens tokens = random_tokens(19, 96);
  const PoisonedPage p(layout, DType::kFloat16, 0xa5), q(layout, DType::kFloat16, 0x5a);
  ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, 19)));
  ASSERT_TRUE(append_tokens(q.page(), 0, tokens.batch(0, 19)));
  EXPECT_EQ(defined_bytes(p.page(), 19), defined_bytes(q.page(), 19));
  for (int32_t slot = 19; slot < 32; ++slot) {
    TokenCodes token;
    load_token(p.page(), slot, &token);
    EXPECT_EQ(token.score, kNoScore);
    EXPECT_EQ(token.position, kNoPosition);
    EXPECT_EQ(token.k.params[0], (QuantParams{0, 0}));
    EXPECT_EQ(token.v.params[0], (QuantParams{0, 0}));
    for (int32_t d = 0; d < 96; ++d) ASSERT_EQ(token.k.codes[d] | token.v.codes[d], 0);
  }
  // Bytes that both pages left alone keep the poison; the others are the defined ones.
  const auto& a = p.storage();
  const HostPage& page = p.page();
  const int64_t offset = page.bytes - p.storage().data();
  int64_t written = 0;
  for (size_t i = 0; i < a.size(); ++i) written += a[i] != 0xa5;
  EXPECT_LE(written, static_cast<int64_t>(defined_bytes(page, 19).size()));
  for (int64_t i = 0; i < static_cast<int64_t>(a.size()); ++i) {
    const bool outside = i < offset || i >= offset + layout.used_bytes;
    ASSERT_TRUE(!outside || a[i] == 0xa5) << i - offset;
  }
}

TEST_F(PageCodecTest, AppendingInPiecesMakesTheSameBytes) {
  for (int trial = 0; trial < 20; ++trial) {
    const int32_t head_dim = kHeadDims[uniform(0, 3)];
    const TierFormat format = token_wise_tier(kBits[uniform(0, 3)], kBits[uniform(0, 3)]);
    const PageLayout layout = layout_of(format, head_dim, 64);
    const int32_t count = uniform(0, 64);
    const RandomTokens tokens = random_tokens(count, head_dim);
    const PoisonedPage whole(layout, DType::kFloat16), pieces(layout, DType::kFloat16, 0x33);
    ASSERT_TRUE(append_tokens(whole.page(), 0, tokens.batch(0, count)));
    for (int32_t used = 0; used < count;) {
      const int32_t n = uniform(1, count - used);
      ASSERT_TRUE(append_tokens(pieces.page(), used, tokens.batch(used, n)));
      used += n;
    }
    ASSERT_EQ(defined_bytes(whole.page(), count), defined_bytes(pieces.page(), count));
  }
}

TEST_F(PageCodecTest, RowsGatherAndScatter) {
  const TierFormat format = token_wise_tier(8, 4);
  const RandomTokens tokens = random_tokens(40, 64);
  const std::vector<int32_t> rows = {39, 0, 7, 21, 8};
  TokenBatch b = tokens.batch(0, 5);
  b.rows = rows.data();
  const PoisonedPage p(layout_of(format, 64, 16), DType::kFloat16);
  ASSERT_TRUE(append_tokens(p.page(), 0, b));
  std::vector<uint16_t> k(40 * 64, 0xeeee);
  std::vector<float> scores(40, -3);
  TokenOutput out;
  out.k = k.data();
  out.scores = scores.data();
  out.rows = rows.data();
  out.count = 5;
  out.dtype = DType::kFloat16;
  ASSERT_TRUE(decode_tokens(p.page(), 0, out));
  for (int32_t row = 0; row < 40; ++row) {
    const bool wanted = std::find(rows.begin(), rows.end(), row) != rows.end();
    EXPECT_EQ(scores[row], wanted ? tokens.scores[row] : -3);
    const auto x = expected_values(format.k, 64, DType::kFloat16, tokens.k.data() + row * 64);
    for (int32_t d = 0; d < 64; ++d) {
      ASSERT_EQ(k[row * 64 + d], wanted ? float_to_half(x[d]) : 0xeeee);
    }
  }
}

TEST_F(PageCodecTest, FailedAppendLeavesTheDefinedBytes) {
  for (const float bad : {NAN, INFINITY, 1e8f}) {
    for (const TierFormat& format : {token_wise_tier(8, 4), raw_tier(), token_wise_tier(16, 2)}) {
      const PageLayout layout = layout_of(format, 64, 64);
      RandomTokens tokens = random_tokens(60, 64, DType::kFloat32);
      const PoisonedPage p(layout, DType::kFloat16);
      ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, 20)));
      const auto before = defined_bytes(p.page(), 20);
      const int32_t at = uniform(20, 59);
      (at % 2 ? tokens.k : tokens.v)[at * 64 + uniform(0, 63)] = bad;
      const Status s = append_tokens(p.page(), 20, tokens.batch(20, 40));
      EXPECT_EQ(s.code(), bad == 1e8f ? StatusCode::kOutOfRange : StatusCode::kNonFinite);
      EXPECT_NE(s.message().find("token " + std::to_string(at - 20)), std::string::npos)
          << s.message();
      EXPECT_EQ(defined_bytes(p.page(), 20), before);
    }
  }
}

TEST_F(PageCodecTest, RawPagesKeepThePatternsOfTheirType) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    RandomTokens tokens = random_tokens(16, 64, dtype);
    tokens.half_k[5] = 0x8000;  // -0
    tokens.half_v[7] =
        dtype == DType::kFloat16 ? 0x0001 : 0x7f7f;  // smallest subnormal; largest bf16
    const PoisonedPage p(layout_of(raw_tier(), 64, 16), dtype);
    ASSERT_TRUE(append_tokens(p.page(), 0, tokens.batch(0, 16)));
    std::vector<uint16_t> k(16 * 64, 1), v(16 * 64, 1);
    TokenOutput out;
    out.k = k.data();
    out.v = v.data();
    out.count = 16;
    out.dtype = dtype;
    ASSERT_TRUE(decode_tokens(p.page(), 0, out));
    EXPECT_EQ(k, tokens.half_k);
    EXPECT_EQ(v, tokens.half_v);
  }
}

TEST_F(PageCodecTest, HalfOutputSaturatesWhereTheParametersOvershoot) {
  std::vector<float> x(64, -65504.0f);
  x[1] = 65504.0f;
  const float score = 0;
  const int32_t position = 0;
  TokenBatch b{x.data(), x.data(), &score, &position, nullptr, 0, 1, DType::kFloat32};
  const PoisonedPage p(layout_of(token_wise_tier(8, 8), 64, 16), DType::kFloat16);
  ASSERT_TRUE(append_tokens(p.page(), 0, b));
  // The scale 131008 / 255 rounds up to 514 in fp16, so the top code means 65566, beyond fp16.
  std::vector<float> wide(64, 0);
  TokenOutput out{wide.data(), nullptr, nullptr, nullptr, nullptr, 0, 1, DType::kFloat32};
  ASSERT_TRUE(decode_tokens(p.page(), 0, out));
  ASSERT_GT(wide[1], 65520.0f);
  std::vector<uint16_t> half(64, 0);
  out.k = half.data();
  out.dtype = DType::kFloat16;
  ASSERT_TRUE(decode_tokens(p.page(), 0, out));
  EXPECT_EQ(half[1], 0x7bff);
  EXPECT_EQ(half[0], 0xfbff);
}

}  // namespace
}  // namespace tierkv
