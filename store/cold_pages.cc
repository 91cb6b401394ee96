#include "store/cold_pages.h"

#include <algorithm>
#include <string>

#include "codec/byte_cursor.h"
#include "codec/coded_block.h"
#include "store/sequence_bytes.h"

namespace tierkv {
namespace {

constexpr int32_t kRowFields = kSliceDims;  // of a block's row
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

// Tiles fill whole rows: 16 head_dim fields of a head_dim that is a multiple of 32.
int32_t rows_of(int32_t bytes, int32_t bits) {
  return bytes * 8 / bits / kRowFields;
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
Status for_each_block(int32_t bits, int32_t bytes, const Visit& visit) {
  const int32_t row_bytes = kRowFields * bits / 8;
  for (int32_t row = 0, rows = rows_of(bytes, bits); row < rows; row += kBlockTokens) {
    const int32_t n = std::min(kBlockTokens, rows - row);
    if (Status s = visit(row * row_bytes, n * row_bytes, n); !s) return s;
  }
  return Status::ok();
}

// Appends the codes of the blocks at the reader.
Status decode_fields(int32_t bits, int32_t bytes, const Codebook& book, ByteReader* reader,
                     std::vector<uint8_t>* out) {
  int16_t fields[kBlockTokens * kRowFields];
  return for_each_block(bits, bytes, [&](int32_t, int32_t size, int32_t rows) {
    ByteReader ahead = *reader;
    const uint8_t* header = ahead.take(kCodedBlockHeaderBytes);
    if (header == nullptr) return corrupt("a block is cut off");
    const int64_t block_bytes = int64_t{load_header(header).units} * kBlockAlignment;
    const uint8_t* block = reader->take(static_cast<uint64_t>(block_bytes));
    if (block == nullptr) return corrupt("a block is cut off");
    if (Status s = decode_block(block, block_bytes, rows, kRowFields, book, fields); !s) return s;
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

CodeHistogram make_field_histogram(Component c) {
  return CodeHistogram(c, kRowFields);
}

void count_page_fields(const PageLayout& layout, const uint8_t* packed, int32_t used, Component c,
                       CodeHistogram* histogram) {
  const auto segments = packed_segment_bytes(layout, used);
  const int32_t bits = layout.tile(c).bits, bytes = segments[c == Component::kKey ? 0 : 2];
  const uint8_t* codes = c == Component::kKey ? packed : packed + segments[0] + segments[1];
  int16_t fields[kBlockTokens * kRowFields];
  (void)for_each_block(bits, bytes, [&](int32_t first, int32_t size, int32_t rows) {
    unpack_fields(bits, codes + first, size, fields);
    histogram->add(fields, rows);
    return Status::ok();
  });
}

void encode_cold_page(const PageLayout& layout, const uint8_t* packed, int32_t used,
                      const PageBooks& books, std::vector<uint8_t>* out) {
  const auto segments = packed_segment_bytes(layout, used);
  int16_t fields[kBlockTokens * kRowFields];
  for (int32_t i = 0; i < kPageSegments; ++i) {
    const Codebook* book = i == 0 || i == 2 ? books.of[i / 2] : nullptr;
    if (book == nullptr) {
      out->insert(out->end(), packed, packed + segments[i]);
    } else {
      const int32_t bits = layout.tile(kComponents[i / 2]).bits;
      (void)for_each_block(bits, segments[i], [&](int32_t first, int32_t size, int32_t rows) {
        unpack_fields(bits, packed + first, size, fields);
        return encode_block(fields, rows, kRowFields, *book, out);  // of valid sizes
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
                                     : decode_fields(layout.tile(kComponents[i / 2]).bits,
                                                     segments[i], *book, &reader, packed);
    if (!s) return s;
  }
  if (!reader.at_end()) return corrupt("is longer than its page");
  return Status::ok();
}

}  // namespace tierkv
