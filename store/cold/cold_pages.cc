#include "store/cold/cold_pages.h"

#include <algorithm>
#include <string>

#include "codec/format/byte_cursor.h"
#include "codec/format/coded_block.h"
#include "codec/format/huffman.h"
#include "store/cold/sequence_bytes.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxFields = kBlockTokens * kSliceDims;
constexpr int32_t kFieldSymbols = 256;
constexpr int32_t kLongestWord = 12;
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

// Fields of a row; head_dims above 128 are multiples of it.
int32_t row_fields(const PageLayout& layout) {
  return std::min(layout.head_dim(), kSliceDims);
}

template <int32_t kBits>
void unpack(const uint8_t* bytes, int32_t count, int16_t* fields) {
  constexpr int32_t kPerByte = 8 / kBits;
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t j = 0; j < kPerByte; ++j) {
      fields[i * kPerByte + j] = static_cast<int16_t>(bytes[i] >> (kBits * j) & ((1 << kBits) - 1));
    }
  }
}
// False where a field has more bits.
template <int32_t kBits>
bool pack(const int16_t* fields, int32_t count, uint8_t* bytes) {
  constexpr int32_t kPerByte = 8 / kBits;
  uint32_t all = 0;
  for (int32_t i = 0; i < count; ++i) {
    uint32_t byte = 0;
    for (int32_t j = 0; j < kPerByte; ++j) {
      const auto field = static_cast<uint16_t>(fields[i * kPerByte + j]);
      all |= field;
      byte |= static_cast<uint32_t>(field) << (kBits * j);
    }
    bytes[i] = static_cast<uint8_t>(byte);
  }
  return all >> kBits == 0;
}

void unpack_fields(int32_t bits, const uint8_t* bytes, int32_t count, int16_t* fields) {
  if (bits == 8) return unpack<8>(bytes, count, fields);
  if (bits == 4) return unpack<4>(bytes, count, fields);
  unpack<2>(bytes, count, fields);
}
bool pack_fields(int32_t bits, const int16_t* fields, int32_t count, uint8_t* bytes) {
  if (bits == 8) return pack<8>(fields, count, bytes);
  if (bits == 4) return pack<4>(fields, count, bytes);
  return pack<2>(fields, count, bytes);
}

// visit(first byte, bytes, rows) for each block of a component's codes.
template <class Visit>
Status for_each_block(const PageLayout& layout, int32_t bits, int32_t bytes, const Visit& visit) {
  const int32_t row_bytes = row_fields(layout) * bits / 8;
  for (int32_t row = 0, rows = bytes / row_bytes; row < rows; row += kBlockTokens) {
    const int32_t n = std::min(kBlockTokens, rows - row);
    if (Status s = visit(row * row_bytes, n * row_bytes, n); !s) return s;
  }
  return Status::ok();
}

// Appends the codes of the blocks at the reader.
Status decode_fields(const PageLayout& layout, int32_t bytes, const Codebook& book,
                     ByteReader* reader, std::vector<uint8_t>* out) {
  const int32_t bits = layout.tile(book.component).type.bits(), width = row_fields(layout);
  int16_t fields[kMaxFields];
  return for_each_block(layout, bits, bytes, [&](int32_t, int32_t size, int32_t rows) {
    ByteReader ahead = *reader;
    const uint8_t* header = ahead.take(kCodedBlockHeaderBytes);
    if (header == nullptr) return corrupt("a block is cut off");
    const int64_t block_bytes = int64_t{load_header(header).units} * kBlockAlignment;
    const uint8_t* block = reader->take(static_cast<uint64_t>(block_bytes));
    if (block == nullptr) return corrupt("a block is cut off");
    if (Status s = decode_block(block, block_bytes, rows, width, book, fields); !s) return s;
    const size_t first = out->size();
    out->resize(first + size);
    if (!pack_fields(bits, fields, size, out->data() + first)) {
      return corrupt("a code of more than " + std::to_string(bits) + " bits");
    }
    return Status::ok();
  });
}

