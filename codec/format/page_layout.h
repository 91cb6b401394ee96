// SPDX-License-Identifier: Apache-2.0
// Where every byte of a unified page lies. The only place that knows: all other code asks here.
//
// A page holds six segments of `tokens` tokens, each aligned to 64 bytes:
//   key codes | key metadata | value codes | value metadata | scores (fp32) | positions (int32)
// A page without records ends before the scores. docs/reference/format.md has the order within
// them, which is that of the A fragments of mma.m16n8k16, so that a loaded register is an operand
// after one mask. Source of the idea: BitDecoding section 4 (the instruction induces the layout).
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/format/head_dim.h"
#include "tierkv/format.h"
#include "tierkv/half.h"
#include "tierkv/page.h"

namespace tierkv {

inline constexpr int32_t kWarpLanes = 32;
inline constexpr int32_t kDimBlock = 16;            // dims of one A fragment
inline constexpr int32_t kMetadataBlockBytes = 64;  // 16 tokens x (half scale, half zero point)

TKV_HD constexpr int32_t tile_count(int32_t tokens) {
  return (tokens + kTileTokens - 1) / kTileTokens;
}

// The types that pages hold.
inline constexpr CodeType kRawCodes = CodeType::raw16();
inline constexpr CodeType kCodes8 = CodeType::uniform(8);
inline constexpr CodeType kCodes4 = CodeType::uniform(4);
inline constexpr CodeType kCodes2 = CodeType::uniform(2);

// One tile (16 tokens x head_dim) of codes of one component. Where a code lies depends on the bits
// of the type, not on its kind.
struct TileLayout {
  CodeType type = kRawCodes;
  int32_t head_dim = 128;  // 64, 96, 128 or 256

