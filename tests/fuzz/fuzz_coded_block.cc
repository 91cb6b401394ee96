// SPDX-License-Identifier: Apache-2.0
// Coded blocks: any codes and exponents come back, and any bytes are refused or give the same on
// both paths. The input draws the family, the shape, the codes, the exponents and the damage.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "codec/format/huffman.h"
#include "codec/host/coded/coded_block.h"
#include "tests/fuzz/fuzz_input.h"
#include "tools/analysis/scheme/block_stats.h"

namespace {

using namespace tierkv;
using fuzz::Input;

void require(bool condition) {
  if (!condition) std::abort();
}

// A complete code over a small alphabet: the counts are bytes of the input, repeated.
bool draw_book(Input* in, Codebook* c) {
  const int32_t lowest = c->mode == BlockMode::kSplit ? 17 : 2;
  const int32_t choices = c->mode == BlockMode::kQuad ? 3 : 8;
  c->levels = lowest + static_cast<int32_t>(in->byte()) % choices;
  c->base = static_cast<int8_t>(in->byte());
  uint64_t counts[8];
  for (uint64_t& n : counts) n = in->byte() >> in->byte() % 8;
  std::vector<uint64_t> of_symbols(static_cast<size_t>(c->symbol_count()));
  for (size_t s = 0; s < of_symbols.size(); ++s) of_symbols[s] = counts[(s + s / 8) % 8];
  const int32_t limit = 2 + static_cast<int32_t>(in->byte() % 8);
  if (!find_code_lengths(of_symbols, limit, &c->lengths)) return false;
  c->max_length = *std::max_element(c->lengths.begin(), c->lengths.end());
  return complete_codebook(c).is_ok();
}

bool draw_family(Input* in, BookFamily* family) {
  const uint32_t what = in->byte();
  Codebook like;
  like.mode = static_cast<BlockMode>(4 + what % 4);
  like.component = static_cast<Component>(what / 4 % 2);
  like.streams_per_lane = 1 + static_cast<int32_t>(what / 8 % 2);
  for (uint32_t i = 0; i <= what / 16 % 4; ++i) {
    Codebook book = like;
    book.table_id = static_cast<uint8_t>(i);
    if (!draw_book(in, &book)) return false;
    family->books.push_back(std::move(book));
  }
  return family->validate().is_ok();
}

struct Shape {
  int32_t tokens, head_dim;
};

Shape draw_shape(Input* in) {
  const uint32_t dims = in->byte(), tokens = in->byte();
  Shape shape;
  shape.head_dim = 1 + static_cast<int32_t>(dims < 0xf0 ? dims % 40 : 10 * (dims - 0xef));
  const int32_t most = std::min(64, 2048 / shape.head_dim);
  shape.tokens = 1 + static_cast<int32_t>(tokens) % most;
  return shape;
}

struct Content {
  std::vector<int16_t> codes;
  std::vector<int8_t> exponents;
  bool operator==(const Content&) const = default;
};

// A refused block leaves zeros.
bool decode(const std::vector<uint8_t>& bytes, Shape shape, const BookFamily& family,
            Content* out) {
  const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
  const auto tokens = static_cast<size_t>(shape.tokens), n = tokens * shape.head_dim;
  *out = {std::vector<int16_t>(n, 0x5a5a), std::vector<int8_t>(tokens, 0x5a)};
  const Status s =
      decode_block(exact.data(), static_cast<int64_t>(exact.size()), family.books,
                   {out->codes.data(), out->exponents.data(), shape.tokens, shape.head_dim});
  const Content zeros{std::vector<int16_t>(n, 0), std::vector<int8_t>(tokens, 0)};
  require(s.is_ok() || (s.code() == StatusCode::kCorrupt && *out == zeros));
  return s.is_ok();
}

void repair_checksum(std::vector<uint8_t>* bytes) {
  if (bytes->size() < 16) return;
  const size_t size = 16 * load_u16(bytes->data() + 12);
  if (size >= 16 && size <= bytes->size()) {
    store_u16(bytes->data() + 14, block_checksum(bytes->data(), static_cast<int32_t>(size)));
  }
}

Content draw_content(Input* in, Shape shape, const BookFamily& family) {
  const bool key = family.books.front().component == Component::kKey;
  const uint32_t least = in->byte(), range = 1 + in->byte();
  const std::vector<uint8_t> drawn = in->rest();
  const auto byte = [&](size_t i) { return drawn.empty() ? 0 : int32_t{drawn[i % drawn.size()]}; };
  Content content;
  for (size_t i = 0; i < static_cast<size_t>(shape.tokens); ++i) {
    const uint32_t e = least + static_cast<uint32_t>(byte(3 * i)) % range;
    content.exponents.push_back(static_cast<int8_t>(key ? static_cast<int32_t>(e % 13) - 8
                                                        : static_cast<int32_t>(e % 256) - 128));
  }
  for (size_t i = 0; i < static_cast<size_t>(shape.tokens) * shape.head_dim; ++i) {
    const Codebook& book = family.books[i / 16 % family.books.size()];
    const int32_t x = byte(i), wide = byte(i * 7 + 1);
    content.codes.push_back(
        static_cast<int16_t>(book.base + x % book.levels + (x == 255 ? wide * 257 : 0)));
  }
  return content;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const uint32_t what = in.byte();
  BookFamily family;
  if (!draw_family(&in, &family)) return 0;
  const Shape shape = draw_shape(&in);
  Content back;
  if (what % 4 == 0) {  // hostile bytes as they are
    std::vector<uint8_t> bytes = in.rest();
    if (what & 8) repair_checksum(&bytes);
    decode(bytes, shape, family, &back);
    return 0;
  }
  std::vector<uint8_t> book_of;
  for (int32_t f = 0; f < dim_block_count(shape.head_dim); ++f) {
    book_of.push_back(static_cast<uint8_t>(in.byte() % family.books.size()));
  }
  // Damage first, so that changing the codes leaves it alone.
  struct {
    uint32_t at, flip;
  } damage[4];
  for (auto& d : damage) d = {in.u16(), in.byte()};
  const Content content = draw_content(&in, shape, family);
  std::vector<uint8_t> bytes;
  require(
      encode_block({content.codes.data(), content.exponents.data(), shape.tokens, shape.head_dim},
                   family.books, book_of.data(), &bytes)
          .is_ok());
  BlockStats stats;
  stats.add_blocks(bytes.data(), static_cast<int64_t>(bytes.size()));
  require(stats.total_bits() == static_cast<int64_t>(8 * bytes.size()));
  if (what % 4 == 1) {
    require(decode(bytes, shape, family, &back) && back == content);
    return 0;
  }
  for (const auto& d : damage) bytes[d.at % bytes.size()] ^= static_cast<uint8_t>(d.flip);
  if (what % 4 == 3) repair_checksum(&bytes);
  decode(bytes, shape, family, &back);
  return 0;
}
