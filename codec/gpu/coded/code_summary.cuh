// SPDX-License-Identifier: Apache-2.0
// What codes a histogram in device memory holds.
#pragma once

#include "codec/gpu/coded/code_histograms.h"
#include "gpu/warp.cuh"

namespace tierkv {

using Count = unsigned long long;  // what atomicAdd() takes

inline constexpr int32_t kBookThreads = 256;
inline constexpr int32_t kNarrowCodes = 256;  // -128 to 127, by code modulo 256
static_assert(kBookThreads == kNarrowCodes, "a thread for a residue");

__device__ __forceinline__ int32_t book_thread() {
  return static_cast<int32_t>(threadIdx.x);
}

struct CodeSummary {
  Count narrow[kNarrowCodes];
  Count total;
  int32_t min_code, max_code;  // 0 and -1 where there is none
};

struct SummaryShared {
  Count residues[kNarrowCodes];
  int32_t low[kBookThreads], high[kBookThreads];
};

// By a CTA of kBookThreads.
__device__ inline void summarise_counts(const uint32_t* pairs, const uint32_t* wide,
                                        SummaryShared* shared, CodeSummary* to) {
  const int32_t residue = book_thread();
  Count of_residue = 0, of_wide = 0;
  int32_t low = INT16_MAX + 1, high = INT16_MIN - 1;
  for (int32_t i = 0; i < kNarrowCodes; ++i) {
    of_residue += pairs[i * kNarrowCodes + residue];
    of_residue += pairs[residue * kNarrowCodes + i];
    const uint32_t n = wide[i * kNarrowCodes + residue];
    const int32_t code = static_cast<int16_t>(i * kNarrowCodes + residue);
    of_wide += n;
    if (n > 0) low = min(low, code), high = max(high, code);
  }
  const int32_t code = static_cast<int8_t>(residue);
  if (of_residue > of_wide) low = min(low, code), high = max(high, code);
  shared->residues[residue] = of_residue;
  shared->low[residue] = low;
  shared->high[residue] = high;
  CodeSummary& out = *to;
  out.narrow[residue] = of_residue - of_wide;
  __syncthreads();
  if (residue != 0) return;
  out.total = 0;
  for (int32_t i = 0; i < kNarrowCodes; ++i) {
    out.total += shared->residues[i];
    low = min(low, shared->low[i]);
    high = max(high, shared->high[i]);
  }
  out.min_code = out.total == 0 ? 0 : low;
  out.max_code = out.total == 0 ? -1 : high;
}

// A histogram and its summary.
struct HistogramView {
  const CodeSummary& summary;
  const uint32_t* pairs;
  const uint32_t* wide;

  __device__ __forceinline__ Count count(int32_t code) const {
    return code >= -128 && code < 128 ? summary.narrow[code & 255] : wide[code & 0xffff];
  }
  // As CodeHistogram::pairs_are_exact().
  __device__ __forceinline__ bool pairs_are_exact() const {
    return summary.min_code >= -128 && summary.max_code <= 255 &&
           summary.max_code - summary.min_code < 256;
  }
};

}  // namespace tierkv