  TKV_HD constexpr int32_t dim_blocks() const { return head_dim / kDimBlock; }
  // 32-bit words of each of the 32 lanes: 1 (of 2 bits: 1/2) to 4 per dim block.
  TKV_HD constexpr int32_t words_per_lane() const { return head_dim * type.bits() / 64; }
  TKV_HD constexpr int32_t bytes() const { return words_per_lane() * kWarpLanes * 4; }
};

// The words of a lane are read by words / 4 accesses of 16 bytes, then one of 8 bytes where two or
// three are left, then one of 4 bytes where one is left. Each access of the warp covers 32
// consecutive pieces, so it is one coalesced run of 512, 256 or 128 bytes and nothing is padded.
TKV_HD constexpr int32_t lane_accesses(int32_t words_per_lane) {
  return words_per_lane / 4 + (words_per_lane & 2) / 2 + (words_per_lane & 1);
}
// Words (4, 2 or 1) of access `a`. Its first word is 4a, except that a 4-byte access after an
// 8-byte one starts at words_per_lane - 1.
TKV_HD constexpr int32_t access_words(int32_t words_per_lane, int32_t a) {
  return a < words_per_lane / 4 ? 4 : a == words_per_lane / 4 && (words_per_lane & 2) ? 2 : 1;
}
// Byte of word `w` of a lane, from the start of the tile.
TKV_HD constexpr int32_t lane_word_byte(int32_t words_per_lane, int32_t w, int32_t lane) {
  const int32_t quads = words_per_lane & ~3, pairs = words_per_lane & ~1;
  if (w < quads) return (w / 4) * 512 + lane * 16 + (w % 4) * 4;
  if (w < pairs) return quads * 128 + lane * 8 + (w - quads) * 4;
  return pairs * 128 + lane * 4;
}

struct CodePosition {
  int32_t byte;  // of the 32-bit little-endian word, from the start of the tile; a multiple of 4
  int32_t bit;   // first (lowest) bit of the code in the word
};

// Shift of a code inside its byte. It depends on the dim alone, for keys and values alike, so a
// kernel folds the factor 2^shift into q (keys) or into the output (values). 0 for 8 and 16 bits.
TKV_HD constexpr int32_t code_shift(int32_t bits, int32_t dim) {
  const int32_t dim_half = (dim % kDimBlock) / 8;
  if (bits == 4) return 4 * dim_half;
  if (bits == 2) return 4 * (dim / kDimBlock % 2) + 2 * dim_half;
  return 0;
}

// The position of the code of (token, dim), token in [0, 16), dim in [0, head_dim).
//
// In fragment terms (PTX, mma.m16n8k16, operand A): row is the index not contracted (keys: token,
// values: dim), col the contracted one. Register and half: a0 (g, low), a1 (g + 8, low), a2 (g,
// high), a3 (g + 8, high) with g = row % 8.
TKV_HD constexpr CodePosition code_position(TileLayout tile, Component component, int32_t token,
                                            int32_t dim) {
  const bool key = component == Component::kKey;
  const int32_t block = dim / kDimBlock, in_block = dim % kDimBlock;
  const int32_t row = key ? token : in_block, col = key ? in_block : token;
  const int32_t lane = 4 * (row % 8) + (col % 8) / 2, odd = col % 2;
  const int32_t row_half = row / 8, col_half = col / 8;
  const int32_t token_half = token / 8, dim_half = in_block / 8;
  int32_t word = 0, bit = 0;
  const int32_t bits = tile.type.bits();
  switch (bits) {
    case 16:
      word = 4 * block + row_half + 2 * col_half;
      bit = 16 * odd;
      break;
    case 8:
      word = 2 * block + token_half;
      bit = 16 * odd + 8 * dim_half;
      break;
    default:  // 4 and 2: the token half picks the byte, the dims the place inside it
      word = bits == 4 ? block : block / 2;
      bit = 16 * odd + 8 * token_half + code_shift(bits, dim);
      break;
  }
  return {lane_word_byte(tile.words_per_lane(), word, lane), bit};
}

// The code at a position of a tile.
TKV_HD uint32_t load_code(const uint8_t* tile, CodePosition at, int32_t bits) {
  uint32_t word;
  memcpy(&word, tile + at.byte, sizeof(word));
  return word >> at.bit & ((1u << bits) - 1u);
}
TKV_HD void store_code(uint8_t* tile, CodePosition at, int32_t bits, uint32_t code) {
  uint32_t word;
  memcpy(&word, tile + at.byte, sizeof(word));
  word = (word & ~(((1u << bits) - 1u) << at.bit)) | code << at.bit;
  memcpy(tile + at.byte, &word, sizeof(word));
}

// Whether pages of codes of this type may be written by the rule.
constexpr bool is_page_rule(StepRule rule, CodeType type) {
  return rule == StepRule::kNorm ? type == kCodes2 : rule == StepRule::kMinMax;
}

// Bytes of a tile's metadata: one block per sub-group of head_dim / groups consecutive dims.
TKV_HD constexpr int32_t tile_metadata_bytes(int32_t groups) {
  return groups * kMetadataBlockBytes;
}
// Byte of the scale (fp16; the zero point follows) of sub-group `group` of a token, from the start
// of the tile's metadata. Tokens r and r + 8 are neighbours: the lanes 4g..4g+3 read 8 bytes for
// keys, the lanes of t 16 for values.
TKV_HD constexpr int32_t token_metadata_byte(int32_t group, int32_t token) {
  return group * kMetadataBlockBytes + (token % 8) * 8 + (token / 8) * 4;
}

// What a page layout is computed from. A plain aggregate, so that kernels can name one as a
// constant expression.
struct PageShape {
  int32_t head_dim;
  CodeType k_type, v_type;
  int32_t k_groups, v_groups;  // sub-groups per token; 0 of raw elements
  int32_t tokens;              // per page, a multiple of 16
  bool records = true;         // false: no scores and positions
};

// Byte offsets from the start of the page.
struct PageLayout {
  TileLayout k_tile, v_tile;
  int32_t k_groups, v_groups;
  int32_t tokens;      // per page
  int32_t k_codes;     // tokens / 16 tiles of k_tile.bytes()
  int32_t k_metadata;  // tokens / 16 x k_groups blocks of 64 bytes
  int32_t v_codes;
  int32_t v_metadata;
  int32_t scores;      // float [tokens]; the bytes before it are all that attention needs
  int32_t positions;   // int32_t [tokens]
  int32_t used_bytes;  // end of the positions; the rest of the page is not defined. `scores` and
                       // `positions` where the page has no records

