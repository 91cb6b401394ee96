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
// Source: docs/notes/2026-11-21-entropy-choices.md.
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

// kInvalidArgument unless 1 <= tokens <= kBlockTokens and 1 <= head_dim <= kMaxHeadDim.
Status check_block_shape(int32_t tokens, int32_t head_dim);

// codes: [tokens, head_dim]. Appends a multiple of 16 bytes.
Status encode_block(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, std::vector<uint8_t>* out);

// The inverse: the blocks of all slices, which must fill `size` bytes exactly. Everything is
// validated: kCorrupt with what is wrong, and then every one of the tokens * head_dim codes is 0.
Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes);

}  // namespace tierkv
