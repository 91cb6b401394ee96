// SPDX-License-Identifier: Apache-2.0
// Coded blocks: up to 64 tokens of one (row, component), readable alone, decoded by one warp
// (docs/reference/format.md, "Coded blocks"). Every lookup yields the same number of codes, so that
// a corrupt stream cannot lengthen a loop. A slice that is no smaller coded is stored raw, so any
// 16-bit codes round-trip.
//
// codec/host/coded/weighted_rows.h says what codes and exponents stand for. Codes of other steps
// have exponents 0, which take no bytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/coded_block_format.h"
#include "codec/format/weighted_step.h"
#include "tierkv/status.h"

namespace tierkv {

// kInvalidArgument with what differs, unless these are the 1 to kMaxFamilyBooks codebooks of one
// (layer, component): of one component, one mode and as many streams per lane, and book i has the
// table id of book 0 plus i.
Status check_family(std::span<const Codebook> books);

struct BookFamily {
  std::vector<Codebook> books;

  Status validate() const { return check_family(books); }
};

// What a block holds.
struct BlockContent {
  const int16_t* codes = nullptr;     // [tokens, head_dim]
  const int8_t* exponents = nullptr;  // [tokens], -8 to 4 for keys, any for values; null: all 0
  int32_t tokens = 0;                 // 1 to 64
  int32_t head_dim = 0;               // 1 to kMaxHeadDim
};

// Appends a multiple of 16 bytes. book_of: [dim_block_count(head_dim)], below the number of books;
// null where all dim blocks take book 0. kInvalidArgument for shapes and books that are not there
// and for keys' exponents outside -8 to 4.
Status encode_block(const BlockContent& block, std::span<const Codebook> family,
                    const uint8_t* book_of, std::vector<uint8_t>* out);

// What a block is expected to be, and where its codes go.
struct BlockTarget {
  int16_t* codes = nullptr;     // out: [tokens, head_dim]
  int8_t* exponents = nullptr;  // out: [tokens]; null: all must be 0
  int32_t tokens = 0;
  int32_t head_dim = 0;
};

// The inverse: the blocks of all slices, which must fill `size` bytes exactly. Everything is
// validated: kCorrupt with what is wrong, and then all codes and exponents are 0.
Status decode_block(const uint8_t* bytes, int64_t size, std::span<const Codebook> family,
                    const BlockTarget& out);

}  // namespace tierkv
