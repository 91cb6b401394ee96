// SPDX-License-Identifier: Apache-2.0
// Where the bits of coded blocks went; for reports and tests.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"

namespace tierkv {

struct BlockStats {
  int64_t header_bits = 0;
  int64_t exponent_bits = 0;
  int64_t length_bits = 0;
  int64_t payload_bits = 0;  // code words or raw codes
  int64_t exception_bits = 0;
  int64_t exceptions = 0;
  int64_t padding_bits = 0;

  int64_t total_bits() const {
    return header_bits + exponent_bits + length_bits + payload_bits + exception_bits + padding_bits;
  }
  void add(const BlockStats& other) {
    header_bits += other.header_bits;
    exponent_bits += other.exponent_bits;
    length_bits += other.length_bits;
    payload_bits += other.payload_bits;
    exception_bits += other.exception_bits;
    exceptions += other.exceptions;
    padding_bits += other.padding_bits;
  }
  // The blocks in `size` bytes, as encode_block() writes them.
  void add_blocks(const uint8_t* bytes, int64_t size) {
    for (const uint8_t* const end = bytes + size; bytes < end;) bytes += add_block(bytes);
  }

 private:
  // Returns the bytes of the block.
  int32_t add_block(const uint8_t* bytes) {
    const BlockHeader h = load_header_and_payload(bytes);
    const bool is_raw = is_raw_mode(h.mode);
    const int32_t streams = is_raw ? 0 : kWarpLanes * h.streams_per_lane;
    const BlockLayout at = block_layout(h);
    const int64_t tiles = is_raw                        ? at.exceptions - at.payload
                          : h.mode == BlockMode::kSplit ? at.payload - at.low_plane
                                                        : 0;
    const int64_t before = total_bits();
    header_bits += 8 * kCodedBlockHeaderBytes;
    exponent_bits += int64_t{h.tokens} * h.exponent_bits;
    length_bits += int64_t{streams} * h.length_bits;
    payload_bits += 8 * tiles + h.payload_bits;
    exceptions += h.exceptions;
    exception_bits += int64_t{8} * kExceptionBytes * h.exceptions;
    padding_bits += 8 * at.bytes - (total_bits() - before);
    return at.bytes;
  }
};

}  // namespace tierkv
