// SPDX-License-Identifier: Apache-2.0
// Coded blocks against an independent decoder, written from docs/reference/format.md alone.
#include <gtest/gtest.h>

#include <map>

#include "tests/codec/support/weighted_source.h"

namespace tierkv {
namespace {

// Reads one slice. Shares no code with the library but the
// codebooks' lengths; assumes good bytes.
class TextDecoder {
 public:
  TextDecoder(const uint8_t* block, const BookFamily& family) : b_(block) {
    for (const Codebook& c : family.books) {
      Book book{c.levels, c.base, {}};
      uint32_t word = 0;
      for (int32_t length = 1; length <= 14; ++length) {
        word <<= 1;
        for (size_t s = 0; s < c.lengths.size(); ++s) {
          if (c.lengths[s] == length) book.symbol[{length, word++}] = static_cast<int32_t>(s);
        }
      }
      books_.push_back(book);
    }
  }
  int32_t mode() const { return b_[1] & 15; }
  int32_t bytes() const { return 16 * u16(12); }
  int32_t tokens() const { return b_[4]; }
  int32_t dims() const { return b_[5]; }

  std::vector<int8_t> exponents() const {
    std::vector<int8_t> e;
    const int32_t width = b_[11] & 15;
    for (int32_t t = 0; t < tokens(); ++t) {
      e.push_back(static_cast<int8_t>(static_cast<int8_t>(b_[3]) + bits(16, t * width, width)));
    }
    return e;
  }

  // [tokens][dims]
  std::vector<int16_t> codes() {
    all_.assign(64 * 128, 0);
    const int32_t exponents_end = 16 + 4 * ((tokens() * (b_[11] & 15) + 31) / 32);
    if (mode() < 4) {
      const auto base = static_cast<int16_t>(u16(6));
      add_raw_tiles((exponents_end + 15) / 16 * 16, 2 << mode(), base);
    } else {
      add_coded(exponents_end);
    }
    std::vector<int16_t> out;
    for (int32_t t = 0; t < tokens(); ++t) {
      for (int32_t d = 0; d < dims(); ++d) out.push_back(static_cast<int16_t>(all_[t * 128 + d]));
    }
    return out;
  }

 private:
  struct Book {
    int32_t levels, base;
    std::map<std::pair<int32_t, uint32_t>, int32_t> symbol;
  };

  void add_coded(int32_t lengths) {
    const int32_t streams = 32 * (b_[1] >> 4 & 3), width = b_[11] >> 4;
    int32_t payload = lengths + 4 * ((streams * width + 31) / 32);
    if (mode() == 7) payload = add_raw_tiles((payload + 15) / 16 * 16, 4, 0);
    int32_t start = 0;
    for (int32_t i = 0; i < streams; ++i) {
      const int32_t end = start + u16(8) + static_cast<int32_t>(bits(lengths, i * width, width));
      EXPECT_EQ(read_stream(i, 8 * payload + start), 8 * payload + end);
      start = end;
    }
    const int32_t exceptions = payload + 4 * ((start + 31) / 32);
    for (int32_t i = 0; i < b_[10]; ++i) {
      all_[u16(exceptions + 4 * i)] += static_cast<int16_t>(u16(exceptions + 4 * i + 2));
    }
  }

  // Adds base + value to every code; where the tiles end. docs/reference/format.md: words of a lane
  // in pieces of 4, 2 and 1.
  int32_t add_raw_tiles(int32_t at, int32_t bits_each, int32_t base) {
    const int32_t own = (dims() + 15) / 16, blocks = bits_each == 2 ? (own + 1) / 2 * 2 : own;
    const int32_t words = blocks * bits_each / 4, tiles = (tokens() + 15) / 16;
    for (int32_t t = 0; t < tiles * 16; ++t) {
      for (int32_t d = 0; d < own * 16; ++d) {
        const int32_t row = is_key() ? t % 16 : d % 16, col = is_key() ? d % 16 : t % 16;
        const int32_t f = d / 16, lane = row % 8 * 4 + col % 8 / 2;
        int32_t w = 0, bit_at = col % 2 * 16;
        if (bits_each == 16) w = 4 * f + row / 8 + 2 * (col / 8);
        if (bits_each == 8) w = 2 * f + t % 16 / 8, bit_at += d % 16 / 8 * 8;
        if (bits_each == 4) w = f, bit_at += t % 16 / 8 * 8 + d % 16 / 8 * 4;
        if (bits_each == 2) w = f / 2, bit_at += t % 16 / 8 * 8 + f % 2 * 4 + d % 16 / 8 * 2;
        const int32_t quads = words / 4 * 4, pairs = words / 2 * 2;
        const int32_t byte = w < quads   ? w / 4 * 512 + 16 * lane + w % 4 * 4
                             : w < pairs ? 128 * quads + 8 * lane + w % 4 * 4
                                         : 128 * (words - 1) + 4 * lane;
        all_[t * 128 + d] +=
            base + static_cast<int32_t>(bits(at + t / 16 * words * 128 + byte, bit_at, bits_each));
      }
    }
    return at + tiles * words * 128;
  }

