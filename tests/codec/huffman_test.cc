// SPDX-License-Identifier: Apache-2.0
#include "codec/format/huffman.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

namespace tierkv {
namespace {

uint64_t cost(const std::vector<uint64_t>& counts, const std::vector<uint8_t>& lengths) {
  uint64_t bits = 0;
  for (size_t s = 0; s < counts.size(); ++s) bits += counts[s] * lengths[s];
  return bits;
}

// The least cost of any complete code of at most max_length bits, by trying all of them: the rarest
// symbol gets the longest word, so sorted lengths are enough.
uint64_t least_cost(std::vector<uint64_t> counts, int32_t max_length) {
  std::sort(counts.begin(), counts.end());
  uint64_t best = UINT64_MAX;
  const std::function<void(size_t, int32_t, uint64_t, uint64_t)> extend =
      [&](size_t i, int32_t longest, uint64_t room, uint64_t bits) {
        if (i == counts.size()) {
          if (room == 0) best = std::min(best, bits);
          return;
        }
        for (int32_t length = longest; length >= 1; --length) {
          const uint64_t used = uint64_t{1} << (max_length - length);
          if (used <= room) extend(i + 1, length, room - used, bits + counts[i] * length);
        }
      };
  extend(0, max_length, uint64_t{1} << max_length, 0);
  return best;
}

// Package-merge word for word as the header states it, with every package holding its symbols.
std::vector<uint8_t> lengths_by_the_text(const std::vector<uint64_t>& counts, int32_t max_length) {
  struct Item {
    uint64_t weight;
    std::vector<int32_t> symbols;
  };
  std::vector<Item> symbols;
  for (size_t s = 0; s < counts.size(); ++s) {
    if (counts[s] > 0) symbols.push_back({counts[s], {static_cast<int32_t>(s)}});
  }
  std::stable_sort(symbols.begin(), symbols.end(),
                   [](const Item& a, const Item& b) { return a.weight < b.weight; });
  std::vector<Item> list;
  for (int32_t l = 0; l < max_length; ++l) {
    std::vector<Item> merged =
        symbols;  // before the packages: stable_sort keeps symbols first among equals
    for (size_t i = 0; i + 1 < list.size(); i += 2) {
      Item package = list[i];
      package.weight += list[i + 1].weight;
      package.symbols.insert(package.symbols.end(), list[i + 1].symbols.begin(),
                             list[i + 1].symbols.end());
      merged.push_back(package);
    }
    std::stable_sort(merged.begin(), merged.end(),
                     [](const Item& a, const Item& b) { return a.weight < b.weight; });
    list = merged;
  }
  std::vector<uint8_t> lengths(counts.size(), 0);
  for (size_t i = 0; i < 2 * symbols.size() - 2; ++i) {
    for (int32_t s : list[i].symbols) ++lengths[s];
  }
  return lengths;
}

class HuffmanTest : public testing::Test {
 protected:
  HuffmanTest() : seed_(std::random_device{}()), rng_(seed_) { RecordProperty("seed", seed_); }
  uint64_t below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(rng_); }
  std::vector<uint64_t> random_counts(size_t n) {
    const uint64_t spread = uint64_t{1} << below(40);
    std::vector<uint64_t> counts(n);
    // Small spreads make many ties; the quotient makes some counts far larger than others.
    for (uint64_t& c : counts) c = 1 + spread / (1 + below(spread));
    return counts;
  }
  std::vector<uint8_t> lengths_of(const std::vector<uint64_t>& counts, int32_t max_length) {
    std::vector<uint8_t> lengths;
    EXPECT_TRUE(find_code_lengths(counts, max_length, &lengths)) << "seed " << seed_;
    return lengths;
  }
  uint32_t seed_;
  std::mt19937_64 rng_;
};

TEST_F(HuffmanTest, LengthsAreOptimalForSmallAlphabets) {
  for (int trial = 0; trial < 400; ++trial) {
    const size_t n = 2 + below(7);
    const std::vector<uint64_t> counts = random_counts(n);
    for (int32_t max_length = 3; max_length <= 7; ++max_length) {
      const std::vector<uint8_t> lengths = lengths_of(counts, max_length);
      ASSERT_TRUE(is_complete_code(lengths, max_length)) << "seed " << seed_;
      ASSERT_EQ(cost(counts, lengths), least_cost(counts, max_length))
          << "seed " << seed_ << " n " << n << " max_length " << max_length;
    }
  }
}

TEST_F(HuffmanTest, TiesAreDecidedAsTheTextSays) {
  for (int trial = 0; trial < 200; ++trial) {
    const size_t n = 2 + below(trial % 10 == 0 ? 300 : 40);
    std::vector<uint64_t> counts = random_counts(n);
    for (size_t s = 2; s < n; ++s) {
      if (below(4) == 0) counts[s] = 0;
    }
    for (int32_t max_length : {9, 11, 14}) {
      ASSERT_EQ(lengths_of(counts, max_length), lengths_by_the_text(counts, max_length))
          << "seed " << seed_;
    }
  }
}

TEST_F(HuffmanTest, DeepestDistributionStopsAtTheLimit) {
  std::vector<uint64_t> counts = {1, 1};
  while (counts.size() < 40) counts.push_back(counts.end()[-1] + counts.end()[-2]);
  for (int32_t max_length = 6; max_length <= 14; ++max_length) {
    const std::vector<uint8_t> lengths = lengths_of(counts, max_length);
    EXPECT_TRUE(is_complete_code(lengths, max_length));
    EXPECT_EQ(*std::max_element(lengths.begin(), lengths.end()), max_length);
    EXPECT_EQ(lengths, lengths_by_the_text(counts, max_length));
  }
  // Unlimited, Fibonacci counts give a chain: n - 1 bits for the rarest two.
  const std::vector<uint64_t> chain(counts.begin(), counts.begin() + 15);
  EXPECT_EQ(lengths_of(chain, 14)[0], 14);
  EXPECT_EQ(lengths_of(chain, 14)[1], 14);
}

TEST_F(HuffmanTest, FewSymbols) {
  EXPECT_EQ(lengths_of({0, 0, 0}, 8), (std::vector<uint8_t>{1, 1, 0}));
  EXPECT_EQ(lengths_of({0, 0, 7}, 8), (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(lengths_of({7, 0, 0}, 8), (std::vector<uint8_t>{1, 1, 0}));
  EXPECT_EQ(lengths_of({0, 3, 7}, 8), (std::vector<uint8_t>{0, 1, 1}));
  std::vector<uint8_t> lengths;
  EXPECT_EQ(find_code_lengths({5}, 8, &lengths).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(find_code_lengths({}, 8, &lengths).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(find_code_lengths(std::vector<uint64_t>(257, 1), 8, &lengths).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(lengths_of(std::vector<uint64_t>(256, 1), 8), std::vector<uint8_t>(256, 8));
}

TEST_F(HuffmanTest, HugeCountsDoNotOverflow) {
  const uint64_t huge = uint64_t{1} << 54;
  const std::vector<uint8_t> lengths = lengths_of({1, huge, 1, huge, 2}, 14);
  EXPECT_EQ(lengths, (std::vector<uint8_t>{4, 2, 4, 1, 3}));
}

TEST_F(HuffmanTest, KraftIsCheckedExactly) {
  EXPECT_TRUE(is_complete_code({1, 2, 2}, 2));
  EXPECT_FALSE(is_complete_code({1, 2, 0}, 2));     // incomplete
  EXPECT_FALSE(is_complete_code({1, 1, 2}, 2));     // over-full
  EXPECT_FALSE(is_complete_code({1, 2, 3, 3}, 2));  // longer than allowed
  EXPECT_FALSE(is_complete_code({0, 0}, 2));
}

TEST_F(HuffmanTest, CanonicalWordsAreCountedUpAndReversed) {
  // Lengths 2 1 3 3: canonical words 10, 0, 110, 111, first bit lowest.
  EXPECT_EQ(assign_code_words({2, 1, 3, 3}), (std::vector<uint16_t>{0b01, 0b0, 0b011, 0b111}));
}

TEST_F(HuffmanTest, WordsArePrefixFree) {
  for (int trial = 0; trial < 60; ++trial) {
    const size_t n = 2 + below(trial % 6 == 0 ? 1000 : 60);
    std::vector<uint64_t> counts = random_counts(n);
    for (size_t s = 2; s < n; ++s) {
      if (below(3) == 0) counts[s] = 0;
    }
    const int32_t max_length = 10 + static_cast<int32_t>(below(5));
    const std::vector<uint8_t> lengths = lengths_of(counts, max_length);
    const std::vector<uint16_t> words = assign_code_words(lengths);
    const std::vector<uint16_t> lookup = build_lookup(lengths, words, max_length);
    // Complete and prefix-free: every pattern starts with exactly one word.
    for (uint32_t i = 0; i < lookup.size(); ++i) {
      const uint16_t s = lookup[i];
      ASSERT_GT(lengths[s], 0);
      ASSERT_EQ(i & ((1u << lengths[s]) - 1), words[s]) << "seed " << seed_;
    }
  }
}

TEST_F(HuffmanTest, BitWriterFillsWordsFromTheLowestBit) {
  uint32_t words[4] = {~0u, ~0u, ~0u, ~0u};
  BitWriter writer(reinterpret_cast<uint8_t*>(words));
  writer.put(0x5, 3);
  writer.put(0x1fffffff, 29);  // ends exactly at bit 32
  EXPECT_EQ(writer.position(), 32);
  writer.put(0x1, 31);
  writer.put(0x3, 2);  // crosses into the third word
  EXPECT_EQ(words[0], 0xfffffffdu);
  EXPECT_EQ(words[1], 0x80000001u);
  EXPECT_EQ(words[2], 0x1u);
}

}  // namespace
}  // namespace tierkv
