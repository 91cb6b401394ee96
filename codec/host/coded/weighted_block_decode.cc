// SPDX-License-Identifier: Apache-2.0
// decode_weighted_block: validation. The decoder is in codec/host/coded/block_streams.cc.
#include <algorithm>
#include <cstring>
#include <string>

#include "codec/host/coded/block_streams.h"
#include "codec/host/coded/weighted_block.h"

namespace tierkv {
namespace {

Status corrupt(const char* what) {
  return Status(StatusCode::kCorrupt, std::string("weighted block: ") + what);
}

// A block whose header, sizes and stream lengths have been checked.
struct Block {
  WeightedBlockHeader header;
  WeightedBlockLayout at;
  const uint8_t* bytes = nullptr;
  OpenSlice slice;
};

// Fields that are wrong whatever the codebooks.
const char* check_fields(const WeightedBlockHeader& h) {
  if (h.version != kWeightedBlockVersion) return "version is not 2";
  if (const char* wrong = check_block_fields(h)) return wrong;
  if (h.exponent_bits > kMaxExponentBits) return "exponents of more than 8 bits";
  if (h.length_bits > kMaxLengthBits) return "stream lengths of more than 12 bits";
  if (is_raw_mode(h.mode)) {
    const bool clear = h.streams_per_lane == 1 && h.table_id == 0 && h.least_length == 0 &&
                       h.length_bits == 0 && h.exceptions == 0 &&
                       (h.mode != BlockMode::kRaw16 || h.base_or_books == 0);
    return clear ? nullptr : "a raw block with fields of a coded one";
  }
  if (h.streams_per_lane != 1 && h.streams_per_lane != 2) return "streams per lane must be 1 or 2";
  if (h.base_or_books >> (2 * dim_block_count(h.dims)) != 0) return "books of channels beyond";
  return nullptr;
}

// As load_field() of 0 .. count - 1, at most 64 fields of 12 bits, without a branch a field.
void load_fields(const uint8_t* part, int32_t count, int32_t bits, uint16_t* fields) {
  uint8_t padded[64 * kMaxLengthBits / 8 + 8] = {};
  memcpy(padded, part, static_cast<size_t>(field_bytes(count, bits)));
  const uint32_t mask = (1u << bits) - 1u;
  for (int32_t i = 0, from = 0; i < count; ++i, from += bits) {
    uint32_t word;
    memcpy(&word, padded + from / 8, sizeof(word));
    fields[i] = static_cast<uint16_t>(word >> from % 8 & mask);
  }
}

// The bounds of the streams from their lengths.
const char* find_bounds(Block* block) {
  const WeightedBlockHeader& h = block->header;
  OpenSlice& slice = block->slice;
  const int32_t streams = kWarpLanes * h.streams_per_lane;
  uint16_t excess[2 * kWarpLanes];
  load_fields(block->bytes + block->at.lengths, streams, h.length_bits, excess);
  for (int32_t i = 0; i < streams; ++i) {
    slice.bounds[i + 1] = slice.bounds[i] + h.least_length + excess[i];
  }
  return slice.bounds[streams] <= kMaxPayloadBits ? nullptr : "streams of more than 65535 bits";
}

const char* open_block(const uint8_t* bytes, int64_t size, Block* block) {
  if (size < kCodedBlockHeaderBytes) return "shorter than a header";
  block->bytes = bytes;
  block->header = load_weighted_header(bytes);
  const WeightedBlockHeader& h = block->header;
  if (const char* wrong = check_fields(h)) return wrong;
  const int32_t bytes_said = h.units * kBlockAlignment;
  if (bytes_said > size) return "cut short";
  block->at = weighted_layout(h, 0);
  if (block->at.bytes > bytes_said) return "size disagrees with the fields";
  OpenSlice& slice = block->slice;
  if (!is_raw_mode(h.mode)) {
    if (const char* wrong = find_bounds(block)) return wrong;
    const uint32_t payload_bits = slice.bounds[kWarpLanes * h.streams_per_lane];
    block->at = weighted_layout(h, static_cast<int32_t>(payload_bits));
  }
  if (block->at.bytes != bytes_said) return "size disagrees with the fields";
  if (block_checksum(bytes, block->at.bytes) != h.checksum) return "checksum";
  open_parts(h, block->at, bytes, &slice);
  slice.base = static_cast<int16_t>(h.base_or_books);
  return nullptr;
}

// Zeros between the parts and behind the fields of the last byte.
const char* check_gaps(const Block& block) {
  const WeightedBlockHeader& h = block.header;
  // The parts are whole words.
  const auto clear = [&](int32_t from_bit, int32_t to_byte) {
    int32_t word = from_bit / 32 * 4;
    if (word >= to_byte) return true;
    uint32_t bits = load_u32(block.bytes + word) >> from_bit % 32;
    for (word += 4; word < to_byte; word += 4) bits |= load_u32(block.bytes + word);
    return bits == 0;
  };
  const bool raw = is_raw_mode(h.mode);
  const int32_t exponents = 8 * block.at.exponents + h.tokens * h.exponent_bits;
  const int32_t lengths =
      8 * block.at.lengths + kWarpLanes * h.streams_per_lane * (raw ? 0 : h.length_bits);
  if (!clear(exponents, block.at.lengths)) return "bits after the exponents";
  if (!clear(lengths, raw ? block.at.payload : block.at.low_plane)) return "padding is not zero";
  return check_padding(block.slice, block.bytes + block.at.end, block.bytes + block.at.bytes);
}

// Those of the first slice to `exponents`; the others have none.
const char* read_exponents(const Block& block, bool first, int8_t* exponents) {
  const WeightedBlockHeader& h = block.header;
  if (!first) {
    return h.exponent_bits == 0 && h.least_exponent == 0 ? nullptr
                                                         : "exponents behind the first slice";
  }
  uint16_t above[kBlockTokens], most = 0;
  load_fields(block.bytes + block.at.exponents, h.tokens, h.exponent_bits, above);
  for (int32_t t = 0; t < h.tokens; ++t) {
    most = std::max(most, above[t]);
    exponents[t] = static_cast<int8_t>(h.least_exponent + above[t]);
  }
  const int32_t highest = h.least_exponent + most;
  if (highest > kMostExponent) return "an exponent beyond 127";
  if (h.component == Component::kKey &&
      !(is_importance_exponent(h.least_exponent) && is_importance_exponent(highest))) {
    return "a key's exponent is outside -8 to 4";
  }
  return nullptr;
}

const char* match_books(const WeightedBlockHeader& h, const BookFamily& family, SliceBooks* books) {
  const Codebook& first = family.books.front();
  if (h.component != first.component) return "not of the family's component";
  if (is_raw_mode(h.mode)) return nullptr;
  if (h.mode != first.mode || h.table_id != first.table_id ||
      h.streams_per_lane != first.streams_per_lane) {
    return "made with another family of codebooks";
  }
  for (int32_t f = 0; f < dim_block_count(h.dims); ++f) {
    const auto book = static_cast<size_t>(h.book(f));
    if (book >= family.books.size()) return "a book that the family does not have";
    books->of[f] = &family.books[book];
  }
  return nullptr;
}

const char* decode_slices(const uint8_t* bytes, int64_t size, const BookFamily& family,
                          const WeightedTarget& out) {
  for (int32_t first = 0; first < out.head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, out.head_dim - first);
    Block block;
    const Codebook& first_book = family.books.front();
    SliceBooks books(first_book, weighted_order(first_book.component));
    if (const char* wrong = open_block(bytes, size, &block)) return wrong;
    if (block.header.tokens != out.tokens || block.header.dims != dims) {
      return "not the expected tokens or channels";
    }
    if (const char* wrong = match_books(block.header, family, &books)) return wrong;
    if (const char* wrong = check_gaps(block)) return wrong;
    if (const char* wrong = read_exponents(block, first == 0, out.exponents)) return wrong;
    const SliceCodes codes{out.codes + first, out.tokens, dims, out.head_dim};
    if (const char* wrong = decode_open_slice(block.slice, books, codes)) return wrong;
    bytes += block.at.bytes;
    size -= block.at.bytes;
  }
  return size == 0 ? nullptr : "bytes after the last slice";
}

}  // namespace

Status decode_weighted_block(const uint8_t* bytes, int64_t size, const BookFamily& family,
                             const WeightedTarget& out) {
  if (Status s = check_block_shape(out.tokens, out.head_dim); !s) {
    return s.with_context("weighted block");
  }
  if (Status s = family.validate(); !s) return s;
  const char* wrong = decode_slices(bytes, size, family, out);
  if (wrong == nullptr) return Status::ok();
  std::fill_n(out.codes, static_cast<int64_t>(out.tokens) * out.head_dim, int16_t{0});
  std::fill_n(out.exponents, out.tokens, int8_t{0});
  return corrupt(wrong);
}

}  // namespace tierkv
