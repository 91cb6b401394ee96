// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of entropy-coded blocks: keys and values are decoded in registers, by
// the lanes that multiply them.
//
// A row is one (sequence, kv_head). Its cache is a run of coded blocks of 64 tokens (the last may
// have fewer), keys and values apart, and a raw window. All codes are those of a global step
// (codec/format/global_step.h), so a row has one scale for its keys and one for its values, and no
// metadata to read. One key codebook and one value codebook of the same mode, kPair or kSingle of
// at most 32 levels, serve a call: the scope of KVComp section 3.2, a layer. Or a family of each,
// of which every block names one by its table id: as many as shared memory holds.
//
//   scores    S^T = K Q^T     digits of K times q, then sm_scale * key_step * (S + base * sum of q)
//   output    O^T = V^T P^T   digits of V times p, then value_step * (O + base * sum of p)
//
// Or all blocks of a call are weighted: see WeightedRows.
//
// A mean basis costs nothing here: blocks and window hold x - mean, the mean of the values is added
// to the output, and the lse gets sm_scale * q . mean of the keys.
//
// Bad input: what the bytes say is checked before it is used as a size or a position; a stream that
// does not end where the next one begins, or a block that contradicts its row, makes the row
// kCorrupt, with output 0 and lse -infinity. Other rows are not affected. Checksums and zero
// padding are not looked at.
//
// Sources: KVComp section 3.3 (decoding fused with the matrix-vector product), BitDecoding (the
// layout follows the instruction); docs/internals/coded-attention.md.
#pragma once

#include <cstddef>
#include <cstdint>

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

// An item is 64 tokens of a row, or what is left of its blocks or of its window.
struct alignas(16) CodedRow {
  int32_t first_item = 0;     // items of the rows before it
  int32_t first_block = 0;    // of its coded_row_blocks() blocks in the directories
  int32_t coded_tokens = 0;   // the oldest ones
  int32_t window_tokens = 0;  // the newest ones
  int64_t first_page = 0;     // of its ceil(window_tokens / 64) pages in window_pages
  int32_t step = 0;           // index of its steps; -1: nothing of the row is read or written
  int32_t mean = 0;           // index of its means; -1: none
  int32_t sink_tokens = 0;    // raw, before the coded ones; weighted blocks only
  uint32_t first_sink = 0;    // where they lie in WeightedRows::raw_sinks, in units of 16 bytes
};
// Blocks of a row. Block b holds those of the positions 64 b to 64 b + 63 that are not sinks.
inline constexpr int32_t coded_row_blocks(int32_t coded_tokens, int32_t sink_tokens) {
  return coded_tokens > 0 ? (coded_tokens + sink_tokens + kBlockTokens - 1) / kBlockTokens : 0;
}
// The sinks are an item of their own, behind those of the blocks.
inline constexpr int32_t coded_row_items(int32_t coded_tokens, int32_t window_tokens,
                                         int32_t sink_tokens = 0) {
  return coded_row_blocks(coded_tokens, sink_tokens) + (sink_tokens > 0 ? 1 : 0) +
         (window_tokens + kBlockTokens - 1) / kBlockTokens;
}

// The blocks of one component.
struct CodedComponent {
  const uint8_t* bytes = nullptr;         // device, [size], 16-byte aligned
  const CodedBlockRef* blocks = nullptr;  // device, [num_blocks]
  const float* steps = nullptr;           // device, [num_steps]
  const float* means = nullptr;           // device, [num_means, head_dim]; null: none
  int64_t size = 0;
  DeviceCodebook codebook;
  const DeviceCodebook* others = nullptr;  // host, [num_others]: the rest of a family
  int32_t num_others = 0;                  // at most kMostCodedBooks - 1
};
inline constexpr int32_t kMostCodedBooks = 16;  // of a component

// What weighted blocks (codec/format/weighted_block_format.h) need beside their codes; the tables
// are made by attention/coded/weighted_tables.h. With key_scales all blocks of a call are weighted,
// every component has one codebook, CodedComponent::steps of keys are the units that go with
// key_scales and those of values the steps of WeightedRow, and means are in key_means.
//
// Keys lie before RoPE: a query is turned back by the position of a block's first token, a decoded
// key is turned by its place in the block, in fp16.
struct WeightedRows {
  // Arrays are in device memory, 16-byte aligned.
  const float* key_scales = nullptr;      // [num_steps, head_dim]
  const uint16_t* key_means = nullptr;    // fp16, [num_steps, head_dim], ordered
  const uint16_t* place_turns = nullptr;  // fp16, [64 * head_dim]; null without RoPE
  // Cosines and sines, [num_block_turns, rotary_dims / 2, 2], of the first coded position of each
  // block: position sink_tokens in block 0. Null without RoPE.
  const float* block_turns = nullptr;
  // fp16: for each row the keys of its sinks after RoPE, [CodedRow::sink_tokens, head_dim], then
  // the values.
  const uint8_t* raw_sinks = nullptr;
  int64_t raw_sinks_size = 0;   // bytes
  int32_t num_block_turns = 0;  // a row of more blocks is kCorrupt, unless without RoPE
  int32_t rotary_dims = 0;
  // Every row that has blocks has this many sinks, at most kMostRawSinks; a row without blocks may
  // have any number up to kMostRawSinks.
  int32_t sink_tokens = 0;
  // Attends to the blocks alone, for every query: the row's sinks and window are elsewhere, and are
  // no items. sink_tokens says where block 0 begins.
  bool blocks_only = false;
  // kHalves over the whole head, or kNeighbours; else kUnsupported.
  RopePairing pairing = RopePairing::kNone;