Status copy_bytes(int32_t bytes, ByteReader* reader, std::vector<uint8_t>* out) {
  const uint8_t* from = reader->take(static_cast<uint64_t>(bytes));
  if (from == nullptr) return corrupt("is cut short");
  out->insert(out->end(), from, from + bytes);
  return Status::ok();
}

}  // namespace

CodeHistogram make_field_histogram(const PageLayout& layout, Component c) {
  return CodeHistogram(c, row_fields(layout));
}

Result<Codebook> build_field_codebook(const CodeHistogram& histogram, int32_t bits,
                                      int64_t* payload_bytes) {
  Codebook book;
  book.component = histogram.component();
  book.mode = bits == 8 ? BlockMode::kSingle : bits == 4 ? BlockMode::kPair : BlockMode::kQuad;
  book.levels = 1 << bits;
  std::vector<uint64_t> counts(kFieldSymbols);
  for (int32_t s = 0; s < kFieldSymbols; ++s) {
    const int32_t quad[4] = {s & 3, s >> 2 & 3, s >> 4 & 3, s >> 6};
    counts[s] = bits == 8   ? histogram.count(s)
                : bits == 4 ? histogram.pair_count(s & 15, s >> 4)
                            : histogram.quad_count(quad);
  }
  if (Status s = find_code_lengths(counts, kLongestWord, &book.lengths); !s) return s;
  book.max_length = *std::max_element(book.lengths.begin(), book.lengths.end());
  if (Status s = complete_codebook(&book); !s) return s;
  uint64_t payload = 0;
  for (int32_t s = 0; s < kFieldSymbols; ++s) payload += counts[s] * book.lengths[s];
  *payload_bytes = static_cast<int64_t>(payload / 8);
  return book;
}

void count_page_fields(const PageLayout& layout, const uint8_t* packed, int32_t used, Component c,
                       CodeHistogram* histogram) {
  const auto segments = packed_segment_bytes(layout, used);
  const int32_t bits = layout.tile(c).type.bits(), bytes = segments[c == Component::kKey ? 0 : 2];
  const uint8_t* codes = c == Component::kKey ? packed : packed + segments[0] + segments[1];
  int16_t fields[kMaxFields];
  (void)for_each_block(layout, bits, bytes, [&](int32_t first, int32_t size, int32_t rows) {
    unpack_fields(bits, codes + first, size, fields);
    histogram->add(fields, rows);
    return Status::ok();
  });
}

void encode_cold_page(const PageLayout& layout, const uint8_t* packed, int32_t used,
                      const PageBooks& books, std::vector<uint8_t>* out) {
  const auto segments = packed_segment_bytes(layout, used);
  int16_t fields[kMaxFields];
  for (int32_t i = 0; i < kPageSegments; ++i) {
    const Codebook* book = i == 0 || i == 2 ? books.of[i / 2] : nullptr;
    if (book == nullptr) {
      out->insert(out->end(), packed, packed + segments[i]);
    } else {
      const int32_t bits = layout.tile(kComponents[i / 2]).type.bits();
      (void)for_each_block(
          layout, bits, segments[i], [&](int32_t first, int32_t size, int32_t rows) {
            unpack_fields(bits, packed + first, size, fields);
            return encode_block(fields, rows, row_fields(layout), *book, out);  // of valid sizes
          });
    }
    packed += segments[i];
  }
}

Status decode_cold_page(const PageLayout& layout, const std::vector<uint8_t>& payload, int32_t used,
                        const PageBooks& books, std::vector<uint8_t>* packed) {
  const auto segments = packed_segment_bytes(layout, used);
  ByteReader reader(payload);
  for (int32_t i = 0; i < kPageSegments; ++i) {
    const Codebook* book = i == 0 || i == 2 ? books.of[i / 2] : nullptr;
    const Status s = book == nullptr ? copy_bytes(segments[i], &reader, packed)
                                     : decode_fields(layout, segments[i], *book, &reader, packed);
    if (!s) return s;
  }
  if (!reader.at_end()) return corrupt("is longer than its page");
  return Status::ok();
}

}  // namespace tierkv
