// SPDX-License-Identifier: Apache-2.0
// Decode attention over the compressed cache: the pages of every tier of every row, in one call,
// without unpacking them to memory.
//
//   config       heads, head_dim, which format lies on which side
//   grid         attention_grid(config): what this device can hold
//   workspace    attention_workspace_bytes(config, grid, sequences), zeroed once
//   every step   plan_attention(config, grid, table, batch, workspace, stream), then for a layer
//                attend(config, grid, {table, pages, batch, layer, q, out, lse}, ...)
//
// A row is one (sequence, kv_head). Its q heads attend to all tokens of all its tiers. With several
// queries (q_len) each query attends to the tokens up to its own. The plan cuts the work on the
// device from the token counts. So both calls can be captured in a CUDA graph and stay valid while
// sequences grow, as long as the tables keep their place. Calls allocate and synchronise nothing;
// they write statuses of rows to the workspace.
//
// What is not supported is refused by name before anything is launched:
// AttentionConfig::validate().
//
// Sources: DiffKV section 6.2 (mixed precision in one kernel), BitDecoding sections IV-V (tensor
// cores on packed codes), FlashInfer (plan and run, mergeable states).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/page.h"
#include "tierkv/page_table.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

inline constexpr int32_t kMaxAttentionTiers = 3;
inline constexpr int32_t kMaxQueryTokens = 8;

// The format of the pages on one side of the page tables.
struct AttentionTier {
  int32_t side = 0;
  TierFormat format;
};

inline constexpr int32_t kMaxAttentionClasses = 4;

// Classes of kv_heads whose tiers differ in formats; a class's tiers lie on the sides of the
// config's. The tokens of a page then follow from the row's class: what the page table's shape says
// of them is not read.
struct HeadClasses {
  int32_t count = 1;  // 1 to kMaxAttentionClasses
  // Formats of the classes 1 to count - 1, by tier; class 0 has the config's tiers. Codes of values
  // have no more bits than those of keys; raw keys have raw values.
  TierFormat format[kMaxAttentionClasses - 1][kMaxAttentionTiers];
  // Host memory, [num_layers * num_kv_heads], 0 to count - 1: the class of each kv_head. Read while
  // a call runs. With it a config has at most 64 kv_heads and 128 layers. Null where count is 1.
  const uint8_t* of_head = nullptr;
};

struct TKV_API AttentionConfig {
  int32_t num_layers = 1;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;  // 64, 96, 128 or 256
  // Queries of a sequence, 1 to kMaxQueryTokens: those of its newest tokens, each of which sees the
  // tokens up to its own.
  int32_t q_len = 1;
  DType dtype = DType::kFloat16;  // of q, out and raw pages
  double sm_scale = 0;            // factor of q . k before the softmax, usually 1 / sqrt(head_dim)
  int64_t page_bytes = 0;
  bool page_records = true;  // false: pages end before their scores and positions
  int32_t num_tiers = 0;     // 1 to kMaxAttentionTiers
  AttentionTier tiers[kMaxAttentionTiers];
  int32_t sliding_window_tokens = 0;  // must be 0: refused by name
  HeadClasses classes;

  int32_t group_size() const { return num_q_heads / num_kv_heads; }
  // kInvalidArgument or kUnsupported with the field's name.
  Status validate() const;
};

// How the current device runs a config: a fixed number of CTAs, and the shared memory that each
// has.
struct AttentionGrid {
  int32_t num_ctas = 0;
  int32_t slot_bytes = 0;  // of one chunk in flight
  int32_t slots_per_warp = 0;
  int32_t shared_bytes = 0;
  int32_t warps_per_cta = 8;  // fewer where shared memory does not hold the slots of 8
  // What a tile of 16 tokens takes beside the reading of its bytes, in units of the time that 64
  // bytes take. The plan cuts work by both.
  int32_t tile_cost = 16;
};
// kUnsupported when the device has too little shared memory, kCuda when it cannot be asked.
TKV_API Result<AttentionGrid> attention_grid(const AttentionConfig& config);

// The sequences of a call: kv_head h of batch entry i is row sequences[i] * rows_per_sequence +
// layer * num_kv_heads + h of the page table. -1 is padding: a row without tokens, whose output is
// 0 and its lse -infinity (with learned sinks: its sink).
struct AttentionBatch {
  const int32_t* sequences = nullptr;  // device, [count]; null: 0, 1, 2, ...
  int32_t count = 0;
};

// Caller-owned device memory, aligned to 256 bytes, set to zero before its first use. One workspace
// serves one stream.
struct AttentionWorkspace {
  void* memory = nullptr;
  size_t bytes = 0;
};
TKV_API size_t attention_workspace_bytes(const AttentionConfig& config, const AttentionGrid& grid,
                                         int32_t num_sequences);