  TKV_HD constexpr int32_t tiles() const { return tokens / kTileTokens; }
  TKV_HD constexpr int32_t head_dim() const { return k_tile.head_dim; }
  TKV_HD constexpr const TileLayout& tile(Component c) const {
    return c == Component::kKey ? k_tile : v_tile;
  }
  TKV_HD constexpr int32_t groups(Component c) const {
    return c == Component::kKey ? k_groups : v_groups;
  }
  TKV_HD constexpr int32_t tile_codes_byte(Component c, int32_t tile_index) const {
    return (c == Component::kKey ? k_codes : v_codes) + tile_index * tile(c).bytes();
  }
  TKV_HD constexpr int32_t tile_metadata_byte(Component c, int32_t tile_index) const {
    return (c == Component::kKey ? k_metadata : v_metadata) +
           tile_index * tile_metadata_bytes(groups(c));
  }
  TKV_HD constexpr bool has_records() const { return used_bytes > scores; }
  // Only pages with records have these.
  TKV_HD constexpr int32_t score_byte(int32_t slot) const { return scores + slot * 4; }
  TKV_HD constexpr int32_t position_byte(int32_t slot) const { return positions + slot * 4; }
};

inline constexpr int32_t kTileRecordBytes = kTileTokens * 8;  // scores and positions of a tile
// Bytes of one tile of tokens in all segments.
TKV_HD constexpr int32_t page_tile_bytes(PageShape s) {
  return TileLayout{s.k_type, s.head_dim}.bytes() + TileLayout{s.v_type, s.head_dim}.bytes() +
         tile_metadata_bytes(s.k_groups + s.v_groups) + (s.records ? kTileRecordBytes : 0);
}

// The shape is trusted: use make_page_layout() for formats that were not checked.
TKV_HD constexpr PageLayout page_layout(PageShape s) {
  PageLayout p{};
  p.k_tile = {s.k_type, s.head_dim};
  p.v_tile = {s.v_type, s.head_dim};
  p.k_groups = s.k_groups;
  p.v_groups = s.v_groups;
  p.tokens = s.tokens;
  const int32_t tiles = s.tokens / kTileTokens;
  p.k_codes = 0;
  p.k_metadata = p.k_codes + tiles * p.k_tile.bytes();
  p.v_codes = p.k_metadata + tiles * tile_metadata_bytes(s.k_groups);
  p.v_metadata = p.v_codes + tiles * p.v_tile.bytes();
  p.scores = p.v_metadata + tiles * tile_metadata_bytes(s.v_groups);
  const int32_t record_bytes = s.records ? s.tokens * 4 : 0;
  p.positions = p.scores + record_bytes;
  p.used_bytes = p.positions + record_bytes;
  return p;
}

// True for a layout that page_layout() makes of a shape that page_shape() admits and at least one
// tile.
bool is_page_layout(const PageLayout& layout);

// The shape of a format, with tokens = 0. kUnsupported, by name, unless head_dim is 64, 96, 128 or
// 256 and both components are raw or token-wise of 8, 4 or 2 bits (min-max, or 2 bits clipped at
// the norm) without entropy coding, in sub-groups of a multiple of 16 dims (a sub-group may not end
// inside a fragment).
Result<PageShape> page_shape(const TierFormat& format, int32_t head_dim);

// The layout of a tier's pages, with or without records: as many tiles as fit into page_bytes.
// kInvalidArgument when not one does, or when page_bytes is no multiple of kPageAlignment or above
// kMaxPageBytes.
Result<PageLayout> make_page_layout(const TierFormat& format, int32_t head_dim, int64_t page_bytes,
                                    bool records = true);

}  // namespace tierkv
