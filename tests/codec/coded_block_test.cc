// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/coded_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "tests/support/code_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

constexpr BlockMode kCodedModes[] = {BlockMode::kSingle, BlockMode::kPair, BlockMode::kQuad,
                                     BlockMode::kSplit};
constexpr int16_t kPoison = 0x5a5a;

class CodedBlockTest : public RandomTest {
 protected:
  CodedBlockTest() : source_(seed_) {}

  Codebook build(Component component, int32_t head_dim, const std::vector<int16_t>& codes,
                 const CodebookSpec& spec) {
    CodeHistogram h(component, head_dim);
    h.add(codes.data(), static_cast<int64_t>(codes.size()) / head_dim);
    Result<Codebook> c = build_codebook(h, spec);
    EXPECT_TRUE(c.is_ok()) << c.status().message();
    return *c;
  }
  // A codebook of a mode for codes of spread_for(mode) around `centre`.
  Codebook typical(Component component, BlockMode mode, double spread, double centre,
                   int32_t streams = 1) {
    CodebookSpec spec;
    spec.mode = mode;
    spec.streams_per_lane = streams;
    return build(component, 128, source_.bell(64 * 128 * 4, spread, centre, false), spec);
  }
  std::vector<uint8_t> encode(const std::vector<int16_t>& codes, int32_t head_dim,
                              const Codebook& codebook) {
    std::vector<uint8_t> bytes;
    const auto tokens = static_cast<int32_t>(codes.size()) / head_dim;
    EXPECT_TRUE(
        encode_block({codes.data(), nullptr, tokens, head_dim}, {&codebook, 1}, nullptr, &bytes));
    EXPECT_EQ(bytes.size() % 16, 0u);
    return bytes;
  }
  Status decode(const std::vector<uint8_t>& bytes, int32_t head_dim, const Codebook& codebook,
                std::vector<int16_t>* codes) {
    std::fill(codes->begin(), codes->end(), kPoison);
    const auto tokens = static_cast<int32_t>(codes->size()) / head_dim;
    return decode_block(bytes.data(), static_cast<int64_t>(bytes.size()), {&codebook, 1},
                        {codes->data(), nullptr, tokens, head_dim});
  }
  std::vector<uint8_t> expect_round_trip(const std::vector<int16_t>& codes, int32_t head_dim,
                                         const Codebook& codebook) {
    const std::vector<uint8_t> bytes = encode(codes, head_dim, codebook);
    std::vector<int16_t> back(codes.size());
    const Status s = decode(bytes, head_dim, codebook, &back);
    EXPECT_TRUE(s) << s.message() << " seed " << seed_;
    EXPECT_EQ(back, codes) << "seed " << seed_;
    return bytes;
  }
  CodeSource source_;
};

