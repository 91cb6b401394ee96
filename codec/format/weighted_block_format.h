// SPDX-License-Identifier: Apache-2.0
// Weighted blocks: coded blocks of version 2 (docs/reference/format.md, "Weighted blocks"), whose
// tokens have exponents and whose dim blocks take their codebooks from a family.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"

namespace tierkv {

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

TKV_HD BlockHeader load_weighted_header(const uint8_t* p) {
  BlockHeader h = load_shared_fields(p);
  h.streams_per_lane = p[1] >> 4 & 3;
  h.component = static_cast<Component>(p[1] >> 6);
  h.least_exponent = static_cast<int8_t>(p[3]);
  h.least_length = static_cast<uint16_t>(load_u16(p + 8));
  h.exceptions = p[10];
  h.exponent_bits = p[11] & 15;
  h.length_bits = p[11] >> 4;
  return h;
}
TKV_HD void store_weighted_header(const BlockHeader& h, uint8_t* p) {
  store_shared_fields(h, p);
  p[1] = static_cast<uint8_t>(static_cast<uint32_t>(h.mode) | h.streams_per_lane << 4 |
                              static_cast<uint32_t>(h.component) << 6);
  p[3] = static_cast<uint8_t>(h.least_exponent);
  store_u16(p + 8, h.least_length);
  p[10] = static_cast<uint8_t>(h.exceptions);
  p[11] = static_cast<uint8_t>(h.exponent_bits | h.length_bits << 4);
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

}  // namespace tierkv
