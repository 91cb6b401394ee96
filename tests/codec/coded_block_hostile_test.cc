// SPDX-License-Identifier: Apache-2.0
// Coded blocks against an independent decoder, written from docs/reference/format.md alone, and
// against damage.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "codec/format/coded_block.h"
#include "tests/support/code_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

// Reads one slice from the text of the format. Shares no code with the library but the codebook's
// lengths; assumes good bytes.
class TextDecoder {
 public:
  TextDecoder(const uint8_t* block, const Codebook& c) : b_(block), c_(c) {
    uint32_t word = 0;
    for (int32_t length = 1; length <= 14; ++length) {
      word <<= 1;
      for (size_t s = 0; s < c.lengths.size(); ++s) {
        if (c.lengths[s] == length) symbol_[{length, word++}] = static_cast<int32_t>(s);
      }
    }
  }
  int32_t bytes() const { return 16 * u16(12); }
  int32_t dims() const { return b_[5]; }

  // [tokens][dims]
  std::vector<int16_t> decode() {
    tokens_ = b_[4];
    blocks_ = (dims() + 15) / 16;
    tiles_ = (tokens_ + 15) / 16;
    codes_.assign(static_cast<size_t>(64 * 128), 0);
    const int32_t mode = b_[1] & 15, base = static_cast<int16_t>(u16(6));
    if (mode < 4) {
      raw_tiles(16, 2 << mode, base);
    } else {
      streams(mode, base);
    }
    std::vector<int16_t> out;
    for (int32_t t = 0; t < tokens_; ++t) {
      for (int32_t d = 0; d < dims(); ++d) {
        out.push_back(static_cast<int16_t>(codes_[t * 128 + d]));
      }
    }
    return out;
  }

 private:
  int32_t u16(int32_t at) const { return b_[at] | b_[at + 1] << 8; }
  uint32_t u32(int32_t at) const { return u16(at) | static_cast<uint32_t>(u16(at + 2)) << 16; }

  // Adds base + value to every code. docs/reference/format.md: words of a lane in pieces of 4, 2
  // and 1.
  int32_t raw_tiles(int32_t at, int32_t bits, int32_t base) {
    const int32_t blocks = bits == 2 ? (blocks_ + 1) / 2 * 2 : blocks_;
    const int32_t words = blocks * bits / 4;
    for (int32_t t = 0; t < tiles_ * 16; ++t) {
      for (int32_t d = 0; d < blocks_ * 16; ++d) {
        const bool key = b_[3] == 0;
        const int32_t row = key ? t % 16 : d % 16, col = key ? d % 16 : t % 16, f = d / 16;
        const int32_t lane = row % 8 * 4 + col % 8 / 2;
        int32_t w = 0, bit = col % 2 * 16;
        if (bits == 16) w = 4 * f + row / 8 + 2 * (col / 8);
        if (bits == 8) w = 2 * f + t % 16 / 8, bit += d % 16 / 8 * 8;
        if (bits == 4) w = f, bit += t % 16 / 8 * 8 + d % 16 / 8 * 4;
        if (bits == 2) w = f / 2, bit += t % 16 / 8 * 8 + f % 2 * 4 + d % 16 / 8 * 2;
        int32_t piece = 0, left = words, size = 4;
        while (w >= size)
          w -= size, piece += size * 128, left -= size, size = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (left < 4) size = left >= 2 ? 2 : 1;
        if (w >= size) w -= size, piece += size * 128, size = 1;
        const uint32_t word = u32(at + t / 16 * words * 128 + piece + lane * size * 4 + w * 4);
        codes_[t * 128 + d] += base + static_cast<int32_t>(word >> bit & ((1u << bits) - 1));
      }
    }
    return at + tiles_ * words * 128;
  }

  int32_t next_symbol(int32_t payload, int32_t* bit) {
    uint32_t word = 0;
    for (int32_t length = 1; length <= 14; ++length, ++*bit) {
      word = word << 1 | (u32(payload + *bit / 32 * 4) >> (*bit % 32) & 1);
      const auto found = symbol_.find({length, word});
      if (found != symbol_.end()) return ++*bit, found->second;
    }
    ADD_FAILURE() << "no code word";
    return 0;
  }