TEST_F(CodedBlockTest, RoundTripsEveryShapeAndMode) {
  for (int32_t head_dim : {1, 2, 15, 16, 17, 48, 64, 80, 96, 100, 128, 129, 192, 256, 1000}) {
    for (int32_t tokens : {1, 2, 15, 16, 17, 31, 33, 48, 63, 64}) {
      for (BlockMode mode : kCodedModes) {
        for (int32_t streams : {1, 2}) {
          const auto component = static_cast<Component>(source_.below(2));
          const double spread = source_.spread_for(mode), centre = source_.below(300) - 150;
          CodebookSpec spec;
          spec.mode = mode;
          spec.streams_per_lane = streams;
          spec.table_id = static_cast<uint8_t>(source_.below(256));
          spec.max_length = 8 + source_.below(7);
          const auto codes = source_.bell(int64_t{tokens} * head_dim, spread, centre, false);
          // Half of the time the codebook has seen other codes, so there are exceptions.
          const auto seen =
              source_.below(2) ? codes : source_.bell(64 * 128, 0.8 * spread, centre + 0.4, false);
          const Codebook c = seen.size() == codes.size() ? build(component, head_dim, seen, spec)
                                                         : build(component, 128, seen, spec);
          expect_round_trip(codes, head_dim, c);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CodedBlockTest, LargestHeadDim) {
  const Codebook c = typical(Component::kValue, BlockMode::kPair, 2, 0);
  expect_round_trip(source_.bell(64 * 4096, 2, 0, false), 4096, c);
}

// Random lengths leave streams ending at every bit of a word, 0 and 31 included.
TEST_F(CodedBlockTest, StreamsEndAtEveryBitOfAWord) {
  std::set<uint32_t> ends;
  for (int trial = 0; trial < 8 || (ends.size() < 32 && trial < 100); ++trial) {
    const Codebook c = typical(Component::kKey, BlockMode::kPair, 2, 0, 1 + trial % 2);
    const auto bytes = expect_round_trip(source_.bell(64 * 128, 2, 0, false), 128, c);
    const BlockHeader h = load_header(bytes.data());
    ASSERT_EQ(h.mode, BlockMode::kPair);
    uint32_t end = 0;
    for (int32_t i = 0; i < kWarpLanes * h.streams_per_lane; ++i) {
      end += h.least_length + load_field(bytes.data() + block_layout(h).lengths, i, h.length_bits);
      ends.insert(end % 32);
    }
  }
  EXPECT_EQ(ends.size(), 32u) << "seed " << seed_;
}

TEST_F(CodedBlockTest, BlockIsCodedExactlyWhenThatIsSmaller) {
  // One token costs little, so the boundary is crossed in small steps of expensive codes.
  CodebookSpec spec;
  spec.mode = BlockMode::kSingle;
  std::vector<int16_t> seen(64 * 128, 0);
  for (int i = 0; i < 16; ++i) seen[i] = static_cast<int16_t>(i % 16);
  const Codebook c = build(Component::kKey, 128, seen, spec);
  int32_t flips = 0;
  bool was_coded = true;
  for (int32_t expensive = 0; expensive <= 2048; ++expensive) {
    std::vector<int16_t> codes(16 * 128, 0);
    for (int32_t i = 0; i < expensive; ++i) codes[i] = static_cast<int16_t>(1 + i % 15);
    std::vector<int32_t> lengths(kWarpLanes, 0);  // of the streams
    for (int32_t i = 0; i < 16 * 128; ++i) {
      lengths[i / 128 % 8 * 4 + i % 8 / 2] += c.lengths[codes[i] - c.base];
    }
    const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
    const int64_t payload = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    const auto bytes = encode(codes, 128, c);
    const int64_t fields = 4 * bits_for(static_cast<uint32_t>(*most - *least));
    const int64_t coded = (16 + fields + (payload + 31) / 32 * 4 + 15) / 16 * 16;
    const int64_t range = std::min(expensive, 15);
    const int64_t raw = 16 + 2048 * (range < 4 ? 2 : 4) / 8;
    const bool is_coded = load_header(bytes.data()).mode == BlockMode::kSingle;
    ASSERT_EQ(is_coded, coded < raw) << expensive;
    ASSERT_EQ(static_cast<int64_t>(bytes.size()), std::min(coded, raw)) << expensive;
    flips += is_coded != was_coded;
    was_coded = is_coded;
    if (expensive % 97 == 0 || is_coded != was_coded) expect_round_trip(codes, 128, c);
  }
  EXPECT_GE(flips, 1);
  EXPECT_FALSE(was_coded);
}

TEST_F(CodedBlockTest, RawWidthIsTheNarrowestThatHoldsTheRange) {
  for (BlockMode mode : kCodedModes) {
    const Codebook c = typical(Component::kValue, mode, source_.spread_for(mode), 0);
    for (int32_t range : {1, 3, 4, 15, 16, 255, 256, 65535}) {
      const int32_t lowest = source_.below(65536 - range) - 32768;
      auto codes = source_.uniform_codes(40 * 96, lowest, range + 1);
      codes[0] = static_cast<int16_t>(lowest);
      codes[1] = static_cast<int16_t>(lowest + range);
      const auto bytes = expect_round_trip(codes, 96, c);
      const BlockHeader h = load_header(bytes.data());
      if (!is_raw_mode(h.mode)) continue;
      EXPECT_EQ(raw_bits(h.mode), range < 4 ? 2 : range < 16 ? 4 : range < 256 ? 8 : 16);
    }
  }
}

TEST_F(CodedBlockTest, OneSymbolAlphabet) {
  for (int32_t code : {0, -32768, 32767}) {
    const std::vector<int16_t> codes(64 * 128, static_cast<int16_t>(code));
    const Codebook c = build(Component::kKey, 128, codes, {});
    const auto bytes = expect_round_trip(codes, 128, c);
    EXPECT_FALSE(is_raw_mode(load_header(bytes.data()).mode));
    EXPECT_LE(load_header_and_payload(bytes.data()).payload_bits, 64 * 128 / 2);
    // Another constant is no harder than a raw block.
    expect_round_trip(std::vector<int16_t>(64 * 128, static_cast<int16_t>(code ^ 77)), 128, c);
  }
}

TEST_F(CodedBlockTest, ExceptionsAtEveryPosition) {
  for (BlockMode mode : kCodedModes) {
    for (Component component : {Component::kKey, Component::kValue}) {
      const double spread = mode == BlockMode::kQuad ? 0.4 : 1.0;
      const Codebook c = typical(component, mode, mode == BlockMode::kSplit ? 8 : spread, 0);
      const auto plain = source_.bell(64 * 32, 0.3, 0, false);
      const int32_t before = load_header(encode(plain, 32, c).data()).exceptions;
      for (size_t i = 0; i < plain.size(); i += mode == BlockMode::kPair ? 1 : 13) {
        std::vector<int16_t> codes = plain;
        codes[i] = static_cast<int16_t>(source_.below(2) ? 900 + source_.below(9000)
                                                         : -900 - source_.below(9000));
        const auto bytes = expect_round_trip(codes, 32, c);
        ASSERT_EQ(load_header(bytes.data()).mode, mode);
        ASSERT_NEAR(load_header(bytes.data()).exceptions, before + 1, 1) << "seed " << seed_;
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(CodedBlockTest, TooManyExceptionsMakeTheBlockRaw) {
  // All digits occur alone in their pairs' channel, so that each outlier is one exception.
  CodebookSpec spec;
  spec.mode = BlockMode::kSingle;
  const Codebook c = build(Component::kKey, 128, source_.uniform_codes(64 * 128, 0, 3), spec);
  for (int32_t n : {kMaxExceptions - 1, kMaxExceptions, kMaxExceptions + 1}) {
    auto codes = source_.uniform_codes(64 * 128, 0, 3);
    for (int32_t i = 0; i < n; ++i) codes[i * 31] = static_cast<int16_t>(300 + i);
    const auto bytes = expect_round_trip(codes, 128, c);
    EXPECT_EQ(is_raw_mode(load_header(bytes.data()).mode), n > kMaxExceptions);
    if (n <= kMaxExceptions) {
      EXPECT_EQ(load_header(bytes.data()).exceptions, n);
    }
  }
}

TEST_F(CodedBlockTest, ExceptionsBeyondSixteenBitsMakeTheBlockRaw) {
  const Codebook c = typical(Component::kKey, BlockMode::kPair, 1, -20000);
  auto codes = source_.bell(64 * 128, 1, -20000, false);
  codes[5] = 12000;
  EXPECT_EQ(load_header(expect_round_trip(codes, 128, c).data()).mode, BlockMode::kPair);
  codes[5] = 20000;
  EXPECT_EQ(load_header(expect_round_trip(codes, 128, c).data()).mode, BlockMode::kRaw16);
}

// A code whose symbol has no word is replaced by one that has; with its own low nibble that may lie
// beyond 16 bits, where decoders wrap.
TEST_F(CodedBlockTest, SplitCodesAtTheEndOf16BitsComeBack) {
  int32_t raw = 0, coded = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const int32_t levels = 17 + source_.below(240), base = INT16_MAX + 1 - levels;
    std::vector<int16_t> seen(64 * 128, INT16_MAX);
    for (int32_t i = 0; i < 40; ++i) {
      seen[source_.below(64 * 128)] = static_cast<int16_t>(base + source_.below(levels));
    }
    seen[0] = static_cast<int16_t>(base);
    CodebookSpec spec;
    spec.mode = BlockMode::kSplit;
    const Codebook c = build(static_cast<Component>(trial % 2), 128, seen, spec);
    std::vector<int16_t> codes(32 * 64, INT16_MAX);
    for (int32_t i = source_.below(60); i > 0; --i) {
      codes[source_.below(32 * 64)] = static_cast<int16_t>(base + source_.below(levels));
    }
    const auto bytes = expect_round_trip(codes, 64, c);
    ++(is_raw_mode(load_header(bytes.data()).mode) ? raw : coded);
    if (HasFailure()) return;
  }
  EXPECT_GT(coded, 0) << "seed " << seed_;
}

// Short code words on average, with runs of the longest between them: more bits in a few symbols
// than one 64-bit load has.
TEST_F(CodedBlockTest, RunsOfLongCodeWordsDecode) {
  Codebook c;
  c.mode = BlockMode::kSingle;
  c.levels = kMaxCodeLength + 1;
  for (int32_t n = 1; n <= kMaxCodeLength; ++n) c.lengths.push_back(static_cast<uint8_t>(n));
  c.lengths.push_back(kMaxCodeLength);
  c.max_length = kMaxCodeLength;
  for (int trial = 0; trial < 20; ++trial) {
    c.streams_per_lane = 1 + trial % 2;
    ASSERT_TRUE(complete_codebook(&c));
    std::vector<int16_t> codes(64 * 128, 0);
    for (int16_t& code : codes) {
      if (source_.below(7) == 0) code = static_cast<int16_t>(source_.below(c.levels));
    }
    const auto bytes = expect_round_trip(codes, 128, c);
    EXPECT_EQ(load_header(bytes.data()).mode, BlockMode::kSingle);
  }
}

TEST_F(CodedBlockTest, ChecksumIsTheSumOfTheFormat) {
  for (int32_t bytes = 16; bytes <= kMaxCodedBlockBytes; bytes += 16 * (1 + source_.below(60))) {
    std::vector<uint8_t> block(static_cast<size_t>(bytes));
    for (uint8_t& b : block) b = static_cast<uint8_t>(source_.below(8) ? source_.rng()() : 255);
    const int32_t n = bytes / 4;
    uint64_t sum = 0;
    for (int32_t i = 0; i < n; ++i) {
      const uint32_t word = load_u32(block.data() + 4 * i) & (i == 3 ? 0xffffu : 0xffffffffu);
      sum = (sum + static_cast<uint64_t>(n - i) * word) % kChecksumPrime;
    }
    ASSERT_EQ(block_checksum(block.data(), bytes), sum) << bytes << " seed " << seed_;
  }
}

// Exponents of 0 need no place; others are refused without one.
TEST_F(CodedBlockTest, ExponentsAreNotDropped) {
  const Codebook c = typical(Component::kValue, BlockMode::kPair, 2, 0);
  const auto codes = source_.bell(20 * 64, 2, 0, false);
  std::vector<int8_t> exponents(20, 0);
  for (const int8_t last : {0, -3}) {
    exponents.back() = last;
    std::vector<uint8_t> bytes;
    ASSERT_TRUE(encode_block({codes.data(), exponents.data(), 20, 64}, {&c, 1}, nullptr, &bytes));
    if (last == 0) {
      EXPECT_EQ(bytes, encode(codes, 64, c));
    }
    std::vector<int16_t> back(codes.size());
    EXPECT_EQ(decode(bytes, 64, c, &back).code(),
              last == 0 ? StatusCode::kOk : StatusCode::kCorrupt);
    EXPECT_EQ(back, last == 0 ? codes : std::vector<int16_t>(codes.size(), 0)) << "seed " << seed_;
  }
}

}  // namespace
}  // namespace tierkv