  bool any() const { return key_scales != nullptr; }
};
inline constexpr int32_t kMostRawSinks = 16;

struct CodedAttention {
  CodedComponent keys, values;
  const CodedRow* rows = nullptr;  // device, [num_rows]
  // Device, [window_size]: pages of 64 tokens, four fp16 tiles of keys, then four of values. Of a
  // row's last tile in use the other tokens are zeros.
  const uint8_t* window = nullptr;
  const int32_t* window_pages = nullptr;  // device, [num_window_pages]: numbers of pages
  // Device, of dtype, [num_rows / num_kv_heads, q_len, num_kv_heads, columns, head_dim], 16-byte
  // aligned: with one query [num_rows, columns, head_dim].
  const void* q = nullptr;
  void* out = nullptr;   // device, like q
  float* lse = nullptr;  // device, like q without head_dim; may be null
  // Device, [num_kv_heads * columns], learned sinks as in AttentionConfig's calls: logits that are
  // part of the denominators and have no value; -infinity: none. Null: no head has one.
  const float* sinks = nullptr;
  StatusCode* row_status = nullptr;  // device, out: [num_rows]
  void* workspace = nullptr;         // device, coded_attention_workspace_bytes(), 256-byte aligned
  // Device: the number of items, where rows may grow while a captured call is replayed; null:
  // num_items.
  const int32_t* item_count = nullptr;
  int64_t window_size = 0;
  int64_t window_page_bytes = 0;  // from a page to the next, a multiple of 16
  int64_t num_window_pages = 0;
  int32_t num_rows = 0;
  int32_t num_items = 0;   // of all rows; with item_count the most there may be
  int32_t num_blocks = 0;  // of each directory
  int32_t num_steps = 0;
  int32_t num_means = 0;
  int32_t columns = 0;  // q heads of a kv_head
  int32_t head_dim =
      0;  // 64, 96, 128 or 256, whose blocks are two slices each, one behind the other
  // Queries of a sequence, those of its newest tokens: query j does not see the newest q_len - 1 -
  // j of them, which must be in the window of a row that has blocks; else it is kCorrupt.
  int32_t q_len = 1;
  // Neighbouring rows are those of a sequence; read where q_len > 1, and with sinks.
  int32_t num_kv_heads = 1;
  DType dtype = DType::kFloat16;  // of q and out; or kBFloat16
  float sm_scale = 0;
  // What shared memory has room for, of a slice where there are two: coded blocks must fit, raw
  // ones are read from memory if not. A weighted block of two slices, one of which is coded, must
  // fit into twice as much; else its row is kCorrupt.
  int32_t max_block_bytes = 0;
  int32_t most_shared_bytes = 0;  // of a CTA, for tests: less than the device has; 0: all it has
  WeightedRows weighted;          // read where the blocks are weighted
  // Blocks are raw instead: 64 bytes that are passed over, then fp16 tiles of 16 tokens, finished
  // keys or values. Every query sees all of a row's blocks, which are its items; block 0 begins
  // behind its sink_tokens. Codebooks, steps, means and windows are not read.
  bool raw_blocks = false;

  // That a row's blocks are read for.
  int32_t all_columns() const { return columns * q_len; }
  int32_t num_tables() const { return 2 + keys.num_others + values.num_others; }
  // Whether blocks are of one slice and one codebook a component.
  bool is_uniform() const {
    return head_dim <= kSliceDims && keys.num_others + values.num_others == 0;
  }
  // And of one query, in fp16: what the fastest kernels are for.
  bool is_plain() const { return q_len == 1 && dtype == DType::kFloat16 && is_uniform(); }

  // kInvalidArgument or kUnsupported naming the field: sizes and codebooks, all that a grid depends
  // on.
  Status validate() const;
  // Whether the arrays are there.
  Status validate_arrays() const;
};

// Columns beyond these take another pass over the cache.
inline constexpr int32_t kCodedColumns = 8;
// Of a CTA, at most: fewer where shared memory is too small. Outputs of 256 channels take the
// registers of two warps.
TKV_HD constexpr int32_t coded_warps(int32_t head_dim) {
  return head_dim <= kSliceDims ? 16 : 8;
}

// How a device runs a call.
struct CodedAttentionGrid {
  int32_t num_ctas = 0;
  int32_t warps = 0;           // of a CTA, at most coded_warps()
  int32_t copies_log = 0;      // 2^copies_log copies of each table
  int32_t slots_per_warp = 0;  // of weighted blocks 2, which share slot_bytes
  int32_t slot_bytes = 0;
  int32_t shared_bytes = 0;
};
// The warps and then the copies that the device has room for; at most 2^most_copies_log, for
// comparisons. kUnsupported where one copy does not fit, saying how many codebooks do.
Result<CodedAttentionGrid> coded_attention_grid(const CodedAttention& call,
                                                int32_t most_copies_log = 5);
size_t coded_attention_workspace_bytes(const CodedAttention& call, const CodedAttentionGrid& grid);

// Two kernels a pass, before them one that converts queries where they are several or not in fp16;
// no synchronisation; can be captured.
Status attend_coded(const CodedAttention& call, const CodedAttentionGrid& grid, GpuStream stream);

}  // namespace tierkv
