// SPDX-License-Identifier: Apache-2.0
// The bytes of a coded block: the one place that knows its offsets. Its parts follow each other as
// header | exponents | lengths | low plane | payload | exceptions | zeros
// and are told in docs/reference/format.md, "Coded blocks".
#pragma once

#include <cstdint>

#include "codec/format/codebook.h"
#include "codec/format/fragment_order.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr uint8_t kCodedBlockVersion = 2;
inline constexpr int32_t kSliceDims = 128;
inline constexpr int32_t kCodedBlockHeaderBytes = 16;
inline constexpr int32_t kBlockAlignment = 16;
inline constexpr int32_t kExceptionBytes = 4, kExceptionBits = 8 * kExceptionBytes;
// More than these would slow the decoder down noticeably: such a block is stored raw.
inline constexpr int32_t kMaxExceptions = 255;
inline constexpr int32_t kMaxPayloadBits = 65535;
// A family of codebooks; each dim block of 16 channels names one of them in two bits.
inline constexpr int32_t kMaxFamilyBooks = 4;
inline constexpr int32_t kMaxExponentBits = 8;
inline constexpr int32_t kMaxLengthBits = 12;
inline constexpr int32_t kMaxBlockCodes = kBlockTokens * kSliceDims;
inline constexpr int32_t kMaxCodedBlockBytes =
    kCodedBlockHeaderBytes + kBlockTokens * kMaxExponentBits / 8 + kMaxBlockCodes * 2;
// A stream that begins inside a payload, or at its end, can be read this far behind it: all its
// codes of a symbol each, and as long as can be.
inline constexpr int32_t kPayloadSlackBytes = kMaxBlockCodes / kWarpLanes * kMaxCodeLength / 8 + 16;

// Number of slices of a head_dim, each a block of its own.
inline constexpr int32_t slice_count(int32_t head_dim) {
  return (head_dim + kSliceDims - 1) / kSliceDims;
}

// The dim block of a head that comes as number i where the streams of its slices are read side by
// side: number 2 i + 1 is the partner of number 2 i. blocks: a multiple of the slices.
TKV_HD constexpr int32_t key_block_at(int32_t blocks, int32_t i) {
  constexpr int32_t kSliceBlocks = kSliceDims / kDimBlock;
  const int32_t slices = blocks > kSliceBlocks ? blocks / kSliceBlocks : 1, each = blocks / slices;
  return i % slices * each + dim_block_at(Component::kKey, each, i / slices);
}

struct BlockHeader {
  uint8_t version = kCodedBlockVersion;
  BlockMode mode = BlockMode::kRaw16;
  uint8_t streams_per_lane = 1;  // 1 in raw modes
  uint8_t table_id = 0;          // of the family's first book; 0 in raw modes
  Component component = Component::kKey;
  uint8_t tokens = 1;  // 1 to 64
  uint8_t dims = 1;    // 1 to 128, channels of this slice
  // Raw modes: the code of value 0, i16. Coded modes: book of dim block f in bits 2 f and 2 f + 1.
  uint16_t base_or_books = 0;
  uint16_t exceptions = 0;    // 0 in raw modes
  uint16_t payload_bits = 0;  // not in the bytes: the sum of the streams' lengths
  // Streams have fields of length_bits, 0 to 12: their lengths less the least one.
  uint8_t length_bits = 0;    // 0 in raw modes
  uint16_t least_length = 0;  // bits of the shortest stream; 0 in raw modes
  // Fields of exponent_bits, 0 to 8, are exponents less the least one. Both 0 behind the first
  // slice.
  uint8_t exponent_bits = 0;
  int8_t least_exponent = 0;
  uint16_t units = 0;     // size of the block in 16 bytes
  uint16_t checksum = 0;  // see block_checksum()

  TKV_HD int16_t base() const { return static_cast<int16_t>(base_or_books); }
  TKV_HD int32_t book(int32_t dim_block) const { return base_or_books >> (2 * dim_block) & 3; }
};

TKV_HD uint32_t load_u16(const uint8_t* p) {
  return p[0] | static_cast<uint32_t>(p[1]) << 8;
}
TKV_HD void store_u16(uint8_t* p, uint32_t x) {
  p[0] = static_cast<uint8_t>(x);
  p[1] = static_cast<uint8_t>(x >> 8);
}
TKV_HD uint32_t load_u32(const uint8_t* p) {
  return load_u16(p) | load_u16(p + 2) << 16;
}
TKV_HD void store_u32(uint8_t* p, uint32_t x) {
  store_u16(p, x & 0xffffu);
  store_u16(p + 2, x >> 16);
}

