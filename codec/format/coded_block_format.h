// SPDX-License-Identifier: Apache-2.0
// The bytes of a coded block: the one place that knows its offsets (docs/reference/format.md,
// "Coded blocks").
//
//   header      16 bytes
//   starts      32 x streams_per_lane x u16: bit offset of each stream in the payload   coded modes
//   low plane   the low nibbles as raw 4-bit tiles                                      kSplit
//   payload     code words, 32-bit words                                                coded modes
//               or one raw tile after the other                                         raw modes
//   exceptions  u32 each: index | delta << 16, ascending index = token * 128 + channel
//   zeros up to a multiple of 16 bytes
#pragma once

#include <cstdint>

#include "codec/format/codebook.h"
#include "codec/format/fragment_order.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr uint8_t kCodedBlockVersion = 1;
inline constexpr int32_t kSliceDims = 128;
inline constexpr int32_t kCodedBlockHeaderBytes = 16;
inline constexpr int32_t kBlockAlignment = 16;
inline constexpr int32_t kExceptionBytes = 4;
// More than these would slow the decoder down noticeably: such a block is stored raw.
inline constexpr int32_t kMaxExceptions = 256;
inline constexpr int32_t kMaxPayloadBits = 65535;
inline constexpr int32_t kMaxBlockCodes = kBlockTokens * kSliceDims;
inline constexpr int32_t kMaxCodedBlockBytes = kCodedBlockHeaderBytes + kMaxBlockCodes * 2;
// A stream that begins inside a payload, or at its end, can be read this far behind it: all its
// codes of a symbol each, and as long as can be.
inline constexpr int32_t kPayloadSlackBytes = kMaxBlockCodes / kWarpLanes * kMaxCodeLength / 8 + 16;

struct CodedBlockHeader {
  uint8_t version = kCodedBlockVersion;   // byte 0
  BlockMode mode = BlockMode::kRaw16;     // byte 1, bits 0-3
  uint8_t streams_per_lane = 1;           // byte 1, bits 4-7; 1 in raw modes
  uint8_t table_id = 0;                   // byte 2; 0 in raw modes
  Component component = Component::kKey;  // byte 3
  uint8_t tokens = 1;                     // byte 4: 1 to 64
  uint8_t dims = 1;                       // byte 5: 1 to 128, channels of this slice
  int16_t base = 0;                       // bytes 6-7: the code of digit 0
  uint16_t payload_bits = 0;              // bytes 8-9: bits of all streams; 0 in raw modes
  uint16_t exceptions = 0;                // bytes 10-11; 0 in raw modes
  uint16_t units = 0;                     // bytes 12-13: size of the block in 16 bytes
  uint16_t checksum = 0;                  // bytes 14-15, see block_checksum()
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

TKV_HD CodedBlockHeader load_header(const uint8_t* p) {
  CodedBlockHeader h;
  h.version = p[0];
  h.mode = static_cast<BlockMode>(p[1] & 15);
  h.streams_per_lane = p[1] >> 4;
  h.table_id = p[2];
  h.component = static_cast<Component>(p[3]);
  h.tokens = p[4];
  h.dims = p[5];
  h.base = static_cast<int16_t>(load_u16(p + 6));
  h.payload_bits = static_cast<uint16_t>(load_u16(p + 8));
  h.exceptions = static_cast<uint16_t>(load_u16(p + 10));
  h.units = static_cast<uint16_t>(load_u16(p + 12));
  h.checksum = static_cast<uint16_t>(load_u16(p + 14));
  return h;
}

TKV_HD void store_header(const CodedBlockHeader& h, uint8_t* p) {
  p[0] = h.version;
  p[1] = static_cast<uint8_t>(static_cast<uint32_t>(h.mode) | h.streams_per_lane << 4);
  p[2] = h.table_id;
  p[3] = static_cast<uint8_t>(h.component);
  p[4] = h.tokens;
  p[5] = h.dims;
  store_u16(p + 6, static_cast<uint16_t>(h.base));
  store_u16(p + 8, h.payload_bits);
  store_u16(p + 10, h.exceptions);
  store_u16(p + 12, h.units);
  store_u16(p + 14, h.checksum);
}

// Offsets in bytes from the start of the block.
struct CodedBlockLayout {
  int32_t starts = kCodedBlockHeaderBytes;
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

TKV_HD CodedBlockLayout block_layout(const CodedBlockHeader& h) {
  CodedBlockLayout at;
  const int32_t tiles = tile_count(h.tokens), blocks = dim_block_count(h.dims);
  if (is_raw_mode(h.mode)) {
    at.low_plane = at.payload = kCodedBlockHeaderBytes;
    at.exceptions = at.payload + tiles * raw_tile(raw_bits(h.mode), blocks).bytes();
  } else {
    at.low_plane = at.starts + 2 * kWarpLanes * h.streams_per_lane;
    at.payload =
        at.low_plane + (h.mode == BlockMode::kSplit ? tiles * raw_tile(4, blocks).bytes() : 0);
    at.exceptions = at.payload + (h.payload_bits + 31) / 32 * 4;
  }
  at.end = at.exceptions + kExceptionBytes * h.exceptions;
  at.bytes = (at.end + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  return at;
}

// Sum of (n - i) * word i over the n 32-bit words of the block, bytes 14-15 taken as zero, modulo
// the prime 65521: prefix sums on one core, a weighted sum in any order on many, and it changes
// with any single bit.
inline constexpr uint32_t kChecksumPrime = 65521;
TKV_HD uint16_t block_checksum(const uint8_t* block, int32_t bytes) {
  // The sums of the words 4 g + j and of their prefix sums, for j = 0..3: word 4 g + j of 4 G words
  // weighs 4 (G - g) - j.
  uint64_t prefix[4] = {}, sum[4] = {};
  for (int32_t i = 0; i < bytes; i += kBlockAlignment) {
    uint32_t words[4];
    memcpy(words, block + i, sizeof(words));
    for (int32_t j = 0; j < 4; ++j) sum[j] += prefix[j] += words[j];
  }
  uint64_t total = 4 * (sum[0] + sum[1] + sum[2] + sum[3]);
  total -= prefix[1] + 2 * prefix[2] + 3 * prefix[3];
  const uint64_t stored = static_cast<uint64_t>(load_u16(block + 14)) << 16;
  total -= stored * static_cast<uint64_t>(bytes / 4 - 3);
  return static_cast<uint16_t>(total % kChecksumPrime);
}

}  // namespace tierkv
