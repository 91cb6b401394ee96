// SPDX-License-Identifier: Apache-2.0
// The encoder's core, shared by coded and weighted blocks: the codes of a slice as code words,
// stream after stream, with what the alphabet cannot say listed as exceptions.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"
#include "codec/host/coded/slice_books.h"

namespace tierkv {

inline constexpr int32_t kMaxBlockCodes = kBlockTokens * kSliceDims;
inline constexpr int32_t kMaxStreams = 2 * kWarpLanes;
// Bytes that the streams of any plan fit in, as BitWriter writes them.
inline constexpr int32_t kPayloadBufferBytes = (kMaxPayloadBits + 31) / 32 * 4 + 8;

// The codes of one slice.
struct Slice {
  const int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int32_t stride;
  int32_t at(int32_t token, int32_t dim) const { return codes[token * stride + dim]; }
};

struct CodeRange {
  int32_t low, high;
  // The narrowest raw form that holds every code: codes above the smallest one, or 16 bits as they
  // are, and the code of value 0.
  BlockMode raw_mode() const {
    const int32_t range = high - low;
    return range < 4     ? BlockMode::kRaw2
           : range < 16  ? BlockMode::kRaw4
           : range < 256 ? BlockMode::kRaw8
                         : BlockMode::kRaw16;
  }
  int16_t raw_base() const {
    return raw_mode() == BlockMode::kRaw16 ? int16_t{0} : static_cast<int16_t>(low);
  }
};
CodeRange code_range(const Slice& slice);

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

// The streams of a possible plan, without gaps. payload: kPayloadBufferBytes.
void write_streams(const SymbolPlan& plan, int32_t streams, uint8_t* payload);
void write_exceptions(const SymbolPlan& plan, uint8_t* to);
// Into zeroed bytes: the low nibbles of a kSplit slice, and all codes less the base.
void write_low_plane(const Slice& slice, const SliceBooks& books, uint8_t* tiles);
void write_raw_codes(const Slice& slice, Component component, const CodeRange& range,
                     uint8_t* tiles);

}  // namespace tierkv
