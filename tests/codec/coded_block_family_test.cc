// SPDX-License-Identifier: Apache-2.0
// Coded blocks with exponents and families of books: round trips, what they cost, refusals, pinned
// bytes.
#include "codec/host/coded/coded_block.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/codec/support/simd_targets.h"
#include "tests/codec/support/weighted_source.h"
#include "tools/analysis/scheme/block_stats.h"
#include "tools/analysis/scheme/importance.h"

namespace tierkv {
namespace {

constexpr BlockMode kModes[] = {BlockMode::kSingle, BlockMode::kPair, BlockMode::kQuad,
                                BlockMode::kSplit};

class CodedFamilyTest : public testing::Test {
 protected:
  CodedFamilyTest() : seed_(std::random_device{}()), rows_(seed_) { RecordProperty("seed", seed_); }

  void make_block(Component c, int32_t tokens, int32_t head_dim, BlockMode mode) {
    CodeSource& s = rows_.source;
    tokens_ = tokens, head_dim_ = head_dim;
    const double spread = s.spread_for(mode);
    family_ = rows_.family(c, 1 + s.below(4), mode, 1 + s.below(2), spread, 3);
    book_of_ = rows_.book_of(head_dim, family_.books.size());
    codes_ = s.bell(int64_t{tokens} * head_dim, spread, 3, s.below(2) == 0);
    exponents_ = c == Component::kKey ? rows_.key_exponents(tokens) : rows_.value_exponents(tokens);
    bytes_.clear();
    const Status made = encode_block({codes_.data(), exponents_.data(), tokens, head_dim},
                                     family_.books, book_of_.data(), &bytes_);
    ASSERT_TRUE(made) << made.message();
    ASSERT_EQ(bytes_.size() % 16, 0u);
  }
  BlockHeader header() const { return load_header(bytes_.data()); }
  Status decode(const std::vector<uint8_t>& bytes) {
    // A copy of the exact size, so that the address sanitizer sees every read outside.
    const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
    found_.assign(codes_.size(), 0x5a5a);
    found_exponents_.assign(exponents_.size(), 0x5a);
    return decode_block(exact.data(), static_cast<int64_t>(exact.size()), family_.books,
                        {found_.data(), found_exponents_.data(), tokens_, head_dim_});
  }
  void expect_round_trip() {
    const Status s = decode(bytes_);
    ASSERT_TRUE(s) << s.message() << " seed " << seed_;
    ASSERT_EQ(found_, codes_) << "seed " << seed_;
    ASSERT_EQ(found_exponents_, exponents_) << "seed " << seed_;
    BlockStats stats;
    stats.add_blocks(bytes_.data(), static_cast<int64_t>(bytes_.size()));
    ASSERT_EQ(stats.total_bits(), static_cast<int64_t>(8 * bytes_.size()));
  }
  // The decoder refuses and leaves zeros.
  void expect_refused(const std::vector<uint8_t>& bytes, const char* what) {
    ASSERT_EQ(decode(bytes).code(), StatusCode::kCorrupt) << what << " seed " << seed_;
    ASSERT_EQ(found_, std::vector<int16_t>(codes_.size(), 0)) << what;
    ASSERT_EQ(found_exponents_, std::vector<int8_t>(exponents_.size(), 0)) << what;
  }
  static void repair_checksum(std::vector<uint8_t>* bytes) {
    const auto size = std::min<size_t>(bytes->size(), 16 * load_u16(bytes->data() + 12));
    store_u16(bytes->data() + 14, block_checksum(bytes->data(), static_cast<int32_t>(size)));
  }

  uint32_t seed_;
  WeightedSourceOfRows rows_;
  BookFamily family_;
  std::vector<uint8_t> book_of_, bytes_;
  std::vector<int16_t> codes_, found_;
  std::vector<int8_t> exponents_, found_exponents_;
  int32_t tokens_ = 0, head_dim_ = 0;
};

TEST_F(CodedFamilyTest, RoundTripsEveryShapeAndMode) {
  for (int32_t head_dim : {1, 17, 64, 80, 96, 128, 129, 256, 300}) {
    for (int32_t tokens = 1; tokens <= 64; tokens += tokens < 4 || tokens > 60 ? 1 : 5) {
      for (BlockMode mode : kModes) {
        const auto c = static_cast<Component>(rows_.source.below(2));
        ASSERT_NO_FATAL_FAILURE(make_block(c, tokens, head_dim, mode));
        ASSERT_NO_FATAL_FAILURE(expect_round_trip());
      }
    }
  }
}

TEST_F(CodedFamilyTest, EverySimdTargetDecodesTheSame) {
  SimdTargets targets;
  for (const int64_t target : targets.list()) {
    SimdTargets::choose(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (BlockMode mode : kModes) {
      for (int32_t head_dim : {64, 80, 96, 128, 256}) {
        const auto c = static_cast<Component>(rows_.source.below(2));
        ASSERT_NO_FATAL_FAILURE(make_block(c, 1 + rows_.source.below(64), head_dim, mode));
        ASSERT_NO_FATAL_FAILURE(expect_round_trip());
      }
    }
  }
}

// A book for every dim block by itself gives the same bits as the family.
TEST_F(CodedFamilyTest, ADimBlockTakesItsOwnBook) {
  for (int trial = 0; trial < 20; ++trial) {
    ASSERT_NO_FATAL_FAILURE(make_block(Component::kKey, 64, 128, BlockMode::kPair));
    if (is_raw_mode(header().mode)) continue;
    BlockStats stats;
    stats.add_blocks(bytes_.data(), static_cast<int64_t>(bytes_.size()));
    int64_t bits = 0;
    for (int32_t f = 0; f < 8; ++f) {
      const Codebook& book = family_.books[book_of_[f]];
      ASSERT_EQ(header().book(f), book_of_[f]);
      for (int32_t t = 0; t < 64; ++t) {
        for (int32_t d = 16 * f; d < 16 * f + 16; d += 2) {
          const int32_t a = codes_[t * 128 + d] - book.base,
                        b = codes_[t * 128 + d + 1] - book.base;
          const bool inside = std::min(a, b) >= 0 && std::max(a, b) < book.levels;
          if (inside) bits += book.lengths[a + book.levels * b];
        }
      }
    }
    // Exceptions stand for pairs that are not counted here.
    EXPECT_GE(stats.payload_bits, bits);
    if (stats.exceptions == 0) {
      EXPECT_EQ(stats.payload_bits, bits) << "seed " << seed_;
    }
  }
}

TEST_F(CodedFamilyTest, ExtremeExponents) {
  for (const auto& [least, most] :
       {std::pair{-128, 127}, {-128, -128}, {127, 127}, {-1, 0}, {0, 0}, {-128, -1}}) {
    ASSERT_NO_FATAL_FAILURE(make_block(Component::kValue, 64, 64, BlockMode::kPair));
    for (int8_t& e : exponents_) e = static_cast<int8_t>(rows_.source.below(2) ? least : most);
    exponents_[0] = static_cast<int8_t>(least), exponents_[63] = static_cast<int8_t>(most);
    bytes_.clear();
    ASSERT_TRUE(encode_block({codes_.data(), exponents_.data(), 64, 64}, family_.books,
                             book_of_.data(), &bytes_));
    EXPECT_EQ(header().exponent_bits, bits_for(static_cast<uint32_t>(most - least)));
    ASSERT_NO_FATAL_FAILURE(expect_round_trip());
  }
}

TEST_F(CodedFamilyTest, EveryFlippedBitAndTruncationIsRefused) {
  for (int trial = 0; trial < 4; ++trial) {
    const auto c = static_cast<Component>(trial % 2);
    ASSERT_NO_FATAL_FAILURE(make_block(c, 17, 144, kModes[rows_.source.below(4)]));
    for (size_t bit = 0; bit < 8 * bytes_.size(); ++bit) {
      std::vector<uint8_t> damaged = bytes_;
      damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      ASSERT_EQ(decode(damaged).code(), StatusCode::kCorrupt) << bit;
      ASSERT_EQ(found_, std::vector<int16_t>(codes_.size(), 0));
      ASSERT_EQ(found_exponents_, std::vector<int8_t>(exponents_.size(), 0));
    }
    for (size_t n = 0; n < bytes_.size(); ++n) {
      expect_refused(std::vector<uint8_t>(bytes_.begin(), bytes_.begin() + n), "cut");
    }
    std::vector<uint8_t> longer = bytes_;
    longer.resize(bytes_.size() + 16);
    expect_refused(longer, "longer");
  }
}

// With the checksum repaired, the structure alone must hold: a flip is refused or gives some codes,
// and a refused block leaves zeros.
TEST_F(CodedFamilyTest, DamageBehindAGoodChecksumIsRefusedOrHarmless) {
  int32_t refused = 0, total = 0;
  for (int trial = 0; trial < 30; ++trial) {
    const auto c = static_cast<Component>(trial % 2);
    ASSERT_NO_FATAL_FAILURE(make_block(c, 1 + rows_.source.below(64),
                                       16 * (1 + rows_.source.below(10)), kModes[trial % 4]));
    for (int flip = 0; flip < 300; ++flip) {
      std::vector<uint8_t> damaged = bytes_;
      const bool in_front = rows_.source.below(2) == 0;
      for (int n = 1 + rows_.source.below(3); n > 0; --n) {
        const auto bits = static_cast<int32_t>(in_front ? 8 * 80 : 8 * bytes_.size());
        const int32_t bit =
            rows_.source.below(std::min(bits, static_cast<int32_t>(8 * bytes_.size())));
        damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      }
      repair_checksum(&damaged);
      const Status s = decode(damaged);
      ASSERT_TRUE(s || found_ == std::vector<int16_t>(codes_.size(), 0)) << "seed " << seed_;
      refused += !s;
      ++total;
    }
  }
  EXPECT_GT(refused, total / 4);
}

TEST_F(CodedFamilyTest, FieldsAreCheckedOneByOne) {
  do {
    ASSERT_NO_FATAL_FAILURE(make_block(Component::kKey, 63, 100, kModes[rows_.source.below(4)]));
  } while (is_raw_mode(header().mode) || header().exceptions < 2 || header().exponent_bits < 4 ||
           family_.books.size() > 3);
  const BlockHeader h = header();
  const auto change = [&](const char* what, auto edit) {
    std::vector<uint8_t> damaged = bytes_;
    edit(damaged.data());
    repair_checksum(&damaged);
    expect_refused(damaged, what);
  };
  const auto set = [&](const char* what, auto edit) {
    BlockHeader other = h;
    edit(&other);
    change(what, [&](uint8_t* b) { store_header(other, b); });
  };
  set("version", [](BlockHeader* x) { x->version = 1; });
  for (int mode = 0; mode < 16; ++mode) {
    if (mode != static_cast<int>(h.mode)) {
      set("mode", [&](BlockHeader* x) { x->mode = static_cast<BlockMode>(mode); });
    }
  }
  for (int streams = 0; streams < 4; ++streams) {
    if (streams != h.streams_per_lane) {
      set("streams", [&](BlockHeader* x) { x->streams_per_lane = uint8_t(streams); });
    }
  }
  for (int c : {1, 2, 3}) set("component", [&](BlockHeader* x) { x->component = Component(c); });
  set("table", [](BlockHeader* x) { x->table_id ^= 1; });
  for (int e : {-9, -128, 3, 127}) {
    set("exponent", [&](BlockHeader* x) { x->least_exponent = int8_t(e); });
  }
  for (int t : {0, 62, 64, 65, 255}) set("tokens", [&](BlockHeader* x) { x->tokens = uint8_t(t); });
  for (int d : {0, 99, 112, 129}) set("dims", [&](BlockHeader* x) { x->dims = uint8_t(d); });
  set("book", [](BlockHeader* x) { x->base_or_books |= 3; });
  set("books beyond", [](BlockHeader* x) { x->base_or_books |= 1u << 14; });
  set("least length", [](BlockHeader* x) { ++x->least_length; });
  set("least length", [](BlockHeader* x) { x->least_length = 65535; });
  for (int n : {0, h.exceptions - 1, 255}) {
    if (n != h.exceptions) set("exceptions", [&](BlockHeader* x) { x->exceptions = uint8_t(n); });
  }
  for (int n = 0; n < 16; ++n) {
    // A part of as many bytes can hold other fields: then the last one's bits are not all read.
    if (n != h.exponent_bits)
      set("exponent bits", [&](BlockHeader* x) { x->exponent_bits = uint8_t(n); });
    if (n != h.length_bits)
      set("length bits", [&](BlockHeader* x) { x->length_bits = uint8_t(n); });
  }
  set("units", [](BlockHeader* x) { x->units = 0; });
  set("units", [](BlockHeader* x) { ++x->units; });
  const BlockHeader whole = load_header_and_payload(bytes_.data());
  const BlockLayout at = block_layout(whole);
  change("index order",
         [&](uint8_t* b) { store_u16(b + at.exceptions, load_u16(b + at.exceptions + 4)); });
  change("index range",
         [&](uint8_t* b) { store_u16(b + at.exceptions + 4 * (h.exceptions - 1), 64 * 128); });
  change("delta zero", [&](uint8_t* b) { store_u16(b + at.exceptions + 2, 0); });
  if (at.end < at.bytes) change("padding", [&](uint8_t* b) { b[at.end] = 1; });
  if (whole.payload_bits % 32 != 0) {
    change("last word", [&](uint8_t* b) { b[at.exceptions - 1] |= 0x80; });
  }
  const int32_t lengths = kCodedBlockHeaderBytes + field_bytes(63, h.exponent_bits);
  change("bits after the exponents", [&](uint8_t* b) { b[lengths - 1] |= 0x80; });
  if (h.length_bits > 0) change("a length", [&](uint8_t* b) { b[lengths] ^= 1; });
}

TEST_F(CodedFamilyTest, ArgumentsAreChecked) {
  ASSERT_NO_FATAL_FAILURE(make_block(Component::kKey, 64, 128, BlockMode::kPair));
  const auto code = [&](int32_t tokens, int32_t head_dim) {
    std::vector<uint8_t> out;
    const Status s = encode_block({codes_.data(), exponents_.data(), tokens, head_dim},
                                  family_.books, book_of_.data(), &out);
    EXPECT_TRUE(s || out.empty());
    return s.code();
  };
  EXPECT_EQ(code(64, 128), StatusCode::kOk);
  for (auto [tokens, dims] : {std::pair{0, 128}, {65, 128}, {64, 0}, {64, 4097}}) {
    EXPECT_EQ(code(tokens, dims), StatusCode::kInvalidArgument);
  }
  exponents_[5] = 5;
  EXPECT_EQ(code(64, 128), StatusCode::kInvalidArgument);
  exponents_[5] = 4;
  book_of_[7] = static_cast<uint8_t>(family_.books.size());
  EXPECT_EQ(code(64, 128), StatusCode::kInvalidArgument);
  book_of_[7] = 0;
  const BookFamily good = rows_.family(Component::kKey, 2, BlockMode::kPair, 1, 2, 0);
  family_ = good;
  family_.books[1].table_id = 7;
  EXPECT_EQ(code(64, 128), StatusCode::kInvalidArgument);
  family_ = good;
  family_.books[1].component = Component::kValue;
  EXPECT_EQ(code(64, 128), StatusCode::kInvalidArgument);
  family_.books.clear();
  EXPECT_EQ(code(64, 128), StatusCode::kInvalidArgument);
}

// What a block costs beside its code words, in bits a code: smooth codes, 64 tokens, exponents of
// 13 values for keys and within 2 octaves for values. Version 1 costs 0.19 at 64 channels with one
// stream a lane and 0.30 with two, without any exponents.
TEST_F(CodedFamilyTest, CostsLittleBesideItsCodeWords) {
  for (int32_t head_dim : {64, 128}) {
    for (int32_t streams : {1, 2}) {
      for (Component c : {Component::kKey, Component::kValue}) {
        const BookFamily family = rows_.family(c, 1, BlockMode::kPair, streams, 3, 0);
        BlockStats stats;
        for (int i = 0; i < 50; ++i) {
          const auto codes = rows_.source.bell(64 * head_dim, 1.5, 0, false);
          std::vector<int8_t> e = rows_.key_exponents(64);
          if (c == Component::kValue) {
            for (int8_t& x : e) x = static_cast<int8_t>(rows_.source.below(16) + 20);
          }
          std::vector<uint8_t> bytes;
          ASSERT_TRUE(
              encode_block({codes.data(), e.data(), 64, head_dim}, family.books, nullptr, &bytes));
          stats.add_blocks(bytes.data(), static_cast<int64_t>(bytes.size()));
        }
        const double n = 50.0 * 64 * head_dim;
        std::printf(
            "%d dims, %d streams, %s: header %.4f, exponents %.4f, lengths %.4f, padding %.4f\n",
            head_dim, streams, c == Component::kKey ? "keys" : "values", stats.header_bits / n,
            stats.exponent_bits / n, stats.length_bits / n, stats.padding_bits / n);
        const double without = stats.header_bits + stats.length_bits + stats.padding_bits;
        EXPECT_LT(without / n, (streams == 1 ? 0.12 : 0.18) * 64 / head_dim) << "seed " << seed_;
        EXPECT_LE(stats.exponent_bits / n, 4.0 / head_dim);
      }
    }
  }
}

// Bytes, pinned: a change here is a change of the format.
TEST(CodedBlockGolden, BytesStayTheSame) {
  const auto hash = [](const std::vector<uint8_t>& bytes) {
    uint64_t h = 0xcbf29ce484222325u;
    for (uint8_t b : bytes) h = (h ^ b) * 0x100000001b3u;
    return h;
  };
  uint32_t x = 12345;
  const auto draw = [&] {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i)
      x = x * 1664525u + 1013904223u, sum += static_cast<int32_t>(x >> 29);
    return sum - 14;
  };
  std::vector<uint64_t> found;
  for (int32_t head_dim : {64, 80, 256}) {
    for (Component c : {Component::kKey, Component::kValue}) {
      std::vector<float> tokens(300 * static_cast<size_t>(head_dim));
      for (size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = static_cast<float>(draw()) * (1 + i % head_dim % 5) / 16.0f;
      }
      Rope turned{RopePairing::kHalves, head_dim, {}};
      for (int32_t i = 0; i < head_dim / 2; ++i) {
        turned.inv_freq.push_back(1.0f / static_cast<float>(1 + i * i));
      }
      const RopeTable rope = *make_rope_table(turned, head_dim, 304);
      std::vector<double> energy;
      for (int32_t d = 0; d < head_dim; ++d) energy.push_back(1 + d % 7);
      WeightedFit fit;
      fit.k = 0.5, fit.v = 0.45;  // of the recorded bytes
      fit.query_energy = energy.data();
      const WeightedTokens all{tokens.data(), 300, 4};
      const WeightedRow row = *fit_weighted_row(fit, head_dim, {tokens.data(), 256, 4}, &rope);
      std::vector<float> significance;
      for (int i = 0; i < 300; ++i) significance.push_back((draw() + 15) / 1024.0f);
      std::vector<int8_t> e(300);
      std::vector<int16_t> codes(tokens.size());
      ASSERT_TRUE(importance_exponents(significance.data(), 300, 4, e.data()));
      ASSERT_TRUE(token_exponents(c, all, head_dim, e.data(), e.data()));
      ASSERT_TRUE(quantize_weighted(row, c, all, e.data(), codes.data()));
      BookSpec spec{3, true, {}};
      spec.code.streams_per_lane = c == Component::kKey ? 1 : 2;
      const Result<BookChoice> books = choose_books(c, head_dim, {{codes.data(), 256}}, spec);
      ASSERT_TRUE(books.is_ok()) << books.status().message();
      std::vector<uint8_t> bytes;
      for (int32_t t = 0; t < 300; t += 64) {
        const BlockContent block{codes.data() + t * head_dim, e.data() + t, std::min(64, 300 - t),
                                 head_dim};
        ASSERT_TRUE(encode_block(block, books->family.books, books->book_of.data(), &bytes));
      }
      found.push_back(hash(bytes));
    }
  }
  EXPECT_EQ(found, (std::vector<uint64_t>{6386220288878619424u, 15134576418180378062u,
                                          6592991840019164448u, 12968213785920670955u,
                                          16361175777974434854u, 3964959835242666772u}));
}

}  // namespace
}  // namespace tierkv