  int32_t u16(int32_t at) const { return b_[at] | b_[at + 1] << 8; }
  uint32_t bit(int32_t at) const { return b_[at / 8] >> at % 8 & 1; }
  uint32_t bits(int32_t byte, int32_t from, int32_t count) const {
    uint32_t x = 0;
    for (int32_t i = 0; i < count; ++i) x |= bit(8 * byte + from + i) << i;
    return x;
  }

  // The pairs of a stream from this bit on; the bit after the last one.
  int32_t read_stream(int32_t stream, int32_t at) {
    const int32_t blocks = (dims() + 15) / 16, tiles = (tokens() + 15) / 16;
    const int32_t per_lane = b_[1] >> 4 & 3, group = mode() == 6 ? 2 : 1;
    for (int32_t p = 0; p < 4 * tiles * blocks; p += group) {
      if (per_lane == 2 && p / group % 2 != stream / 32) continue;
      const int32_t f = dim_block(p / 4 % blocks);
      const Book& book = books_[u16(6) >> (2 * f) & 3];
      for (int32_t code = 0; code < 2 * group;) {
        int32_t symbol = read_symbol(book, &at);
        const int32_t step = mode() == 7 ? 16 : 1, radix = (book.levels + step - 1) / step;
        for (int32_t n = mode() == 4 ? 1 : 2 * group; n > 0; --n, ++code, symbol /= radix) {
          put(p + code / 2, stream % 32, code % 2, book.base + symbol % radix * step);
        }
      }
    }
    return at;
  }
  int32_t read_symbol(const Book& book, int32_t* at) const {
    uint32_t word = 0;
    for (int32_t length = 1; length <= 14; ++length) {
      word = word << 1 | bit((*at)++);
      const auto found = book.symbol.find({length, word});
      if (found != book.symbol.end()) return found->second;
    }
    ADD_FAILURE() << "no code word";
    return 0;
  }
  // The one that a stream passes as number i.
  int32_t dim_block(int32_t i) const {
    const int32_t n = (dims() + 15) / 16, h = (n + 1) / 2;
    return !is_key() ? i : i % 2 == 0 ? i / 2 : h + i / 2;
  }
  bool is_key() const { return b_[1] >> 6 == 0; }
  void put(int32_t pair, int32_t lane, int32_t second, int32_t code) {
    const int32_t blocks = (dims() + 15) / 16;
    const int32_t r = pair % 4, f = dim_block(pair / 4 % blocks), tile = pair / 4 / blocks;
    const int32_t row = lane / 4 + 8 * (r % 2), col = 2 * (lane % 4) + 8 * (r / 2) + second;
    all_[(16 * tile + (is_key() ? row : col)) * 128 + 16 * f + (is_key() ? col : row)] += code;
  }

  const uint8_t* b_;
  std::vector<Book> books_;
  std::vector<int32_t> all_;
};

TEST(CodedBlockText, DecodesFromTheTextOfTheFormat) {
  const uint32_t seed = std::random_device{}();
  WeightedSourceOfRows rows(seed);
  CodeSource& source = rows.source;
  std::map<int32_t, int32_t> seen;  // of each mode
  for (int trial = 0; trial < 400; ++trial) {
    const int32_t dims[] = {64, 80, 96, 128, 1 + source.below(128)};
    const int32_t head_dim = dims[source.below(5)], tokens = 1 + source.below(64);
    const auto mode = static_cast<BlockMode>(4 + source.below(4));
    const auto c = static_cast<Component>(source.below(2));
    const double spread = source.spread_for(mode);
    const BookFamily family =
        rows.family(c, 1 + source.below(4), mode, 1 + source.below(2), spread, 3);
    const auto book_of = rows.book_of(head_dim, family.books.size());
    const int64_t count = int64_t{tokens} * head_dim;
    // Codes that no book suits make raw blocks.
    const int32_t range = 1 << (1 + source.below(15));
    const auto codes = source.below(3) == 0 ? source.uniform_codes(count, -99, range)
                                            : source.bell(count, spread, 3, false);
    const auto e = c == Component::kKey ? rows.key_exponents(tokens) : rows.value_exponents(tokens);
    std::vector<uint8_t> bytes;
    ASSERT_TRUE(encode_block({codes.data(), e.data(), tokens, head_dim}, family.books,
                             book_of.data(), &bytes));
    TextDecoder text(bytes.data(), family);
    EXPECT_EQ(text.bytes(), static_cast<int32_t>(bytes.size()));
    EXPECT_EQ(text.exponents(), e) << "seed " << seed;
    ++seen[text.mode()];
    ASSERT_EQ(text.codes(), codes) << "seed " << seed << " mode " << block_mode_name(mode);
  }
  // Raw modes come least: those of 2 and of 4 bits 2 times in 45, 17 of 400.
  EXPECT_EQ(seen.size(), 8u) << "seed " << seed;
}

}  // namespace
}  // namespace tierkv
