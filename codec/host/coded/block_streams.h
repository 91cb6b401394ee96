// SPDX-License-Identifier: Apache-2.0
// The decoder of blocks.
#pragma once

#include <cstdint>
#include <span>

#include "codec/host/coded/slice_books.h"
#include "codec/host/coded/stream_decode.h"

namespace tierkv {

// The blocks of all slices of a head.
struct BlockSource {
  const uint8_t* bytes;
  int64_t size;  // that the blocks fill exactly
  std::span<const Codebook> family;
};

// The codes of all slices and the exponents, [out.tokens]. Returns null, or what is wrong with the
// bytes: then only some are written.
const char* decode_slices(const BlockSource& from, const SliceCodes& out, int8_t* exponents);

}  // namespace tierkv
