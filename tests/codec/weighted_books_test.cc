// SPDX-License-Identifier: Apache-2.0
// Families of books for coded blocks.
#include "codec/host/coded/weighted_books.h"

#include <gtest/gtest.h>

#include "tests/codec/support/weighted_source.h"

namespace tierkv {
namespace {

class WeightedBooksTest : public testing::Test {
 protected:
  WeightedBooksTest() : seed_(std::random_device{}()), rows_(seed_) {
    RecordProperty("seed", seed_);
  }

  // Codes whose spread differs from dim block to dim block: 0.4, 0.8, 1.6, 3.2 and again.
  std::vector<int16_t> codes(int32_t tokens, int32_t head_dim) {
    std::normal_distribution<double> normal;
    std::vector<int16_t> out;
    for (int32_t t = 0; t < tokens; ++t) {
      for (int32_t d = 0; d < head_dim; ++d) {
        const double spread = 0.4 * (1 << d / 16 % 4);
        out.push_back(static_cast<int16_t>(std::nearbyint(spread * normal(rows_.source.rng()))));
      }
    }
    return out;
  }
  int64_t bits(const std::vector<int16_t>& codes, int32_t head_dim, const BookChoice& choice,
               Component component) {
    const std::vector<int8_t> e(64, 0);
    std::vector<uint8_t> out;
    const auto tokens = static_cast<int32_t>(codes.size()) / head_dim;
    for (int32_t t = 0; t < tokens; t += 64) {
      const int32_t n = std::min(64, tokens - t);
      EXPECT_TRUE(encode_block({codes.data() + int64_t{t} * head_dim, e.data(), n, head_dim},
                               choice.family.books, choice.book_of.data(), &out));
    }
    EXPECT_EQ(choice.family.books.front().component, component);
    return static_cast<int64_t>(8 * out.size());
  }

  uint32_t seed_;
  WeightedSourceOfRows rows_;
};

TEST_F(WeightedBooksTest, AFamilySortsDimBlocksBySpread) {
  for (Component c : {Component::kKey, Component::kValue}) {
    const auto x = codes(512, 128);
    const BookChoice one = *choose_books(c, 128, {{x.data(), 512}}, {1, false, {}});
    const BookChoice four = *choose_books(c, 128, {{x.data(), 512}}, {4, false, {}});
    EXPECT_EQ(one.book_of, std::vector<uint8_t>(8, 0));
    EXPECT_EQ(four.book_of, (std::vector<uint8_t>{0, 1, 2, 3, 0, 1, 2, 3})) << "seed " << seed_;
    // Entropies of the mixture and of its four parts differ by 0.31 bits a code.
    EXPECT_LT(bits(x, 128, four, c), bits(x, 128, one, c) - 512 * 128 / 5) << "seed " << seed_;
  }
}

// The mean square counts, not the sum: the last dim block of these heads has one channel.
TEST_F(WeightedBooksTest, ANarrowDimBlockIsSortedByItsMean) {
  const auto x = codes(512, 17);
  const BookChoice two = *choose_books(Component::kKey, 17, {{x.data(), 512}}, {2, false, {}});
  EXPECT_EQ(two.book_of, (std::vector<uint8_t>{0, 1})) << "seed " << seed_;
}

TEST_F(WeightedBooksTest, EveryShapeHasAFamily) {
  for (int32_t head_dim : {1, 17, 64, 80, 256}) {
    for (int32_t books = 1; books <= 4; ++books) {
      for (int32_t tokens : {0, 1, 65, 256}) {
        const auto x = codes(tokens, head_dim), y = codes(tokens, head_dim);
        BookSpec spec{books, rows_.source.below(2) == 0, {}};
        spec.code.table_id = 9;
        const auto choice = choose_books(Component::kValue, head_dim,
                                         {{x.data(), tokens}, {y.data(), tokens}}, spec);
        ASSERT_TRUE(choice.is_ok()) << choice.status().message();
        ASSERT_TRUE(choice->family.validate());
        ASSERT_EQ(choice->family.books.size(), static_cast<size_t>(books));
        ASSERT_EQ(choice->family.books.front().table_id, 9);
        ASSERT_EQ(choice->book_of.size(), static_cast<size_t>(2 * dim_block_count(head_dim)));
        if (tokens > 0) bits(x, head_dim, *choice, Component::kValue);
      }
    }
  }
}

// What 256 tokens have not shown gets short words nonetheless: without smoothing the rest costs
// exceptions.
TEST_F(WeightedBooksTest, ASampleServesTheRest) {
  const auto all = codes(4096, 128);
  const RowCodes first{all.data(), 256};
  const BookChoice plain = *choose_books(Component::kKey, 128, {first}, {4, false, {}});
  const BookChoice smooth = *choose_books(Component::kKey, 128, {first}, {4, true, {}});
  const BookChoice best = *choose_books(Component::kKey, 128, {{all.data(), 4096}}, {4, false, {}});
  const int64_t n = bits(all, 128, best, Component::kKey);
  EXPECT_LT(bits(all, 128, smooth, Component::kKey), bits(all, 128, plain, Component::kKey));
  EXPECT_LT(bits(all, 128, smooth, Component::kKey), n + n / 20) << "seed " << seed_;
}

TEST_F(WeightedBooksTest, SmoothingKeepsWhatWasThere) {
  CodeHistogram h(Component::kKey, 2);
  const int16_t seen[] = {0, 0, 0, 0, 0, 1, 2, 0};
  h.add(seen, 4);
  const CodeHistogram s = smoothed(h);
  EXPECT_EQ(s.count(0), 6u * 4096);
  EXPECT_EQ(s.count(1), 4096u);
  EXPECT_EQ(s.count(2), 4096u);
  EXPECT_EQ(s.count(3), 512u);
  EXPECT_EQ(s.count(-1), 6u * 512);
  EXPECT_EQ(s.min_code(), -4);
  EXPECT_EQ(s.max_code(), 6);
  EXPECT_GE(s.pair_count(0, 1), 2048u);
  EXPECT_GT(s.pair_count(-1, 3), 0u);
  CodeHistogram wide(Component::kKey, 2);
  const int16_t far[] = {0, 400};
  wide.add(far, 1);
  EXPECT_EQ(smoothed(wide).max_code(), 400);
}

TEST_F(WeightedBooksTest, ArgumentsAreChecked) {
  const std::vector<RowCodes> none;
  for (int32_t books : {0, 5}) {
    EXPECT_EQ(choose_books(Component::kKey, 64, none, {books, false, {}}).status().code(),
              StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(choose_books(Component::kKey, 0, none).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(choose_books(Component::kKey, 64, {{nullptr, 3}}).status().code(),
            StatusCode::kInvalidArgument);
  BookSpec spec;
  spec.code.table_id = 253;
  EXPECT_EQ(choose_books(Component::kKey, 64, none, spec).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv
