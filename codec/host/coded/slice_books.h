// SPDX-License-Identifier: Apache-2.0
// The codebooks of one slice.
#pragma once

#include <algorithm>
#include <cstdint>

#include "codec/format/codebook.h"
#include "codec/format/coded_block_format.h"
#include "codec/format/fragment_order.h"

namespace tierkv {

inline constexpr int32_t kSliceDimBlocks = kSliceDims / kDimBlock;

// The codebook of each dim block. All have one component, mode and number of streams.
struct SliceBooks {
  const Codebook* of[kSliceDimBlocks];

  explicit SliceBooks(const Codebook& everywhere) {
    for (const Codebook*& book : of) book = &everywhere;
  }
  const Codebook& first() const { return *of[0]; }
  bool single() const {
    for (const Codebook* book : of) {
      if (book != of[0]) return false;
    }
    return true;
  }
  int32_t streams() const { return kWarpLanes * first().streams_per_lane; }
  // Codes and symbols of one stream in one dim block of a tile.
  int32_t codes_per_fragment() const { return 2 * kPairsPerFragment / first().streams_per_lane; }
  int32_t symbols_per_fragment() const { return codes_per_fragment() / first().codes_per_symbol(); }
  // Which of the eight codes of its lane in a dim block code i of a stream is: code i % 2 of pair
  // i / 2. Streams of a lane take its pairs or, where a symbol has two, its symbols in turns.
  int32_t lane_code(int32_t stream, int32_t i) const {
    const int32_t unit = std::max(2, first().codes_per_symbol());
    return (i / unit * first().streams_per_lane + stream / kWarpLanes) * unit + i % unit;
  }
};

}  // namespace tierkv