  void streams(int32_t mode, int32_t base) {
    const int32_t per_lane = b_[1] >> 4, count = 32 * per_lane;
    int32_t payload = 16 + 2 * count;
    if (mode == 7) payload = raw_tiles(payload, 4, 0);
    for (int32_t i = 0; i < count; ++i) {
      int32_t bit = u16(16 + 2 * i);
      for (int32_t pair = 0; pair < 4 * tiles_ * blocks_;) {
        const int32_t group = mode == 6 ? pair / 2 : pair;
        if (per_lane == 2 && group % 2 != i / 32) {
          pair += mode == 6 ? 2 : 1;
          continue;
        }
        if (mode == 4) {
          put(pair, i % 32, 0, base + next_symbol(payload, &bit));
          put(pair, i % 32, 1, base + next_symbol(payload, &bit));
          ++pair;
          continue;
        }
        int32_t symbol = next_symbol(payload, &bit);
        const int32_t radix = mode == 7 ? (c_.levels + 15) / 16 : c_.levels;
        for (int32_t digit = 0; digit < (mode == 6 ? 4 : 2); ++digit, symbol /= radix) {
          put(pair + digit / 2, i % 32, digit % 2, base + symbol % radix * (mode == 7 ? 16 : 1));
        }
        pair += mode == 6 ? 2 : 1;
      }
      EXPECT_EQ(bit, i + 1 < count ? u16(16 + 2 * (i + 1)) : u16(8));
    }
    const int32_t exceptions = payload + (u16(8) + 31) / 32 * 4;
    for (int32_t i = 0; i < u16(10); ++i) {
      codes_[u16(exceptions + 4 * i)] += static_cast<int16_t>(u16(exceptions + 4 * i + 2));
    }
  }

  void put(int32_t pair, int32_t lane, int32_t second, int32_t code) {
    const int32_t r = pair % 4, f = pair / 4 % blocks_, tile = pair / 4 / blocks_;
    const int32_t g = lane / 4, t = lane % 4;
    const int32_t row = g + 8 * (r % 2), col = 2 * t + 8 * (r / 2) + second;
    const int32_t token = 16 * tile + (b_[3] == 0 ? row : col),
                  dim = 16 * f + (b_[3] == 0 ? col : row);
    codes_[token * 128 + dim] += code;
  }

  const uint8_t* b_;
  const Codebook& c_;
  std::map<std::pair<int32_t, uint32_t>, int32_t> symbol_;
  std::vector<int32_t> codes_;
  int32_t tokens_ = 0, blocks_ = 0, tiles_ = 0;
};

class HostileBlockTest : public RandomTest {
 protected:
  HostileBlockTest() : source_(seed_) {}
  // A block with exceptions and its codebook, in a random mode.
  void make_block(int32_t tokens, int32_t head_dim) {
    CodebookSpec spec;
    spec.mode = static_cast<BlockMode>(4 + source_.below(4));
    spec.streams_per_lane = 1 + source_.below(2);
    const auto component = static_cast<Component>(source_.below(2));
    const double spread = source_.spread_for(*spec.mode);
    CodeHistogram h(component, head_dim);
    const auto seen = source_.bell(int64_t{128} * head_dim, 0.8 * spread, 3, false);
    h.add(seen.data(), 128);
    codebook_ = *build_codebook(h, spec);
    codes_ = source_.bell(int64_t{tokens} * head_dim, spread, 3, false);
    if (source_.below(4) == 0)
      codes_ = source_.uniform_codes(codes_.size(), -99, 1 << source_.below(15));
    tokens_ = tokens;
    head_dim_ = head_dim;
    bytes_.clear();
    ASSERT_TRUE(encode_block(codes_.data(), tokens, head_dim, codebook_, &bytes_));
  }
  Status decode(const std::vector<uint8_t>& bytes, std::vector<int16_t>* codes) {
    // A copy of the exact size, so that the address sanitizer sees every read outside.
    const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
    codes->assign(codes_.size(), int16_t{0x5a5a});
    return decode_block(exact.data(), static_cast<int64_t>(exact.size()), tokens_, head_dim_,
                        codebook_, codes->data());
  }
  // The decoder refuses and leaves zeros.
  void expect_refused(const std::vector<uint8_t>& bytes, const char* what) {
    std::vector<int16_t> codes;
    EXPECT_EQ(decode(bytes, &codes).code(), StatusCode::kCorrupt) << what << seed_;
    EXPECT_EQ(codes, std::vector<int16_t>(codes_.size(), 0)) << what;
  }
  static void repair_checksum(std::vector<uint8_t>* bytes) {
    const auto size = std::min<size_t>(bytes->size(), 16 * load_u16(bytes->data() + 12));
    store_u16(bytes->data() + 14, block_checksum(bytes->data(), static_cast<int32_t>(size)));
  }
  CodeSource source_;
  Codebook codebook_;
  std::vector<int16_t> codes_;
  std::vector<uint8_t> bytes_;
  int32_t tokens_ = 0, head_dim_ = 0;
};

