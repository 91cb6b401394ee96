// SPDX-License-Identifier: Apache-2.0
// A block between its streams and row-major codes, in two steps:
//
//   streams -> entries   the table entry of every symbol       decode_streams
//   entries -> rows      a tile out of fragment order          scatter_pairs, or any mode's plain
//                                                              form scatter_entries
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"
#include "codec/host/coded/slice_books.h"

namespace tierkv {

// The streams of a coded block. Positions are bits of the payload.
struct StreamSet {
  const uint8_t* payload;  // with kPayloadSlackBytes readable bytes behind its last bit
  uint32_t bounds[2 * kWarpLanes + 1];  // begin of each stream, and the end of the last
  int32_t streams;                      // 32 or 64
  int32_t symbols;                      // in each stream
  int32_t dim_blocks;                   // of the slice: a stream passes them once a tile
};

// Decodes all streams by table lookup. Whatever the bits are, every lookup gives a symbol of at
// most kMaxCodeLength bits, so the reads stay within the slack. False, with some entries, where a
// stream does not end at the next one's bound. The entry of symbol i of stream s is
// entries[i * streams + s], so those of a tile lie together; a block has at most kMaxBlockCodes.
bool decode_streams(const SliceBooks& books, const StreamSet& set, uint16_t* entries);

// Row-major codes of one slice or tile.
struct SliceCodes {
  int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int64_t stride;
};

// Writes the codes of a tile's real tokens (at most 16) and channels to their rows; padding is
// dropped. kSplit gives codes without low nibbles.
void scatter_entries(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out);
// The same, faster, of kPair.
void scatter_pairs(const SliceBooks& books, const uint16_t* entries, const SliceCodes& out);

}  // namespace tierkv
