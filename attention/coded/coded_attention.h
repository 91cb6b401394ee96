// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of coded blocks (codec/format/coded_block_format.h): keys and
// values are decoded in registers, by the lanes that multiply them
// (docs/internals/coded-attention.md).
//
// A row is one (sequence, kv_head). Its cache is a run of blocks of 64 tokens (the last may have
// fewer), keys and values apart. One key codebook and one value codebook of pairs, with at most 32
// levels, serve a call: the scope of KVComp section 3.2, a layer. Every query sees all of a row's
// blocks.
//
// Bad input: what the bytes say is checked before it is used as a size or a position; a stream that
// does not end where the next one begins, or a block that contradicts its row, makes the row
// kCorrupt, with output 0 and lse -infinity. Other rows are not affected. Checksums and zero
// padding are not looked at.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/core/prior_attention.h"
#include "codec/format/coded_block_format.h"
#include "codec/gpu/coded/coded_batch.h"
#include "tierkv/layout.h"
#include "tierkv/rope.h"
#include "tierkv/status.h"

namespace tierkv {

// Where a block lies, in units of 16 bytes.
struct CodedBlockRef {
  uint32_t offset = 0;
  uint32_t units = 0;
};

// An item is a block of a row.
struct alignas(16) CodedRow {
  int32_t first_item = 0;    // items of the rows before it
  int32_t first_block = 0;   // of its coded_row_blocks() blocks in the directories
  int32_t coded_tokens = 0;  // of all its blocks
  int32_t step = 0;          // index of its steps; -1: nothing of the row is read or written
  int32_t sink_tokens = 0;   // positions before the coded ones, which lie elsewhere
};
// Blocks of a row. Block b holds those of the positions 64 b to 64 b + 63 that are not sinks.
inline constexpr int32_t coded_row_blocks(int32_t coded_tokens, int32_t sink_tokens) {
  return coded_tokens > 0 ? (coded_tokens + sink_tokens + kBlockTokens - 1) / kBlockTokens : 0;
}

// The blocks of one component.
struct CodedComponent {
  const uint8_t* bytes = nullptr;         // device, [size], 16-byte aligned
  const CodedBlockRef* blocks = nullptr;  // device, [num_blocks]
  // Device, [num_steps]: of keys the units that go with WeightedRows::key_scales, of values the
  // steps of WeightedRow.
  const float* steps = nullptr;
  int64_t size = 0;
  DeviceCodebook codebook;
};

// What coded blocks need beside their codes. check_weighted_keys() says which rows may be attended
// to, weighted_turns() makes the turns (attention/coded/weighted_tables.h).
//
// A key before RoPE is x = fma(code * f(e), scale_d, mean_d) (codec/format/weighted_step.h). Scales
// are those of pairs of dims that turn together, so they go with the queries; keys are
//   2^-9 x / scale_d = fma(code * 2^-24, f(e) * 2^15, 2^-9 mean_d / scale_d)
// in fp16. Queries are multiplied by key_scales, scale_d over twice the row's largest one, so that
// fp16 holds a pair of any query turned back; the row's unit, 2^10 times its largest scale,
// multiplies scores. A query is turned back by the position of a block's first token, a decoded key
// is turned by its place in the block.
struct WeightedRows {
  // Arrays are in device memory, 16-byte aligned.
  const float* key_scales = nullptr;  // [num_steps, head_dim]
  // fp16, [num_steps, head_dim]: 2^-9 mean_d / scale_d, in the order of the registers.
  const uint16_t* key_means = nullptr;
  const uint16_t* place_turns = nullptr;  // fp16, [64 * head_dim]; null without RoPE
  // fp16, [num_block_turns, head_dim], ordered: cosines and sines of the first coded position of
  // each block, position sink_tokens in block 0. Null without RoPE.
  const uint16_t* block_turns = nullptr;
  int32_t num_block_turns = 0;  // a row of more blocks is kCorrupt, unless without RoPE
  int32_t pairs = 0;            // of dims that turn; see halves_fit()
  int32_t sink_tokens = 0;      // of every row that has blocks, at most kMostRawSinks
  RopePairing pairing = RopePairing::kNone;  // what weighted_turns() has made tables for
};
inline constexpr int32_t kMostRawSinks = 16;

struct CodedAttention {
  CodedComponent keys, values;
  const CodedRow* rows = nullptr;  // device, [num_rows]
  // Device, of dtype, [num_rows / num_kv_heads, q_len, num_kv_heads, columns, head_dim], 16-byte
  // aligned: with one query [num_rows, columns, head_dim].
  const void* q = nullptr;
  bool q_is_settled = false;         // no kernel that may still run writes q or reads the workspace
  void* out = nullptr;               // device, like q
  float* lse = nullptr;              // device, like q without head_dim; may be null
  PriorAttention prior;              // what `out` holds
  StatusCode* row_status = nullptr;  // device, out: of row r at r * status_stride
  int32_t status_stride = 1;         // 0: one word for all rows, which keeps its first failure
  void* workspace = nullptr;         // device, coded_attention_workspace_bytes(), 256-byte aligned
  // Device: the number of items, where rows may grow while a captured call is replayed; null:
  // num_items.
  const int32_t* item_count = nullptr;
  int32_t num_rows = 0;
  int32_t num_items = 0;   // of all rows; with item_count the most there may be
  int32_t num_blocks = 0;  // of each directory
  int32_t num_steps = 0;
  int32_t columns = 0;  // q heads of a kv_head
  int32_t head_dim =
      0;              // 64, 96, 128 or 256, whose blocks are two slices each, one behind the other
  int32_t q_len = 1;  // queries of a sequence
  int32_t num_kv_heads = 1;       // neighbouring rows are those of a sequence; read where q_len > 1
  DType dtype = DType::kFloat16;  // of q and out; or kBFloat16
  float sm_scale = 0;
  // What shared memory has room for, of a slice where there are two: coded blocks must fit, raw
  // ones are read from memory if not. A block of two slices, one of which is coded, must fit into
  // twice as much; else its row is kCorrupt.
  int32_t max_block_bytes = 0;
  WeightedRows weighted;
  // Blocks are raw instead: 64 bytes that are passed over, then fp16 tiles of 16 tokens, finished
  // keys or values. Codebooks, steps and `weighted` are not read.
  bool raw_blocks = false;

