// SPDX-License-Identifier: Apache-2.0
// The encoder's core, shared by coded and weighted blocks: the codes of a slice as code words,
// stream after stream, with what the alphabet cannot say listed as exceptions.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"
#include "codec/host/coded/slice_books.h"

namespace tierkv {

inline constexpr int32_t kMaxStreams = 2 * kWarpLanes;

// The codes of one slice.
struct Slice {
  const int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int32_t stride;
  int32_t at(int32_t token, int32_t dim) const { return codes[token * stride + dim]; }
};

RawForm raw_form(const Slice& slice);

// A slice as code words of its books.
struct SymbolPlan {
  uint32_t entries[kMaxBlockCodes];  // code word, its length from bit 16 on
  int32_t entries_per_stream = 0;
  uint32_t stream_bits[kMaxStreams];
  int64_t payload_bits = 0;
  uint32_t exceptions[kMaxExceptions];  // as the block has them, ascending
  int32_t exception_count = 0;
  bool possible = true;  // false: too many exceptions or bits, or an exception too far away
};
// Books of a raw mode give a plan that is not possible.
void plan_symbols(const Slice& slice, const SliceBooks& books, int32_t most_exceptions,
                  SymbolPlan* plan);

// Where a coded block's parts begin, in zeroed bytes.
struct PlanTarget {
  uint8_t* low_plane;  // kSplit only
  uint8_t* payload;
  uint8_t* exceptions;
};
// Writes the streams of a possible plan, without gaps, its exceptions and, for kSplit, the low
// nibbles.
void write_plan(const Slice& slice, const SliceBooks& books, const SymbolPlan& plan,
                const PlanTarget& to);
// All codes less the base, into zeroed bytes.
void write_raw_codes(const Slice& slice, Component component, const RawForm& raw, uint8_t* tiles);

}  // namespace tierkv