// Cuts the work of all layers. Must follow every change of the table or the batch, and precede
// attend().
TKV_API Status plan_attention(const AttentionConfig& config, const AttentionGrid& grid,
                              const PageTableView& table, const AttentionBatch& batch,
                              const AttentionWorkspace& workspace, GpuStream stream);

// Where the newest q_len tokens of each sequence lie: in one tier (all of them, in the same places
// for every kv_head), as its last tokens or in a ring. Not read where q_len is 1.
struct AttentionTail {
  int32_t tier = -1;  // of config.tiers; -1: the last one
  // Device, [count], the index in the tier of the newest token; null: the last one.
  const int32_t* newest = nullptr;
  // Once the tier holds ring_first + ring_tokens tokens, those from index ring_first on are a ring,
  // and those before it older than all others. 0: no ring.
  int32_t ring_first = 0;
  int32_t ring_tokens = 0;
  // They are in no tier: every query sees all tokens, and nothing of the above is read.
  bool is_elsewhere = false;
};

// Which pages of a tier are settled: see AttendCall.
enum class Settled : int32_t {
  kNothing,
  kAllButLastPage,  // of every row: tokens are appended behind them
  kAll,
};

struct AttendCall {
  PageTableView table;   // device, as it was planned
  PageView pages;        // device
  AttentionBatch batch;  // as it was planned
  int32_t layer = 0;
  // Device, [count, q_len, num_q_heads, head_dim], 16-byte aligned. With bfloat16 an
  // infinity in one query head may change the outputs of the others that share its kv head.
  const void* q = nullptr;
  void* out = nullptr;   // device, like q
  float* lse = nullptr;  // device, [count, q_len, num_q_heads], natural logarithm; may be null
  // Learned sinks, device, [num_q_heads]: the logit of each head that is part of its softmax's
  // denominator and has no value; finite, or -infinity for none. Null: no head has one.
  const float* sinks = nullptr;
  AttentionTail tail;
  // The plan and the tables are settled when nothing that may still run writes them: neither the
  // kernel that precedes this call on the stream, nor a kernel that may still run beside that one.
  // (attend() with a settled plan begins before its predecessor has ended.) The predecessor may
  // write q. The beginning of this call then overlaps the predecessor's end.
  bool plan_is_settled = false;
  // The same for the pages, by config.tiers; read only where the plan is settled. The first chunks
  // are then copied while the predecessor ends, and the call waits for q alone.
  Settled settled[kMaxAttentionTiers] = {};
};
TKV_API Status attend(const AttentionConfig& config, const AttentionGrid& grid,
                      const AttendCall& call, const AttentionWorkspace& workspace,
                      GpuStream stream);

// One StatusCode per row of `layer`, [count * num_kv_heads] in device memory, valid once the last
// attend() of the layer is done: kCorrupt where a count or a page id led outside its table or pool
// (what it named was left out).
TKV_API const int32_t* attention_row_status(const AttentionConfig& config,
                                            const AttentionGrid& grid, int32_t num_sequences,
                                            int32_t layer, const AttentionWorkspace& workspace);

// Joins two partial results over disjoint tokens (a window kept elsewhere, a shared prefix, draft
// tokens):
//   out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b),   lse = log(e^lse_a + e^lse_b).
// A part with lse = -infinity has no tokens. Outputs may be the inputs. Here and below head_dim is
// even and at most 4096, the dtype fp16 or bfloat16, and outputs are aligned to 4 bytes.
struct AttentionPart {
  const void* out = nullptr;   // [rows, head_dim] of the dtype
  const float* lse = nullptr;  // [rows]
};
struct MergeCall {
  AttentionPart a, b;
  void* out = nullptr;
  float* lse = nullptr;
  int64_t rows = 0;  // 0: nothing is done, and pointers may be null
  int32_t head_dim = 0;
  DType dtype = DType::kFloat16;
};
TKV_API Status merge_attention_host(const MergeCall& call);
TKV_API Status merge_attention(const MergeCall& call, GpuStream stream);

// Adds learned sinks to finished results, in place; of parts that are merged to the merged one,
// once:
//   out *= 1 / (1 + e^(sink - lse)),   lse = log(e^lse + e^sink).
// Where lse is -infinity, out becomes 0 whatever it was.
struct SinkCall {
  void* out = nullptr;           // [rows, num_q_heads, head_dim] of the dtype
  float* lse = nullptr;          // [rows, num_q_heads]
  const float* sinks = nullptr;  // [num_q_heads], as AttendCall's
  int64_t rows = 0;
  int32_t num_q_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::kFloat16;
};
TKV_API Status apply_sinks_host(const SinkCall& call);
TKV_API Status apply_sinks(const SinkCall& call, GpuStream stream);

}  // namespace tierkv
