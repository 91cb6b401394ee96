// SPDX-License-Identifier: Apache-2.0
#include "store/rows/coded/layer_books.h"

#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"

namespace tierkv::store {
namespace {

int32_t book_count(const CodedFormat& format, Component c) {
  return c == Component::kKey ? format.key_books : 1;
}

// Attention decodes pairs.
BookSpec spec_of(const CodedFormat& format, Component c) {
  BookSpec spec;
  spec.books = book_count(format, c);
  spec.sample = true;
  spec.code.mode = BlockMode::kPair;
  spec.code.max_length = format.max_length;
  spec.code.streams_per_lane = format.streams_per_lane;
  return spec;
}

Status corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "codebooks of a layer: " + why);
}

std::vector<uint8_t> serialize_books(const LayerBooks& books) {
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  for (const BookChoice& choice : books.choice) {
    out.u32(static_cast<uint32_t>(choice.family.books.size()));
    for (const Codebook& book : choice.family.books) {
      out.u32(static_cast<uint32_t>(codebook_bytes(book)));
      serialize_codebook(book, &bytes);
    }
    out.u32(static_cast<uint32_t>(choice.book_of.size()));
    for (const uint8_t book : choice.book_of) out.u8(book);
  }
  return bytes;
}

}  // namespace

Result<LayerBooks> make_layer_books(const CodedFormat& format, int32_t head_dim,
                                    const std::vector<RowCodes> (&sample)[2]) {
  LayerBooks books;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const std::vector<RowCodes>& rows = sample[static_cast<int32_t>(c)];
    Result<BookChoice> choice = choose_books(c, head_dim, rows, spec_of(format, c));
    if (!choice && choice.status().code() == StatusCode::kUnsupported) {
      // Codes too wide for pairs: any book will do, blocks are stored raw.
      choice = choose_books(c, head_dim, std::vector<RowCodes>(rows.size()), spec_of(format, c));
    }
    if (!choice) return choice.status();
    books.choice[static_cast<int32_t>(c)] = std::move(*choice);
  }
  books.bytes = serialize_books(books);
  return books;
}

Result<LayerBooks> parse_books(const CodedFormat& format, const CacheLayout& layout,
                               std::span<const uint8_t> bytes) {
  LayerBooks books;
  ByteReader in(bytes.data(), bytes.size());
  for (const Component c : {Component::kKey, Component::kValue}) {
    BookChoice& choice = books.choice[static_cast<int32_t>(c)];
    const auto count = static_cast<uint32_t>(book_count(format, c));
    if (in.u32() != count) return corrupt("another number of them");
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t size = in.u32();
      const uint8_t* at = in.take(size);
      if (at == nullptr) return corrupt("cut short");
      Result<Codebook> book = parse_codebook(at, size);
      if (!book) return book.status();
      const bool fits = book->component == c && book->mode == BlockMode::kPair &&
                        book->streams_per_lane == format.streams_per_lane &&
                        book->max_length <= format.max_length && book->table_id == i;
      if (!fits) return corrupt("one is of another kind");
      choice.family.books.push_back(std::move(*book));
    }
    if (Status s = choice.family.validate(); !s) return corrupt(s.message());
    const uint32_t dim_blocks = in.u32();
    const int32_t expected = layout.num_kv_heads * dim_block_count(layout.head_dim);
    const uint8_t* at = in.take(dim_blocks);
    if (at == nullptr || dim_blocks != static_cast<uint32_t>(expected)) {
      return corrupt("another number of dim blocks");
    }
    choice.book_of.assign(at, at + dim_blocks);
    for (const uint8_t book : choice.book_of) {
      if (book >= count) return corrupt("a dim block takes a book that is not there");
    }
  }
  if (!in.at_end()) return corrupt("wrong size");
  books.bytes = serialize_books(books);
  return books;
}

}  // namespace tierkv::store
