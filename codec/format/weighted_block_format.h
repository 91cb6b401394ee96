// SPDX-License-Identifier: Apache-2.0
// The bytes of a weighted block: the one place that knows its offsets (docs/reference/format.md,
// "Weighted blocks"). It is a coded block of version 2.
//
//   header      16 bytes
//   exponents   tokens fields of exponent_bits, less the least one; 32-bit words
//   lengths     32 x streams_per_lane fields of length_bits, less the least one       coded modes
//   low plane   the low nibbles as raw 4-bit tiles                                    kSplit
//   payload     code words, 32-bit words                                              coded modes
//               or one raw tile after the other                                       raw modes
//   exceptions  u32 each: index | delta << 16, ascending index = token * 128 + channel
//   zeros up to a multiple of 16 bytes
//
// Raw tiles begin on a multiple of 16 bytes. A field i of n bits lies at bits i n .. i n + n - 1
// of its part, counted from the lowest bit of the first byte.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"

namespace tierkv {

inline constexpr uint8_t kWeightedBlockVersion = 2;
inline constexpr int32_t kMaxWeightedExceptions = 255;
// A family of codebooks; each dim block of 16 channels names one of them in two bits.
inline constexpr int32_t kMaxFamilyBooks = 4;
inline constexpr int32_t kMaxExponentBits = 8;
inline constexpr int32_t kMaxLengthBits = 12;
inline constexpr int32_t kMaxWeightedBlockBytes =
    kCodedBlockHeaderBytes + kBlockTokens * kMaxExponentBits / 8 + kBlockTokens * kSliceDims * 2;

// The order in which each slice's streams pass the dim blocks.
TKV_HD constexpr DimBlockOrder weighted_order(Component component) {
  return component == Component::kKey ? DimBlockOrder::kPartners : DimBlockOrder::kAscending;
}

// The dim block of a head that comes as number i where the streams of its slices are read side by
// side: number 2 i + 1 is the partner of number 2 i. blocks: a multiple of the slices.
TKV_HD constexpr int32_t key_block_at(int32_t blocks, int32_t i) {
  constexpr int32_t kSliceBlocks = kSliceDims / kDimBlock;
  const int32_t slices = blocks > kSliceBlocks ? blocks / kSliceBlocks : 1, each = blocks / slices;
  return i % slices * each + dim_block_at(weighted_order(Component::kKey), each, i / slices);
}

struct WeightedBlockHeader {
  uint8_t version = kWeightedBlockVersion;  // byte 0
  BlockMode mode = BlockMode::kRaw16;       // byte 1, bits 0-3
  uint8_t streams_per_lane = 1;             // byte 1, bits 4-5; 1 in raw modes
  Component component = Component::kKey;    // byte 1, bits 6-7
  uint8_t table_id = 0;                     // byte 2: of the family's first book; 0 in raw modes
  int8_t least_exponent = 0;                // byte 3
  uint8_t tokens = 1;                       // byte 4: 1 to 64
  uint8_t dims = 1;                         // byte 5: 1 to 128, channels of this slice
  uint16_t base_or_books = 0;  // bytes 6-7: raw: the code of value 0, i16; coded: book of dim block
                               // f in bits 2 f and 2 f + 1
  uint16_t least_length = 0;   // bytes 8-9: bits of the shortest stream; 0 in raw modes
  uint8_t exceptions = 0;      // byte 10; 0 in raw modes
  uint8_t exponent_bits = 0;   // byte 11, bits 0-3: 0 to 8
  uint8_t length_bits = 0;     // byte 11, bits 4-7: 0 to 12; 0 in raw modes
  uint16_t units = 0;          // bytes 12-13: size of the block in 16 bytes
  uint16_t checksum = 0;       // bytes 14-15, see block_checksum()

  TKV_HD int32_t book(int32_t dim_block) const { return base_or_books >> (2 * dim_block) & 3; }
};

TKV_HD WeightedBlockHeader load_weighted_header(const uint8_t* p) {
  WeightedBlockHeader h;
  h.version = p[0];
  h.mode = static_cast<BlockMode>(p[1] & 15);
  h.streams_per_lane = p[1] >> 4 & 3;
  h.component = static_cast<Component>(p[1] >> 6);
  h.table_id = p[2];
  h.least_exponent = static_cast<int8_t>(p[3]);
  h.tokens = p[4];
  h.dims = p[5];
  h.base_or_books = static_cast<uint16_t>(load_u16(p + 6));
  h.least_length = static_cast<uint16_t>(load_u16(p + 8));
  h.exceptions = p[10];
  h.exponent_bits = p[11] & 15;
  h.length_bits = p[11] >> 4;
  h.units = static_cast<uint16_t>(load_u16(p + 12));
  h.checksum = static_cast<uint16_t>(load_u16(p + 14));
  return h;
}

TKV_HD void store_weighted_header(const WeightedBlockHeader& h, uint8_t* p) {
  p[0] = h.version;
  p[1] = static_cast<uint8_t>(static_cast<uint32_t>(h.mode) | h.streams_per_lane << 4 |
                              static_cast<uint32_t>(h.component) << 6);
  p[2] = h.table_id;
  p[3] = static_cast<uint8_t>(h.least_exponent);
  p[4] = h.tokens;
  p[5] = h.dims;
  store_u16(p + 6, h.base_or_books);
  store_u16(p + 8, h.least_length);
  p[10] = h.exceptions;
  p[11] = static_cast<uint8_t>(h.exponent_bits | h.length_bits << 4);
  store_u16(p + 12, h.units);
  store_u16(p + 14, h.checksum);
}

// Offsets in bytes from the start of the block.
struct WeightedBlockLayout {
  int32_t exponents = kCodedBlockHeaderBytes;
  int32_t lengths = 0;
  int32_t low_plane = 0;
  int32_t payload = 0;
  int32_t exceptions = 0;
  int32_t end = 0;    // of the exceptions
  int32_t bytes = 0;  // with padding
};

TKV_HD int32_t field_bytes(int32_t count, int32_t bits) {
  return (count * bits + 31) / 32 * 4;
}

// payload_bits: sum of the stream lengths; not read in raw modes.
TKV_HD WeightedBlockLayout weighted_layout(const WeightedBlockHeader& h, int32_t payload_bits) {
  WeightedBlockLayout at;
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
    at.exceptions = at.payload + (payload_bits + 31) / 32 * 4;
  }
  at.end = at.exceptions + kExceptionBytes * h.exceptions;
  at.bytes = aligned(at.end);
  return at;
}

// Field i of `bits` (at most 12) bits of a part that is whole words. Reads no word that holds none
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

}  // namespace tierkv
