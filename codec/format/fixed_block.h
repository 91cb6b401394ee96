// SPDX-License-Identifier: Apache-2.0
// Fixed-rate blocks: 64 tokens of one (row, component) as token-wise min-max codes, in the place of
// a coded block (codec/format/coded_block.h) where tokens deserve more than the shared step.
//
//   header      16 bytes, that of a coded block of mode kFixed4 or kFixed8
//   codes       a tile of unified pages for each 16 tokens (codec/format/page_layout.h)
//   metadata    64 bytes a tile: scale and zero point of its tokens
//
// A head_dim above 128 is cut into slices of 128 channels, each a block with scales of its own. A
// value reads as the fp16 number next to scale * code + zero point, so that host and device agree
// on it whatever they multiply it with. docs/reference/format.md, "Fixed-rate blocks".
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/coded_block_format.h"
#include "codec/format/element.h"
#include "codec/format/quantize.h"
#include "tierkv/status.h"

namespace tierkv {

// Behind the modes of coded blocks, whose readers refuse them.
inline constexpr auto kFixed4 = static_cast<BlockMode>(8);
inline constexpr auto kFixed8 = static_cast<BlockMode>(9);

TKV_HD constexpr bool is_fixed_mode(BlockMode m) {
  return m == kFixed4 || m == kFixed8;
}

// Bits of the codes of keys and values, 8 or 4; both 0: there are no such blocks.
struct FixedFormat {
  int32_t key_bits = 0;
  int32_t value_bits = 0;

  TKV_HD constexpr bool any() const { return key_bits != 0; }
  TKV_HD constexpr int32_t bits(Component c) const {
    return c == Component::kKey ? key_bits : value_bits;
  }
};

// Offsets in bytes from the start of a slice of `dims` channels, a multiple of 16.
struct FixedBlockLayout {
  TileLayout tile;
  int32_t metadata;
  int32_t bytes;

  TKV_HD constexpr int32_t codes_byte(int32_t tile_index) const {
    return kCodedBlockHeaderBytes + tile_index * tile.bytes();
  }
  TKV_HD constexpr int32_t metadata_byte(int32_t tile_index) const {
    return metadata + tile_index * kMetadataBlockBytes;
  }
};
TKV_HD constexpr FixedBlockLayout fixed_block_layout(int32_t bits, int32_t dims) {
  constexpr int32_t kTiles = kBlockTokens / kTileTokens;
  FixedBlockLayout at{{CodeType::uniform(bits), dims}, 0, 0};
  at.metadata = kCodedBlockHeaderBytes + kTiles * at.tile.bytes();
  at.bytes = at.metadata + kTiles * kMetadataBlockBytes;
  return at;
}
// Of all slices of head_dim channels, in 16 bytes.
TKV_HD constexpr int32_t fixed_block_units(int32_t bits, int32_t head_dim) {
  int32_t bytes = 0;
  for (int32_t first = 0; first < head_dim; first += kSliceDims) {
    const int32_t left = head_dim - first;
    bytes += fixed_block_layout(bits, left < kSliceDims ? left : kSliceDims).bytes;
  }
  return bytes / kBlockAlignment;
}

// Without a checksum.
TKV_HD CodedBlockHeader fixed_header(Component c, int32_t bits, int32_t dims) {
  CodedBlockHeader h;
  h.mode = bits == 4 ? kFixed4 : kFixed8;
  h.component = c;
  h.tokens = static_cast<uint8_t>(kBlockTokens);
  h.dims = static_cast<uint8_t>(dims);
  h.units = static_cast<uint16_t>(fixed_block_layout(bits, dims).bytes / kBlockAlignment);
  return h;
}

// What a code reads as, in fp16. (Rounding of the scale can lead beyond the largest number.)
TKV_HD uint16_t fixed_value(int32_t code, float scale, float zero_point) {
  return float_to_half(saturate_to_half_range(dequantize(code, scale, zero_point)));
}

// y: finite fp16 numbers [kBlockTokens, head_dim], head_dim a multiple of 16. bits: 8 or 4. Appends
// fixed_block_units().
void encode_fixed_block(const uint16_t* y, int32_t head_dim, Component c, int32_t bits,
                        std::vector<uint8_t>* out);
// The inverse: all slices, which must fill `size` bytes exactly. Everything is validated: kCorrupt
// with what is wrong, and then y is all zeros.
Status decode_fixed_block(const uint8_t* bytes, int64_t size, int32_t head_dim, Component c,
                          int32_t bits, uint16_t* y);

}  // namespace tierkv