TEST_F(HostileBlockTest, DecodesFromTheTextOfTheFormat) {
  for (int trial = 0; trial < 300; ++trial) {
    const int32_t dims[] = {64, 96, 128, 256, 16, 1 + source_.below(300)};
    ASSERT_NO_FATAL_FAILURE(make_block(1 + source_.below(64), dims[source_.below(6)]));
    std::vector<int16_t> back(codes_.size(), 0x5a5a);
    const uint8_t* block = bytes_.data();
    for (int32_t first = 0; first < head_dim_; first += 128) {
      TextDecoder text(block, codebook_);
      const std::vector<int16_t> slice = text.decode();
      for (int32_t t = 0; t < tokens_; ++t) {
        std::copy_n(slice.data() + t * text.dims(), text.dims(),
                    back.data() + t * head_dim_ + first);
      }
      block += text.bytes();
    }
    EXPECT_EQ(block, bytes_.data() + bytes_.size());
    ASSERT_EQ(back, codes_) << "seed " << seed_ << " mode " << block_mode_name(codebook_.mode);
  }
}

TEST_F(HostileBlockTest, EveryFlippedBitIsRefused) {
  for (int trial = 0; trial < 4; ++trial) {
    ASSERT_NO_FATAL_FAILURE(make_block(17, 48));
    for (size_t bit = 0; bit < 8 * bytes_.size(); ++bit) {
      std::vector<uint8_t> damaged = bytes_;
      damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      std::vector<int16_t> codes;
      ASSERT_EQ(decode(damaged, &codes).code(), StatusCode::kCorrupt) << bit;
      ASSERT_EQ(codes, std::vector<int16_t>(codes_.size(), 0));
    }
  }
}

TEST_F(HostileBlockTest, EveryTruncationAndExtensionIsRefused) {
  ASSERT_NO_FATAL_FAILURE(make_block(30, 160));
  for (size_t n = 0; n < bytes_.size(); ++n) {
    expect_refused(std::vector<uint8_t>(bytes_.begin(), bytes_.begin() + n), "cut");
  }
  std::vector<uint8_t> longer = bytes_;
  longer.resize(bytes_.size() + 16);
  expect_refused(longer, "longer");
}