  // That a row's blocks are read for.
  int32_t all_columns() const { return columns * q_len; }
  // kInvalidArgument or kUnsupported naming the field: sizes and codebooks, all that a grid depends
  // on.
  Status validate() const;
  // Whether the arrays are there.
  Status validate_arrays() const;
};

// Columns beyond these take another pass over the cache.
inline constexpr int32_t kCodedColumns = 8;
// The most warps of a CTA; it has fewer where shared memory is too small. Outputs of 256 channels
// take the registers of two warps.
TKV_HD constexpr int32_t coded_warps(int32_t head_dim) {
  return head_dim <= kSliceDims ? 16 : 8;
}

// How a device runs a call.
struct CodedAttentionGrid {
  int32_t num_ctas = 0;
  int32_t warps = 0;       // of a CTA, at most coded_warps()
  int32_t copies_log = 0;  // 2^copies_log copies of each table
  int32_t slot_bytes = 0;  // of a warp's slot, which two blocks share
  int32_t shared_bytes = 0;
};
// The warps and then the copies that the device has room for. kUnsupported where one copy does not
// fit.
Result<CodedAttentionGrid> coded_attention_grid(const CodedAttention& call);
struct DeviceLimits;
// The same for limits that are given: those of the device, or less shared memory.
Result<CodedAttentionGrid> choose_coded_grid(const CodedAttention& call,
                                             const DeviceLimits& limits);
size_t coded_attention_workspace_bytes(const CodedAttention& call, const CodedAttentionGrid& grid);

// Two kernels a pass, before them one that converts queries where they are several or not in fp16;
// no synchronisation; can be captured.
Status attend_coded(const CodedAttention& call, const CodedAttentionGrid& grid, GpuStream stream);

}  // namespace tierkv
