// A block's codes between entropy decoding and row-major order: pairs as the lanes of a warp hold
// them.
#pragma once

#include <cstdint>

#include "codec/coded_block_format.h"

namespace tierkv {

// Pair p of lane l is [p * 32 + l], p = (tile * dim_blocks + dim_block) * 4 + r as in
// pair_position(); first code in the low half, second in the high half, both int16.
struct LanePairs {
  alignas(64) uint32_t pairs[kBlockTokens * kSliceDims / 2];
};

// Row-major codes of one slice.
struct SliceCodes {
  int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int64_t stride;
};

// Copies the pairs of real tokens and channels to their rows; padding is dropped. The two forms do
// the same: the first is the definition, the second uses SIMD.
void scatter_pairs_reference(const LanePairs& pairs, Component component, const SliceCodes& out);
void scatter_pairs(const LanePairs& pairs, Component component, const SliceCodes& out);

}  // namespace tierkv