// With the checksum repaired, the structure alone must hold: a flip is refused or gives some codes,
// and refused blocks leave zeros. A flipped code word nearly always moves the end of its stream: of
// coded blocks half of the damage is refused, give or take a fifth a block; of raw ones hardly any.
TEST_F(HostileBlockTest, DamageBehindAGoodChecksumIsRefusedOrHarmless) {
  int32_t refused = 0, total = 0;
  for (int trial = 0; trial < 20; ++trial) {
    ASSERT_NO_FATAL_FAILURE(make_block(1 + source_.below(64), 16 * (1 + source_.below(10))));
    const bool is_coded = !is_raw_mode(load_header(bytes_.data()).mode);
    for (int flip = 0; flip < 300; ++flip) {
      std::vector<uint8_t> damaged = bytes_;
      for (int n = 1 + source_.below(3); n > 0; --n) {
        const int32_t bit = source_.below(static_cast<int32_t>(8 * bytes_.size()));
        damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      }
      repair_checksum(&damaged);
      std::vector<int16_t> codes;
      const Status s = decode(damaged, &codes);
      EXPECT_TRUE(s || codes == std::vector<int16_t>(codes_.size(), 0)) << "seed " << seed_;
      refused += is_coded && !s;
      total += is_coded;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(refused, total / 4);
}

TEST_F(HostileBlockTest, FieldsAreCheckedOneByOne) {
  do {
    ASSERT_NO_FATAL_FAILURE(make_block(64, 128));
  } while (is_raw_mode(load_header(bytes_.data()).mode) ||
           load_header(bytes_.data()).exceptions < 2);
  const auto change = [&](const char* what, auto edit) {
    std::vector<uint8_t> damaged = bytes_;
    edit(damaged.data());
    repair_checksum(&damaged);
    expect_refused(damaged, what);
  };
  const BlockHeader h = load_header(bytes_.data());
  const BlockLayout at = block_layout(h);
  change("version", [](uint8_t* b) { b[0] = 2; });
  for (int mode = 0; mode < 16; ++mode) {
    if (mode != static_cast<int>(h.mode))
      change("mode", [&](uint8_t* b) { b[1] = uint8_t(b[1] & 0xf0) | mode; });
  }
  for (int streams = 0; streams < 16; ++streams) {
    if (streams != h.streams_per_lane)
      change("streams", [&](uint8_t* b) { b[1] = uint8_t(b[1] & 15) | streams << 4; });
  }
  change("table", [](uint8_t* b) { b[2] ^= 1; });
  change("component", [](uint8_t* b) { b[3] ^= 1; });
  change("component", [](uint8_t* b) { b[3] = 7; });
  for (int tokens : {0, 63, 65, 255}) change("tokens", [&](uint8_t* b) { b[4] = uint8_t(tokens); });
  for (int dims : {0, 127, 129, 255}) change("dims", [&](uint8_t* b) { b[5] = uint8_t(dims); });
  change("base", [](uint8_t* b) { b[6] ^= 1; });
  change("payload", [&](uint8_t* b) { store_u16(b + 8, h.payload_bits - 1); });
  change("payload", [&](uint8_t* b) { store_u16(b + 8, 65535); });
  change("exceptions", [&](uint8_t* b) { store_u16(b + 10, h.exceptions - 1); });
  change("exceptions", [&](uint8_t* b) { store_u16(b + 10, 65535); });
  change("units", [&](uint8_t* b) { store_u16(b + 12, 0); });
  change("units", [&](uint8_t* b) { store_u16(b + 12, h.units + 1); });
  change("first start", [&](uint8_t* b) { store_u16(b + 16, 1); });
  change("a start", [&](uint8_t* b) { store_u16(b + 18, load_u16(b + 18) + 1); });
  change("a start", [&](uint8_t* b) { store_u16(b + 18, 65535); });
  change("index order",
         [&](uint8_t* b) { store_u16(b + at.exceptions, load_u16(b + at.exceptions + 4)); });
  change("index range",
         [&](uint8_t* b) { store_u16(b + at.exceptions + 4 * (h.exceptions - 1), 64 * 128); });
  change("delta zero", [&](uint8_t* b) { store_u16(b + at.exceptions + 2, 0); });
  if (at.end < at.bytes) change("padding", [&](uint8_t* b) { b[at.end] = 1; });
  if (h.payload_bits % 32 != 0)
    change("last word", [&](uint8_t* b) { b[at.exceptions - 1] |= 0x80; });
}

TEST_F(HostileBlockTest, AnotherCodebookIsRefused) {
  do {
    ASSERT_NO_FATAL_FAILURE(make_block(64, 128));
  } while (is_raw_mode(load_header(bytes_.data()).mode));
  Codebook other = codebook_;
  other.table_id ^= 1;
  std::swap(codebook_, other);
  expect_refused(bytes_, "table id");
  codebook_ = other;
  codebook_.base += 1;
  expect_refused(bytes_, "base");
}

// The bytes of version 1, pinned: a change here is a change of the format.
TEST(CodedBlockGolden, BytesStayTheSame) {
  const auto hash = [](const std::vector<uint8_t>& bytes) {
    uint64_t h = 0xcbf29ce484222325u;
    for (uint8_t b : bytes) h = (h ^ b) * 0x100000001b3u;
    return h;
  };
  std::vector<int16_t> codes(40 * 96);
  uint32_t x = 12345;
  for (int16_t& c : codes) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i)
      x = x * 1664525u + 1013904223u, sum += static_cast<int32_t>(x >> 29);
    c = static_cast<int16_t>(sum - 14);
  }
  codes[77] = 1000;
  std::vector<uint64_t> found;
  for (BlockMode mode :
       {BlockMode::kSingle, BlockMode::kPair, BlockMode::kQuad, BlockMode::kSplit}) {
    for (Component component : {Component::kKey, Component::kValue}) {
      CodeHistogram h(component, 96);
      h.add(codes.data(), 40);
      CodebookSpec spec;
      spec.mode = mode;
      spec.streams_per_lane = component == Component::kKey ? 1 : 2;
      const Codebook c = *build_codebook(h, spec);
      std::vector<uint8_t> bytes;
      serialize_codebook(c, &bytes);
      ASSERT_TRUE(encode_block(codes.data(), 40, 96, c, &bytes));
      found.push_back(hash(bytes));
    }
  }
  EXPECT_EQ(found, (std::vector<uint64_t>{800282216250401798u, 13699588977874671710u,
                                          14445841542111421578u, 16849406332789975143u,
                                          15684344843625473356u, 15743797098539805238u,
                                          7790116045139446950u, 17377285912540819665u}));
}

}  // namespace
}  // namespace tierkv
