// SPDX-License-Identifier: Apache-2.0
// The two products of a decoding step with a coded cache, each in one kernel that decodes,
// dequantises and multiplies: KVComp's cache-resident decompression.
//
//   keys     scores = scale * K q     y [num_rows, columns, token_stride] of x [..., head_dim]
//   values   out = scale * p^T V      y [num_rows, columns, head_dim] of x [..., token_stride]
//
// A row is one (sequence, kv_head) with a run of coded blocks of 64 tokens, of which the last may
// have fewer; a column is a q head of its group. Codes are KVComp's: a value is low + step * code,
// with a step and a low for every channel of a block of keys and for every token of values.
//
//   keys     S^T = K Q^T     digits of K times q * step, then sum of q * (low + base * step)
//   values   O^T = V^T P^T   digits of V times p * step, then sum of p * (low + base * step)
//
// Attention with a softmax between the products, over one step for a whole row, is
// attention/coded/coded_attention.h; this is for callers with their own softmax, and to compare
// with.
//
// Bad input: as in coded_attention.h, but a block of keys is refused alone: its scores are zeros. A
// row with a refused block of values has zeros for its output.
//
// Source: KVComp sections 3.1.1 (quantisation) and 3.3.2 (one kernel for each product).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/coded/coded_attention.h"
#include "bench/baselines/coded/tree_decode.h"
#include "codec/format/codebook.h"

namespace tierkv {

// Of a code word of kSingle.
inline constexpr int32_t kMaxSingleLength = 11;

struct alignas(16) CodedMatvecRow {
  int32_t first_item = 0;   // blocks of the rows before it
  int32_t first_block = 0;  // of its ceil(tokens / 64) blocks in the directory
  int32_t tokens = 0;
  int32_t unused = 0;
};

struct CodedMatvec {
  const uint8_t* bytes = nullptr;         // device, [size], 16-byte aligned
  const CodedBlockRef* blocks = nullptr;  // device, [num_blocks]
  // Device, fp16 [num_blocks, 2, n], 16-byte aligned: the steps, then the lows of a block. n is
  // head_dim (keys) or kBlockTokens (values).
  const uint16_t* units = nullptr;
  const CodedMatvecRow* rows = nullptr;  // device, [num_rows]
  const uint16_t* x = nullptr;           // device, fp16, finite, 16-byte aligned
  float* y = nullptr;                    // device, out; of keys, what lies behind a row is left
  StatusCode* status = nullptr;  // device, out: [num_items] of keys, [num_rows] of values: kOk or
                                 // kCorrupt
  void* workspace = nullptr;     // device, coded_matvec_workspace_bytes(), 256-byte aligned
  DeviceCodebook codebook;       // component: which product
  int64_t size = 0;
  int64_t token_stride = 0;  // even, at least the tokens of any row
  int32_t num_rows = 0;
  int32_t num_items = 0;  // blocks of all rows
  int32_t num_blocks = 0;
  int32_t columns = 0;
  int32_t head_dim = 0;  // 64, 96 or 128
  float scale = 1.0f;
  int32_t max_block_bytes = 0;  // of a coded block; raw ones may be larger
  // With entries: bit by bit through the tree (TreeForm::kLoop) instead of by table. Mode kSingle,
  // one stream a lane.
  DeviceTree tree;

  // kInvalidArgument or kUnsupported naming the field. Reads no array.
  Status validate() const;
  // Whether the arrays are there.
  Status validate_arrays() const;
};

// Halves of `units` that a block has.
TKV_HD constexpr int32_t block_unit_count(Component component, int32_t head_dim) {
  return 2 * (component == Component::kKey ? head_dim : kBlockTokens);
}

// The reference: plain loops in double over the codes of decode_block(). The arrays lie in host
// memory; the tables of call.codebook and the workspace are not used. It also refuses what only
// decode_block() looks at: checksums and padding.
Status multiply_coded_host(const CodedMatvec& call, const Codebook& codebook);

struct CodedMatvecGrid : CodedAttentionGrid {
  int32_t items_per_warp = 0;
};
// The copies of the table the device has room for; at most 2^most_copies_log, for comparisons.
Result<CodedMatvecGrid> coded_matvec_grid(const CodedMatvec& call, int32_t most_copies_log = 5);
size_t coded_matvec_workspace_bytes(const CodedMatvec& call, const CodedMatvecGrid& grid);

// One kernel for keys, two for values, for every kCodedColumns columns; no synchronisation; can be
// captured.
Status multiply_coded(const CodedMatvec& call, const CodedMatvecGrid& grid, GpuStream stream);

}  // namespace tierkv
