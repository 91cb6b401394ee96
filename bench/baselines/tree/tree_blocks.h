// SPDX-License-Identifier: Apache-2.0
// Coded blocks whose decoders are compared, and what the decoders must write.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/coded_block_format.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kTreeBlockCodes = kBlockTokens * kSliceDims;
// What a lane decodes of a block: symbols of single codes, and words of four digits.
inline constexpr int32_t kLaneCodes = kTreeBlockCodes / kWarpLanes;
inline constexpr int32_t kLaneWords = kLaneCodes / 4;

struct TreeBlocks {
  std::vector<uint8_t> bytes;
  std::vector<uint32_t> units;  // [blocks + 1]: block i is the units [i] to [i + 1] of 16 bytes
  // [blocks][kLaneWords][kWarpLanes]: byte b of word w of a lane is digit 4 w + b of its stream. A
  // digit is a code counted from the codebook's base, as the streams have it: without exceptions.
  std::vector<uint32_t> digits;
  int32_t most_bytes = 0;  // of a block
  int64_t payload_bits = 0;
};

// codes: [blocks][kBlockTokens][kSliceDims]. The codebook is of single codes or pairs, with one
// stream a lane. kUnsupported where a block is smaller raw.
Result<TreeBlocks> make_tree_blocks(const std::vector<int16_t>& codes, const Codebook& codebook);

// A codebook of the mode for these codes. Seldom codes have no word: they are exceptions.
Result<Codebook> tree_codebook(const std::vector<int16_t>& codes, BlockMode mode,
                               int32_t max_length);

// The array tree of KVComp section 3.3.1, [nodes][2]: node n has the two entries [2 n] and
// [2 n + 1], indexed by the next bit. An entry is the index of the next node, or kLeaf + symbol.
// The root is node 0.
inline constexpr uint16_t kLeaf = 0x8000;
std::vector<uint16_t> build_tree(const Codebook& codebook);

// Rounded Laplace numbers of this spread, in [-15, 15]: pairs have books of at most 32 levels.
std::vector<int16_t> laplace_codes(int64_t blocks, double spread, uint32_t seed);

}  // namespace tierkv
