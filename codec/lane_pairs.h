// A tile of a block between its streams and row-major codes, in three steps:
//
//   streams -> entries   the table entry of every symbol                            decode_tile
//   entries -> planes    first and second codes of the pairs that the lanes hold    expand_entries
//   planes -> rows       out of fragment order                                      scatter_tile
//
// The steps that cost time have a plain reference beside the fast form that decode_block uses.
#pragma once

#include <cstdint>

#include "codec/codebook.h"
#include "codec/coded_block_format.h"

namespace tierkv {

// Entry i of stream s of a tile is [i * streams + s].
inline constexpr int32_t kTileEntries = kTileTokens * kSliceDims;
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
  uint32_t position[2 * kWarpLanes];    // where each stream is read next
  int32_t streams;                      // 32 or 64
  int32_t symbols;                      // in each stream and tile
};
inline constexpr int32_t kMaxStreamSymbols = kBlockTokens * kSliceDims / kWarpLanes;
inline constexpr int32_t kPayloadSlackBytes = kMaxStreamSymbols * kMaxCodeLength / 8 + 16;

// Decodes the next tile by table lookup and moves the positions. Whatever the bits are, every
// lookup gives a symbol of at most kMaxCodeLength bits, so a whole block stays within the slack;
// after it every position must be the next stream's bound.
void decode_tile(const Codebook& codebook, StreamSet* set, uint16_t* entries);
// All tiles by the tree walk of codec/huffman.h, kTileEntries apart; false when a stream holds
// another number of symbols than symbols * tiles.
bool decode_tiles_reference(const Codebook& codebook, const StreamSet& set, int32_t tiles,
                            uint16_t* entries);

// The codes of the first `symbols` entries of all streams. kSplit gives codes without low nibbles.
void expand_entries(const Codebook& codebook, int32_t symbols, const uint16_t* entries,
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
// expand_entries and scatter_tile in one pass, kPair only.
void scatter_pair_entries(const Codebook& codebook, const uint16_t* entries, const SliceCodes& out);

}  // namespace tierkv
