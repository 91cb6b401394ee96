// Histograms of codes that lie in device memory, as build_codebook() takes them: the counting of
// KVComp section 3.1.2. One histogram serves many rows.
//
// Bound: memory, the codes are read once. A CTA counts the pairs of narrow codes in shared memory,
// a copy of the table for each lane, so that lanes never meet; others go to memory one by one.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/host/histogram.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

// Whole blocks of 64 tokens of one row.
struct alignas(16) HistogramRow {
  int64_t codes = 0;        // of token 0, in elements, a multiple of 8
  int32_t first_block = 0;  // blocks of the rows before it
  int32_t histogram = 0;    // not less than that of the row before it
};

struct CodeHistograms {
  const int16_t* codes = nullptr;      // device, 16-byte aligned
  const HistogramRow* rows = nullptr;  // device, [num_rows]
  uint32_t* pairs = nullptr;           // device, [num_histograms][65536]; added to
  uint32_t* wide = nullptr;            // device, [num_histograms][65536]; added to
  int64_t token_stride = 0;            // in elements, a multiple of 8
  int32_t num_rows = 0;
  int32_t num_blocks = 0;  // of all rows
  int32_t num_histograms = 0;
  int32_t head_dim = 0;  // a multiple of 16, at most kMaxHeadDim
  Component component = Component::kKey;

  // kInvalidArgument naming the field. Reads no array.
  Status validate() const;
};
inline constexpr int32_t kHistogramCounts = 65536;

// One kernel. Rows and what they lead to are trusted.
Status count_codes(const CodeHistograms& call, GpuStream stream);

// The histogram of `pairs` and `wide` [kHistogramCounts] in host memory: what CodeHistogram::add()
// makes of the same blocks, but for quads, which a device does not count.
CodeHistogram histogram_of_counts(Component component, int32_t head_dim, const uint32_t* pairs,
                                  const uint32_t* wide);

}  // namespace tierkv
