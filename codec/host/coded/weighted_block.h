// SPDX-License-Identifier: Apache-2.0
// Weighted blocks: coded blocks (codec/format/coded_block.h) whose tokens have exponents of their
// own and whose dim blocks take their codebooks from a family.
//
// A block holds the codes and exponents of 1 to 64 tokens of one (row, component). A head_dim above
// 128 is cut into slices of 128 channels, each a block, one after the other; the exponents are in
// the first. What codes and exponents stand for says codec/host/coded/weighted_rows.h. The bytes
// are described in docs/reference/format.md, "Weighted blocks". Any 16-bit codes round-trip: a
// slice that is no smaller coded is stored raw. Exponents are -8 to 4 for keys, any for values.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/coded_block.h"
#include "codec/format/weighted_block_format.h"
#include "codec/format/weighted_step.h"
#include "tierkv/status.h"

namespace tierkv {

// The codebooks of one (layer, component). All books have one component, one mode and as many
// streams per lane; book i has the table id of book 0 plus i.
struct BookFamily {
  std::vector<Codebook> books;  // 1 to kMaxFamilyBooks

  // kInvalidArgument with what differs.
  Status validate() const;
};

// The codes of a block. `codes` is [tokens, head_dim], `exponents` [tokens].
struct WeightedCodes {
  const int16_t* codes = nullptr;
  const int8_t* exponents = nullptr;
  int32_t tokens = 0;    // 1 to 64
  int32_t head_dim = 0;  // 1 to kMaxHeadDim
};

// Appends a multiple of 16 bytes. book_of: [dim_block_count(head_dim)], below the number of books;
// null where all dim blocks take book 0. kInvalidArgument for shapes and books that are not there
// and for keys' exponents outside -8 to 4.
Status encode_weighted_block(const WeightedCodes& block, const BookFamily& family,
                             const uint8_t* book_of, std::vector<uint8_t>* out);

// What a block is expected to be, and where its codes go.
struct WeightedTarget {
  int16_t* codes = nullptr;     // out: [tokens, head_dim]
  int8_t* exponents = nullptr;  // out: [tokens]
  int32_t tokens = 0;
  int32_t head_dim = 0;
};

// The inverse: the blocks of all slices, which must fill `size` bytes exactly. Everything is
// validated: kCorrupt with what is wrong, and then all codes and exponents are 0.
Status decode_weighted_block(const uint8_t* bytes, int64_t size, const BookFamily& family,
                             const WeightedTarget& out);

}  // namespace tierkv
