// SPDX-License-Identifier: Apache-2.0
// The decoder of blocks, shared by coded and weighted ones.
#pragma once

#include <cstdint>
#include <span>

#include "codec/host/coded/slice_books.h"
#include "codec/host/coded/stream_decode.h"

namespace tierkv {

// What the blocks of all slices of a head are expected to be.
struct BlockSource {
  const uint8_t* bytes;
  int64_t size;  // that the blocks fill exactly
  uint8_t version;
  std::span<const Codebook> family;  // one of version 1
};

// The codes of all slices, and the exponents [out.tokens] of version 2. Returns what is wrong with
// the bytes, and then there are some of them, or null.
const char* decode_slices(const BlockSource& from, const SliceCodes& out, int8_t* exponents);

}  // namespace tierkv
