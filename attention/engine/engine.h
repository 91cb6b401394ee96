// SPDX-License-Identifier: Apache-2.0
// What the calls of tierkv/engine.h are made of: the cache of a layer, rows of the page table, and
// queries in the order and the coordinates that attention takes.
#pragma once

#include <cstdint>

#include "attention/core/prior_attention.h"
#include "attention/core/workspace.h"
#include "attention/tiers/shared_rows.h"
#include "codec/format/block_cache.h"
#include "tierkv/engine.h"

namespace tierkv {

Result<BlockCache> block_cache(const EngineConfig& config, const EngineLayer& layer);
// The config of attention for a batch with so many queries of each sequence. `config` is valid.
AttentionConfig attention_config(const EngineConfig& config, int32_t queries);
Result<SlotEncode> slot_encode(const EngineConfig& config, const EngineLayer& layer,
                               const EngineTokens& tokens);
Result<BlockDecode> block_decode(const EngineConfig& config, const EngineLayer& layer,
                                 const EngineRanges& ranges);

// Byte offsets in the workspace.
struct EngineWorkspace {
  size_t attention;  // of plan_attention() and attend()
  size_t tokens;     // SideCounts [rows]
  size_t slots;      // int32_t [rows][row_stride]
  size_t q, out;     // 16 bits [max_sequences][queries][num_q_heads][head_dim]
  size_t lse;        // float [max_sequences][queries][num_q_heads]
  size_t bytes;
};
EngineWorkspace engine_workspace(const EngineConfig& config, const EngineGrid& grid);

// Rows of the page table from block tables: entry e, kv_head h is row e * num_kv_heads + h.
struct BlockRows {
  EngineBatch batch;  // table_stride is set
  int32_t num_kv_heads = 0;
  int32_t block_tokens = 0;
  int32_t block_pages = 0;  // pages from a block to the next
  int32_t max_blocks = 0;   // of a row
  int32_t row_stride = 0;   // of slots
  int32_t* slots = nullptr;
  SideCounts* tokens = nullptr;

  TKV_HD int32_t sequence(int32_t entry) const {
    const int32_t s = batch.sequences == nullptr ? entry : batch.sequences[entry];
    return s >= 0 && s < batch.num_sequences ? s : -1;
  }
  TKV_HD int32_t length(int32_t entry) const {
    const int32_t s = sequence(entry);
    return s < 0 ? 0 : batch.seq_lens[s];
  }
  // Blocks of a row that are looked at.
  TKV_HD int32_t blocks(int32_t length) const {
    if (length <= 0) return 0;
    const int32_t blocks = length / block_tokens + (length % block_tokens != 0);
    return blocks < max_blocks ? blocks : max_blocks;
  }
  TKV_HD int32_t page(int32_t entry, int32_t column, int32_t kv_head) const {
    if (column >= batch.table_columns) return kNoPage;
    const int64_t block =
        batch.block_table[static_cast<int64_t>(sequence(entry)) * batch.table_stride + column];
    if (block < 0 || block >= batch.num_blocks) return kNoPage;
    return static_cast<int32_t>(block * block_pages + kv_head);
  }
};
// The fields of a validated batch; slots and tokens are null.
Result<BlockRows> block_rows(const EngineConfig& config, const EngineBatch& batch);
PageTableShape table_shape(const EngineConfig& config, const EngineBatch& batch);
PageView page_view(const EngineConfig& config, const EngineLayer& layer);

// Queries of ragged sequences to [count, queries, num_q_heads, head_dim] in the keys' coordinates,
// and results back. The last of a sequence's queries is the last of its entry; entries of sequences
// with fewer begin with zeros.
struct EngineQueries {
  Rotation rotation;                      // of keys, and so of queries
  Rotation out_rotation;                  // of values
  const float* key_reflection = nullptr;  // [num_kv_heads, head_dim] or null
  const float* key_mean = nullptr;        // that keys lack: lse is of keys with it; or null
  BlockRows rows;                         // slots and tokens are not used
  int32_t num_q_heads = 0;
  int32_t head_dim = 0;
  int64_t num_tokens = 0;
  float sm_scale = 0;                    // with key_mean
  DType dtype = DType::kFloat16;         // of q and out
  DType packed_dtype = DType::kFloat16;  // of packed_q and packed_out
  const void* q = nullptr;
  void* out = nullptr;
  float* lse = nullptr;
  // What `out` holds of the same queries, by packed vectors.
  PriorAttention prior;
  // The kernel in front of packing lets it start only when all work before that kernel has ended,
  // and writes neither q nor what attention reads before it waits. Packing then begins without a
  // wait, and waits before its end.
  bool is_settled = false;
  EngineStrides q_strides, out_strides, lse_strides;
  void* packed_q = nullptr;
  const void* packed_out = nullptr;
  const float* packed_lse = nullptr;
  SharedRowsParams shared;  // rows that packed_out does not have yet; items is null: there are none
  const int32_t* row_status = nullptr;  // [count * num_kv_heads] StatusCode, or null
  int32_t* errors = nullptr;

  TKV_HD int32_t queries() const { return rows.batch.queries; }
  TKV_HD int64_t vectors() const {
    return static_cast<int64_t>(rows.batch.count) * queries() * num_q_heads;
  }
  TKV_HD int32_t kv_head_of(int32_t q_head) const {
    return q_head / (num_q_heads / rows.num_kv_heads);
  }
  TKV_HD const float* reflection_of(int32_t q_head) const {
    return key_reflection == nullptr
               ? nullptr
               : key_reflection + static_cast<int64_t>(kv_head_of(q_head)) * head_dim;
  }
  // The token of query j of an entry; -1 where it has none.
  TKV_HD int64_t token_of(int32_t entry, int32_t j) const {
    const int32_t s = rows.sequence(entry);
    if (s < 0) return -1;
    const int32_t* starts = rows.batch.query_start_loc;
    const int64_t begin = starts == nullptr ? static_cast<int64_t>(s) * queries() : starts[s];
    const int64_t end = starts == nullptr ? begin + queries() : starts[s + 1];
    const int64_t token = end - queries() + j;
    return token >= begin && token >= 0 && token < num_tokens ? token : -1;
  }
};
// Fields of a validated call; what is packed is null.
Result<EngineQueries> engine_queries(const EngineConfig& config, const EngineAttend& call);
// Device memory, one launch each: q to packed_q; packed_out and packed_lse, and the parts of shared
// rows, to out and lse. The
// kernel behind the first begins when all work before that one has ended (or, where is_settled, the
// work that it names), and waits for its end before it reads queries.
Status pack_queries(const EngineQueries& q, GpuStream stream);
Status unpack_outputs(const EngineQueries& q, GpuStream stream);

}  // namespace tierkv
