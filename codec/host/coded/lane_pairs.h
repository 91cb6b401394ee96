// SPDX-License-Identifier: Apache-2.0
// A block between its streams and row-major codes, in three steps:
//
//   streams -> entries   the table entry of every symbol                            decode_streams
//   entries -> planes    first and second codes of the pairs that the lanes hold    expand_entries
//   planes -> rows       a tile out of fragment order                               scatter_tile
//
// The steps that cost time have a plain reference beside the fast form that decode_block uses.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"
#include "codec/host/coded/slice_books.h"

namespace tierkv {

// Entries of a block: that of symbol i of stream s is [i * streams + s], so those of a tile lie
// together.
inline constexpr int32_t kMaxBlockEntries = kBlockTokens * kSliceDims;
inline constexpr int32_t kTilePairs = kTileTokens * kSliceDims / 2;

// The codes of a tile modulo 2^16: pair p of lane l is first[32 p + l] and second[32 p + l], with
// p = dim_block * 4 + r as in pair_position().
struct TilePlanes {
  alignas(64) uint16_t first[kTilePairs];
  alignas(64) uint16_t second[kTilePairs];
};

// The streams of a coded block. Positions are bits of the payload.
struct StreamSet {
  const uint8_t* payload;  // with kPayloadSlackBytes readable bytes behind its last bit
  uint32_t bounds[2 * kWarpLanes + 1];  // begin of each stream, and the end of the last
  int32_t streams;                      // 32 or 64
  int32_t symbols;                      // in each stream
  int32_t dim_blocks;                   // of the slice: a stream passes them once a tile
};
inline constexpr int32_t kMaxStreamSymbols = kMaxBlockEntries / kWarpLanes;
inline constexpr int32_t kPayloadSlackBytes = kMaxStreamSymbols * kMaxCodeLength / 8 + 16;

// Decodes all streams by table lookup. Whatever the bits are, every lookup gives a symbol of at
// most kMaxCodeLength bits, so the reads stay within the slack. False, with some entries, where a
// stream does not end at the next one's bound.
bool decode_streams(const SliceBooks& books, const StreamSet& set, uint16_t* entries);
// The same by the tree walk of codec/format/huffman.h.
bool decode_streams_reference(const SliceBooks& books, const StreamSet& set, uint16_t* entries);

// The codes of a tile. kSplit gives codes without low nibbles.
void expand_entries(const SliceBooks& books, int32_t dim_blocks, const uint16_t* entries,
                    TilePlanes* planes);

// Row-major codes of one slice or tile.
struct SliceCodes {
  int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int64_t stride;
};

// Writes the codes of a tile's real tokens (at most 16) and channels to their rows; padding is
// dropped.
void scatter_tile(const TilePlanes& planes, Component component, const SliceCodes& out);
void scatter_tile_reference(const TilePlanes& planes, Component component, const SliceCodes& out);
// expand_entries and scatter_tile of a tile in one pass, kPair only.
void scatter_pair_entries(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out);

}  // namespace tierkv
