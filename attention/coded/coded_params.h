// SPDX-License-Identifier: Apache-2.0
// What the kernels of coded attention are launched with.
#pragma once

#include <algorithm>

#include "attention/coded/key_turning.h"
#include "attention/core/columns.h"
#include "codec/format/coded_block_format.h"

namespace tierkv {

// What a block must say: words 0 and 1 of its header; tokens, exponents and stream lengths are left
// out.
struct ExpectedHeader {
  uint32_t first, second;
};
struct CodedHeaders {
  ExpectedHeader keys, values;
};
inline ExpectedHeader expected_header(const DeviceCodebook& c, int32_t head_dim) {
  return {kCodedBlockVersion | static_cast<uint32_t>(c.mode) << 8 |
              static_cast<uint32_t>(c.streams_per_lane) << 12 |
              static_cast<uint32_t>(c.component) << 14 | uint32_t{c.table_id} << 16,
          static_cast<uint32_t>(std::min(head_dim, kSliceDims)) << 8};
}

// Queries in fp16, row after row, each times a power of two of its row.
struct ConvertedQueries {
  uint16_t* halves = nullptr;  // [num_rows, all columns, head_dim]; null: the caller's are so
  float* units = nullptr;      // [num_rows]: what a row's halves are multiples of
};

// One pass over the cache, for at most kCodedColumns columns.
struct CodedKernelParams {
  // columns: of this pass. q: from its first column on, fp16 [num_rows, row_columns, head_dim].
  CodedAttention call;
  CodedAttentionGrid grid;
  CodedHeaders headers;
  uint32_t key_mask, value_mask;  // of the tables in shared memory
  int32_t row_columns;            // of all passes
  int32_t first_column;           // of this pass
  QueryColumns queries;           // where columns lie in out and lse
  const float* units;             // of ConvertedQueries; null: all 1
  uint32_t table_bytes;           // of a table with its copies, a power of two
  // The kernel before is one of this call or waits for all before it, and none that may still run
  // writes codebooks or turns: they are read before it ends.
  bool tables_are_settled;
};
using CodedKernel = void (*)(CodedKernelParams);
// Bits of the longest code word of a call.
inline int32_t longest_word(const CodedAttention& call) {
  return std::max(call.keys.codebook.max_length, call.values.codebook.max_length);
}
// The kernel of a call; null: there is none for so many copies.
CodedKernel find_coded_kernel(const CodedAttention& call, int32_t copies_log);
// The kernel of a call of coded blocks; null: there is none for so many copies. Each has an
// object, from weighted_instance.cu.in.
template <KeyTurning kTurning, int32_t kHeadDim>
CodedKernel find_weighted_kernel(const CodedAttention& call, int32_t copies_log);
// The queries of a call into `to`, one kernel; num_rows > 0.
Status convert_queries(const CodedAttention& call, const ConvertedQueries& to, GpuStream stream);

inline bool needs_conversion(const CodedAttention& call) {
  return call.q_len > 1 || call.dtype != DType::kFloat16;
}
inline QueryColumns coded_columns(const CodedAttention& call) {
  QueryColumns c;
  c.group = call.columns;
  c.q_len = call.q_len;
  c.num_kv_heads = call.num_kv_heads;
  c.of_row = call.all_columns();
  return c;
}

}  // namespace tierkv
