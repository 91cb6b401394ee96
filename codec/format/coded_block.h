// SPDX-License-Identifier: Apache-2.0
// Entropy-coded blocks: up to 64 tokens of one (row, component), readable alone, decoded by one
// warp.
//
// The bytes are described in docs/reference/format.md, "Coded blocks". A head_dim above 128 is cut
// into slices of 128 channels, each a block of its own, one after the other. 32 lanes own the codes
// in the order of the tensor-core fragments (codec/format/fragment_order.h), every lane has one or
// two bit streams of its own, and every lookup yields the same number of codes, so that a corrupt
// stream cannot lengthen a loop. Codes outside the codebook's alphabet are listed as exceptions,
// never saturated; a block that is no smaller coded is stored raw, so any 16-bit codes round-trip.
//
// Source: docs/notes/2026-11-21-entropy-choices.md; the one-bit tree walk is KVComp's
// (section 3.3.1) and is kept as the reference.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/coded_block_format.h"
#include "tierkv/status.h"

namespace tierkv {

// Number of blocks (slices) that encode_block writes for a head_dim.
inline constexpr int32_t slice_count(int32_t head_dim) {
  return (head_dim + kSliceDims - 1) / kSliceDims;
}

// codes: [tokens, head_dim], 1 <= tokens <= kBlockTokens, 1 <= head_dim <= kMaxHeadDim. Appends a
// multiple of 16 bytes. A slice whose coded form has more than most_coded_bytes is stored raw.
Status encode_block(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, std::vector<uint8_t>* out,
                    int32_t most_coded_bytes = kMaxCodedBlockBytes);

enum class DecodePath : int32_t {
  kTable = 0,  // one lookup a symbol, eight streams at a time
  kTree = 1,   // one bit at a time: the paper's form and the reference
};

// The inverse: the blocks of all slices, which must fill `size` bytes exactly. Everything is
// validated: kCorrupt with what is wrong, and then every one of the tokens * head_dim codes is 0.
Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes, DecodePath path = DecodePath::kTable);

// Where the bits of the blocks in `size` valid bytes went; for reports and tests.
struct CodedBlockStats {
  int64_t blocks[kNumBlockModes] = {};  // by mode
  int64_t header_bits = 0;              // headers and stream starts
  int64_t payload_bits = 0;             // code words or raw codes
  int64_t exception_bits = 0;
  int64_t exceptions = 0;
  int64_t padding_bits = 0;
  int64_t total_bits() const { return header_bits + payload_bits + exception_bits + padding_bits; }
};
// Adds the blocks found in bytes to *stats; kCorrupt where the headers contradict each other.
Status add_block_stats(const uint8_t* bytes, int64_t size, CodedBlockStats* stats);

}  // namespace tierkv
