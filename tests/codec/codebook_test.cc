// SPDX-License-Identifier: Apache-2.0
#include "codec/format/codebook.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "codec/format/fragment_order.h"
#include "codec/format/huffman.h"
#include "tests/support/code_source.h"
#include "tests/support/fresh_random.h"
#include "tierkv/half.h"
#include "tools/analysis/scheme/code_entropy.h"

namespace tierkv {
namespace {

constexpr BlockMode kCodedModes[] = {BlockMode::kSingle, BlockMode::kPair, BlockMode::kQuad,
                                     BlockMode::kSplit};

class CodebookTest : public RandomTest {
 protected:
  CodebookTest() : source_(seed_) {}
  CodeHistogram histogram(Component component, int32_t head_dim, int32_t tokens, double spread,
                          double centre) {
    CodeHistogram h(component, head_dim);
    const auto codes = source_.bell(int64_t{tokens} * head_dim, spread, centre, source_.below(2));
    h.add(codes.data(), tokens);
    return h;
  }
  CodeHistogram histogram_of(Component component, const std::vector<int16_t>& codes) {
    CodeHistogram h(component, 128);
    h.add(codes.data(), static_cast<int64_t>(codes.size()) / 128);
    return h;
  }
  Codebook build(const CodeHistogram& h, const CodebookSpec& spec = {}) {
    Result<Codebook> c = build_codebook(h, spec);
    EXPECT_TRUE(c.is_ok()) << c.status().message() << " seed " << seed_;
    return c.is_ok() ? *c : Codebook{};
  }
  CodeSource source_;
};

// Counted again from the definition: lanes, tiles and padding as fragment_order.h lays them out.
TEST_F(CodebookTest, HistogramCountsThePairsThatLanesDecode) {
  for (Component component : {Component::kKey, Component::kValue}) {
    for (int32_t head_dim : {1, 16, 33, 128, 144}) {
      for (int32_t tokens : {1, 7, 64, 65, 150}) {
        const auto codes = source_.bell(int64_t{tokens} * head_dim, 3, -5, false);
        CodeHistogram h(component, head_dim);
        h.add(codes.data(), tokens);
        std::map<std::pair<int32_t, int32_t>, uint64_t> pairs;
        std::map<int32_t, uint64_t> singles, lone;
        uint64_t padding = 0;
        const bool key = component == Component::kKey;
        const auto at = [&](int32_t first, int32_t n, int32_t token, int32_t dim) {
          return token < n && dim < head_dim ? codes[(first + token) * head_dim + dim] : INT32_MAX;
        };
        for (int32_t first = 0; first < tokens; first += kBlockTokens) {
          const int32_t n = std::min(kBlockTokens, tokens - first);
          for (int32_t i = 0; i < tile_count(n) * dim_block_count(head_dim) * 4 * kWarpLanes; ++i) {
            const int32_t blocks = dim_block_count(head_dim);
            const PairPosition p =
                pair_position(component, i / kWarpLanes / 4 / blocks, i / kWarpLanes / 4 % blocks,
                              i / kWarpLanes % 4, i % kWarpLanes);
            const int32_t a = at(first, n, p.token, p.dim);
            const int32_t b = at(first, n, p.token + !key, p.dim + key);
            if (a == INT32_MAX) {
              ++padding;
              continue;
            }
            ++singles[a];
            if (b == INT32_MAX) {
              ++lone[a];
            } else {
              ++singles[b];
              ++pairs[{a, b}];
            }
          }
        }
        ASSERT_EQ(h.padding_pairs(), padding) << head_dim << " " << tokens;
        ASSERT_TRUE(h.pairs_are_exact());
        ASSERT_EQ(h.total(), int64_t{tokens} * head_dim);
        double entropy = 0;
        for (int32_t a = h.min_code() - 1; a <= h.max_code() + 1; ++a) {
          ASSERT_EQ(h.count(a), singles[a]);
          ASSERT_EQ(h.lone_count(a), lone[a]);
          for (int32_t b = h.min_code(); b <= h.max_code(); ++b) {
            ASSERT_EQ(h.pair_count(a, b), (pairs[{a, b}])) << "seed " << seed_;
          }
          const double p = static_cast<double>(singles[a]) / static_cast<double>(h.total());
          if (p > 0) entropy -= p * std::log2(p);
        }
        ASSERT_NEAR(code_entropy(h), entropy, 1e-9);
      }
    }
  }
}

TEST_F(CodebookTest, MergedHistogramsEqualOne) {
  const auto codes = source_.bell(192 * 64, 4, 0, true);
  CodeHistogram whole(Component::kValue, 64), first(Component::kValue, 64), second = first;
  whole.add(codes.data(), 192);
  first.add(codes.data(), 64);
  second.add(codes.data() + 64 * 64, 128);
  CodeHistogram merged(Component::kValue, 64);
  merged.merge(second);
  merged.merge(first);
  merged.merge(CodeHistogram(Component::kValue, 64));
  EXPECT_EQ(build(merged).lengths, build(whole).lengths) << "seed " << seed_;
  EXPECT_EQ(code_entropy(merged), code_entropy(whole));
  EXPECT_EQ(merged.min_code(), whole.min_code());
}

TEST_F(CodebookTest, EveryModeGivesACompleteCode) {
  for (int trial = 0; trial < 60; ++trial) {
    for (BlockMode mode : kCodedModes) {
      CodebookSpec spec;
      spec.mode = mode;
      spec.max_length = 8 + source_.below(kMaxCodeLength - 7);
      spec.streams_per_lane = 1 + source_.below(2);
      spec.table_id = static_cast<uint8_t>(source_.below(256));
      const auto component = static_cast<Component>(source_.below(2));
      const int32_t centre = source_.below(3) ? source_.below(200) - 100 : 32767;
      const CodeHistogram h = histogram(component, 1 + source_.below(140), 1 + source_.below(200),
                                        source_.spread_for(mode), centre);
      const Codebook c = build(h, spec);
      EXPECT_EQ(c.mode, mode);
      EXPECT_EQ(c.component, component);
      EXPECT_EQ(c.table_id, spec.table_id);
      EXPECT_EQ(c.streams_per_lane, spec.streams_per_lane);
      EXPECT_LE(c.max_length, spec.max_length);
      EXPECT_TRUE(is_complete_code(c.lengths, c.max_length)) << "seed " << seed_;
      EXPECT_EQ(c.table.size(), size_t{1} << c.max_length);
    }
  }
}

TEST_F(CodebookTest, CheapestSymbolIsTheShortestThenTheLowest) {
  for (BlockMode mode : kCodedModes) {
    CodebookSpec spec;
    spec.mode = mode;
    const Codebook c =
        build(histogram(Component::kKey, 64, 100, source_.spread_for(mode), 0), spec);
    for (int32_t position = -1; position < c.codes_per_symbol(); ++position) {
      for (int32_t digit = 0; digit < c.radix(); ++digit) {
        uint16_t best = Codebook::kNoSymbol;
        for (int32_t s = 0; s < c.symbol_count(); ++s) {
          int32_t d = s;
          for (int32_t i = 0; i < position; ++i) d /= c.radix();
          if (c.lengths[s] == 0 || (position >= 0 && d % c.radix() != digit)) continue;
          if (best == Codebook::kNoSymbol || c.lengths[s] < c.lengths[best]) best = s;
        }
        ASSERT_EQ(c.cheapest_symbol(position, digit), best) << "seed " << seed_;
      }
    }
  }
}

// The GPU multiplies an entry of kPair by 2^-6 in fp16, and takes the upper half of one of kSingle
// as it is: they must be the digits times 2^-24.
TEST_F(CodebookTest, EntriesAreHalvesProportionalToTheDigits) {
  CodebookSpec spec;
  spec.mode = BlockMode::kSingle;
  const Codebook single = build(histogram(Component::kKey, 128, 300, 4, 3), spec);
  const std::vector<uint32_t> entries = device_table(single);
  for (size_t i = 0; i < entries.size(); ++i) {
    EXPECT_EQ(half_to_float(static_cast<uint16_t>(entries[i] >> 16)),
              static_cast<float>(single.table[i] >> 6) * 0x1p-24f);
  }
  spec.mode = BlockMode::kPair;
  const Codebook c = build(histogram(Component::kKey, 128, 300, 4, 3), spec);
  const std::vector<uint32_t> table = device_table(c);
  ASSERT_EQ(table.size(), c.table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    const auto product = [&](uint32_t half) {
      return half_to_float(float_to_half(half_to_float(static_cast<uint16_t>(half)) * 0x1p-6f));
    };
    EXPECT_EQ(table[i] & 63, c.table[i] & 63u);
    EXPECT_EQ(product(table[i]), static_cast<float>(c.table[i] >> 6 & 31u) * 0x1p-24f);
    EXPECT_EQ(product(table[i] >> 16), static_cast<float>(c.table[i] >> 11) * 0x1p-24f);
  }
}

TEST_F(CodebookTest, AutoChoosesBySize) {
  EXPECT_EQ(build(histogram(Component::kKey, 128, 640, 2.5, 0)).mode, BlockMode::kPair);
  // Three levels of about half a bit: a pair cannot cost less than one bit.
  EXPECT_EQ(build(histogram_of(Component::kValue, source_.bell(6400 * 128, 0.3, 2, false))).mode,
            BlockMode::kQuad);
  const BlockMode wide = build(histogram(Component::kKey, 128, 640, 40, 128)).mode;
  EXPECT_TRUE(wide == BlockMode::kSplit || wide == BlockMode::kSingle) << block_mode_name(wide);
}

TEST_F(CodebookTest, EmptyAndConstantHistograms) {
  for (Component component : {Component::kKey, Component::kValue}) {
    const Codebook empty = build(CodeHistogram(component, 128));
    EXPECT_TRUE(is_complete_code(empty.lengths, empty.max_length));
    for (int32_t code : {0, -32768, 32767, 255}) {
      CodeHistogram h(component, 128);
      const std::vector<int16_t> codes(64 * 128, static_cast<int16_t>(code));
      h.add(codes.data(), 64);
      EXPECT_EQ(code_entropy(h), 0);
      const Codebook c = build(h);
      EXPECT_TRUE(c.base <= code && code < c.base + c.levels) << code;
      EXPECT_EQ(c.max_length, 1);
    }
  }
}

TEST_F(CodebookTest, SpecsThatMakeNoSenseAreRefused) {
  const CodeHistogram h = histogram(Component::kKey, 64, 64, 2, 0);
  CodebookSpec spec;
  spec.max_length = kMaxCodeLength + 1;
  EXPECT_EQ(build_codebook(h, spec).status().code(), StatusCode::kInvalidArgument);
  spec.max_length = 7;
  EXPECT_EQ(build_codebook(h, spec).status().code(), StatusCode::kInvalidArgument);
  spec = {};
  spec.streams_per_lane = 3;
  EXPECT_EQ(build_codebook(h, spec).status().code(), StatusCode::kInvalidArgument);
  spec = {};
  spec.mode = BlockMode::kRaw4;
  EXPECT_EQ(build_codebook(h, spec).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(CodebookTest, SerializedFormRoundTrips) {
  for (int trial = 0; trial < 100; ++trial) {
    CodebookSpec spec;
    spec.mode = kCodedModes[trial % 4];
    spec.table_id = static_cast<uint8_t>(trial);
    spec.streams_per_lane = 1 + trial / 4 % 2;
    const Codebook c = build(histogram(Component::kValue, 64, 1 + source_.below(300),
                                       source_.spread_for(*spec.mode), source_.below(400) - 200),
                             spec);
    std::vector<uint8_t> bytes = {0xaa};
    serialize_codebook(c, &bytes);
    bytes.erase(bytes.begin());
    ASSERT_EQ(static_cast<int64_t>(bytes.size()), codebook_bytes(c));
    const Result<Codebook> parsed = parse_codebook(bytes.data(), codebook_bytes(c));
    ASSERT_TRUE(parsed.is_ok()) << parsed.status().message() << " seed " << seed_;
    EXPECT_EQ(parsed->lengths, c.lengths);
    EXPECT_EQ(parsed->table, c.table);
    EXPECT_EQ(parsed->base, c.base);
    EXPECT_EQ(parsed->component, c.component);
    EXPECT_EQ(parsed->mode, c.mode);
    EXPECT_EQ(parsed->table_id, c.table_id);
    EXPECT_EQ(parsed->streams_per_lane, c.streams_per_lane);
  }
}

// Whatever is changed, the parser refuses it or yields a complete code whose tables stay in range.
TEST_F(CodebookTest, DamagedBytesAreRefusedOrHarmless) {
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  std::vector<uint8_t> bytes;
  serialize_codebook(build(histogram(Component::kKey, 128, 400, 3, 0), spec), &bytes);
  const auto size = static_cast<int64_t>(bytes.size());
  for (int64_t n = 0; n < size; ++n) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + n);
    EXPECT_FALSE(parse_codebook(cut.data(), n).is_ok()) << n;
  }
  std::vector<uint8_t> longer = bytes;
  longer.push_back(0);
  EXPECT_EQ(parse_codebook(longer.data(), size + 1).status().code(), StatusCode::kCorrupt);
  int32_t refused = 0;
  for (int64_t bit = 0; bit < 8 * size; ++bit) {
    std::vector<uint8_t> damaged = bytes;
    damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    const Result<Codebook> c = parse_codebook(damaged.data(), size);
    if (!c) {
      ++refused;
      EXPECT_EQ(c.status().code(), bit < 8 ? StatusCode::kVersion : StatusCode::kCorrupt);
      continue;
    }
    ASSERT_TRUE(is_complete_code(c->lengths, c->max_length));
    for (uint16_t entry : c->table) {
      ASSERT_GE(entry & 63, 1);
      ASSERT_LE(entry & 63, 14);
    }
  }
  // A changed length nearly always breaks Kraft's equation.
  EXPECT_GT(refused, 7 * size);
}

}  // namespace
}  // namespace tierkv