TKV_HD BlockHeader load_header(const uint8_t* p) {
  BlockHeader h;
  h.version = p[0];
  h.mode = static_cast<BlockMode>(p[1] & 15);
  h.table_id = p[2];
  h.tokens = p[4];
  h.dims = p[5];
  h.base_or_books = static_cast<uint16_t>(load_u16(p + 6));
  h.units = static_cast<uint16_t>(load_u16(p + 12));
  h.checksum = static_cast<uint16_t>(load_u16(p + 14));
  h.streams_per_lane = p[1] >> 4 & 3;
  h.component = static_cast<Component>(p[1] >> 6);
  h.least_exponent = static_cast<int8_t>(p[3]);
  h.least_length = static_cast<uint16_t>(load_u16(p + 8));
  h.exceptions = p[10];
  h.exponent_bits = p[11] & 15;
  h.length_bits = p[11] >> 4;
  return h;
}
TKV_HD void store_header(const BlockHeader& h, uint8_t* p) {
  p[0] = h.version;
  p[2] = h.table_id;
  p[4] = h.tokens;
  p[5] = h.dims;
  store_u16(p + 6, h.base_or_books);
  store_u16(p + 12, h.units);
  store_u16(p + 14, h.checksum);
  p[1] = static_cast<uint8_t>(static_cast<uint32_t>(h.mode) | h.streams_per_lane << 4 |
                              static_cast<uint32_t>(h.component) << 6);
  p[3] = static_cast<uint8_t>(h.least_exponent);
  store_u16(p + 8, h.least_length);
  p[10] = static_cast<uint8_t>(h.exceptions);
  p[11] = static_cast<uint8_t>(h.exponent_bits | h.length_bits << 4);
}

// Offsets in bytes from the start of the block.
struct BlockLayout {
  int32_t exponents = kCodedBlockHeaderBytes;
  int32_t lengths = 0;
  int32_t low_plane = 0;
  int32_t payload = 0;
  int32_t exceptions = 0;
  int32_t end = 0;    // of the exceptions
  int32_t bytes = 0;  // with padding
};

TKV_HD int32_t raw_bits(BlockMode mode) {
  return 2 << static_cast<int32_t>(mode);
}
// The narrowest raw form that holds all codes of a slice: codes above the smallest one, or 16 bits
// as they are.
struct RawForm {
  BlockMode mode;
  int16_t base;  // the code of value 0
};
TKV_HD RawForm raw_form(int32_t lowest, int32_t highest) {
  const BlockMode mode = highest - lowest < 4     ? BlockMode::kRaw2
                         : highest - lowest < 16  ? BlockMode::kRaw4
                         : highest - lowest < 256 ? BlockMode::kRaw8
                                                  : BlockMode::kRaw16;
  return {mode, mode == BlockMode::kRaw16 ? int16_t{0} : static_cast<int16_t>(lowest)};
}

// Field i of `bits` (at most 16) bits of a part that is whole words. Reads no word that holds none
// of its bits.
TKV_HD uint32_t load_field(const uint8_t* part, int32_t i, int32_t bits) {
  if (bits == 0) return 0;
  const int32_t from = i * bits, skip = from % 32;
  const uint8_t* word = part + from / 32 * 4;
  uint32_t x = load_u32(word) >> skip;
  if (skip + bits > 32) x |= load_u32(word + 4) << (32 - skip);
  return x & ((1u << bits) - 1u);
}
// Into zeroed words.
TKV_HD void store_field(uint8_t* part, int32_t i, int32_t bits, uint32_t x) {
  if (bits == 0) return;
  const int32_t from = i * bits, skip = from % 32;
  uint8_t* word = part + from / 32 * 4;
  store_u32(word, load_u32(word) | x << skip);
  if (skip + bits > 32) store_u32(word + 4, x >> (32 - skip));
}
// Bits of a field that holds 0 .. most.
TKV_HD int32_t bits_for(uint32_t most) {
  int32_t bits = 0;
  while (most >> bits != 0) ++bits;
  return bits;
}

// Bytes of fields, whole words.
TKV_HD int32_t field_bytes(int32_t count, int32_t bits) {
  return (count * bits + 31) / 32 * 4;
}

TKV_HD BlockLayout block_layout(const BlockHeader& h) {
  BlockLayout at;
  const int32_t tiles = tile_count(h.tokens), blocks = dim_block_count(h.dims);
  const auto aligned = [](int32_t x) {
    return (x + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  };
  at.lengths = at.exponents + field_bytes(h.tokens, h.exponent_bits);
  if (is_raw_mode(h.mode)) {
    at.low_plane = at.payload = aligned(at.lengths);
    at.exceptions = at.payload + tiles * raw_tile(raw_bits(h.mode), blocks).bytes();
  } else {
    at.low_plane = at.lengths + field_bytes(kWarpLanes * h.streams_per_lane, h.length_bits);
    at.payload = at.low_plane;
    if (h.mode == BlockMode::kSplit) {
      at.low_plane = aligned(at.low_plane);
      at.payload = at.low_plane + tiles * raw_tile(4, blocks).bytes();
    }
    at.exceptions = at.payload + (h.payload_bits + 31) / 32 * 4;
  }
  at.end = at.exceptions + kExceptionBytes * h.exceptions;
  at.bytes = aligned(at.end);
  return at;
}

// As load_header(), of a valid block, and with payload_bits.
inline BlockHeader load_header_and_payload(const uint8_t* block) {
  BlockHeader h = load_header(block);
  const uint8_t* const lengths = block + block_layout(h).lengths;
  int32_t bits = 0;
  for (int32_t i = 0; !is_raw_mode(h.mode) && i < kWarpLanes * h.streams_per_lane; ++i) {
    bits += h.least_length + static_cast<int32_t>(load_field(lengths, i, h.length_bits));
  }
  h.payload_bits = static_cast<uint16_t>(bits);
  return h;
}

// Sum of (n - i) * word i over the n 32-bit words of the block, bytes 14-15 taken as zero, modulo
// the prime 65521: prefix sums on one core, a weighted sum in any order on many, and it changes
// with any single bit.
inline constexpr uint32_t kChecksumPrime = 65521;
uint16_t block_checksum(const uint8_t* block, int32_t bytes);

}  // namespace tierkv
