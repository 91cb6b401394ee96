// SPDX-License-Identifier: Apache-2.0
// Counts of codes that a kernel leaves in device memory (code_counter.cuh), as build_codebook()
// takes them: the counting of KVComp section 3.1.2.
//
//   pairs [65536]   of two codes next to each other, by (first & 255) << 8 | (second & 255)
//   wide  [65536]   of single codes outside -128 .. 127, by their 16 bits
#pragma once

#include <cstdint>

#include "codec/host/coded/histogram.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

inline constexpr int32_t kHistogramCounts = 65536;

// The histogram of `pairs` and `wide` [kHistogramCounts] in host memory. Blocks of 64 tokens give
// what CodeHistogram::add() makes of them, but for quads, which a device does not count. Shorter
// blocks lack the pairs of padding and the values of an odd last token, so that a codebook of these
// counts may differ from the one that the host makes of the same codes.
CodeHistogram histogram_of_counts(Component component, int32_t head_dim, const uint32_t* pairs,
                                  const uint32_t* wide);

}  // namespace tierkv
