// SPDX-License-Identifier: Apache-2.0
// The encoder of a slice: code words, stream after stream, with what the alphabet cannot say listed
// as exceptions, or raw codes where those are no larger.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/coded_block_format.h"
#include "codec/host/coded/slice_books.h"

namespace tierkv {

// The codes of one slice.
struct Slice {
  const int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int32_t stride;
  int32_t at(int32_t token, int32_t dim) const { return codes[token * stride + dim]; }
};

// Appends the block of a slice. named: table_id and base_or_books of its coded form. exponents:
// [tokens], null where all are 0.
void encode_slice(const Slice& slice, const SliceBooks& books, const BlockHeader& named,
                  const int8_t* exponents, std::vector<uint8_t>* out);

}  // namespace tierkv
