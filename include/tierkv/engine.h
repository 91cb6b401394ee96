// SPDX-License-Identifier: Apache-2.0
// Caches of serving engines that have block tables of their own, vLLM's among them.
//
// The engine owns memory, block tables and slot mappings; this header compresses into its blocks
// and attends over them. A block is block_tokens tokens of one layer, 64 by default: a page for
// every kv_head, one behind the other, each without scores, positions and records. Page bytes a
// token at 128 channels: 200 (K8V4), 136 (K4V4), 104 (K4V2). All pages of a layer have one format;
// layers may differ.
//
//   config       heads, channels, format, the largest batch
//   encode       new keys and values into the slots that the engine gives, one launch a layer
//   plan         once a step: block tables and lengths to rows, work cut evenly
//   attend       for every layer: 1 to 8 queries of each sequence
//   decode       token ranges back to keys and values, for prefill over a cached prefix
//
// Keys and values are stored in the fixed Hadamard basis (tierkv/basis.h). Rotated keys may also be
// reflected, so that the mean of a head's keys falls onto the vector of ones: the zero point of a
// token then takes up what the token has of the mean, and the codes need to span only the rest.
// attend() turns queries as keys, so that  q . k  stays what it is, and the lse that it returns is
// that of uncompressed keys: results merge with theirs (merge_attention()).
//
// All pointers of a device call are device memory. Calls allocate, synchronise and read nothing on
// the host, so every call can be captured in a CUDA graph. A replay reads the tables, lengths and
// slots that stand in the same arrays then. Functions that end in _host are the reference, in host
// memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tierkv/attention.h"
#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

struct TKV_API EngineConfig {
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;               // 64, 96, 128 or 256
  TierFormat format;                  // raw, or token-wise of 8, 4 or 2 bits; no groups, no basis
  bool rotate = true;                 // false: channels are stored as they are
  DType dtype = DType::kFloat16;      // kFloat16 or kBFloat16: keys, values, queries, outputs
  double sm_scale = 0;                // factor of q . k before the softmax
  int32_t block_tokens = 64;          // a multiple of 16, at most 1024; a page at most 1 MiB
  int32_t max_sequences = 0;          // of a batch
  int32_t max_queries = 1;            // of a sequence in a batch, at most kMaxQueryTokens
  int32_t max_blocks = 0;             // of a sequence, at most 65536
  int32_t sliding_window_tokens = 0;  // must be 0: refused by name

  // kInvalidArgument, kUnsupported with the field's name.
  Status validate() const;
  // The size of one kv_head's page, a multiple of 128, by head_dim, format and block_tokens; 0
  // where these are not valid.
  int64_t page_bytes() const;
  int64_t block_bytes() const { return num_kv_heads * page_bytes(); }
};

// The blocks of one layer.
struct EngineLayer {
  void* blocks = nullptr;    // block 0, aligned to 128 bytes
  int64_t block_stride = 0;  // bytes, a multiple of page_bytes(); 0: block_bytes()
  int64_t num_blocks = 0;
  // [num_kv_heads, head_dim] of engine_key_reflections(); a row of zeros reflects nothing; null:
  // none. One for the life of the blocks.
  const float* key_reflection = nullptr;
};

// Unit vectors w, [num_kv_heads, head_dim] like the means of keys, host memory: rotated keys y are
// stored as y - 2 w (w . y). A mean of zeros gives zeros. kNonFinite; kInvalidArgument where an
// array is null; errors of the config.
TKV_API Status engine_key_reflections(const EngineConfig& config, const float* key_mean,
                                      float* out);

// Elements from a token, and from a head, to the next; channels are neighbours. Both 0: the array
// is dense.
struct EngineStrides {
  int64_t token = 0;
  int64_t head = 0;
};

// What an error array of int32_t [4] counts, in its order; calls add to it.
enum class EngineError : int32_t {
  kStraySlots,  // tokens whose slot lies outside the blocks; nothing is written
  // (token, kv_head) pairs with NaN or infinity, in the input or after rotation; their slots are
  // cleared.
  kNonFiniteTokens,
  // Pairs of which the format cannot hold the key or the value, the other one finite or not;
  // likewise.
  kOutOfRangeTokens,
  // What lies outside the block table or the blocks is left out: (sequence, kv_head) pairs of
  // attention, (token, kv_head) pairs of decoding.
  kStrayBlocks,
};
inline constexpr int32_t kEngineErrors = 4;

// New tokens. A token's slot is block * block_tokens + place; -1 is skipped. The call clears the
// tiles of 16 tokens whose first slot it names, then writes every token over what its slot held
// (refused drafts). The bytes do not depend on the order of the tokens. No slot may be named twice.
struct EngineTokens {
  const void* k = nullptr;  // dtype [count, num_kv_heads, head_dim] by the strides
  const void* v = nullptr;
  EngineStrides k_strides, v_strides;
  const int64_t* slots = nullptr;  // [count]
  int64_t count = 0;
  int32_t* errors = nullptr;  // [kEngineErrors] or null
};
TKV_API Status engine_encode_host(const EngineConfig& config, const EngineLayer& layer,
                                  const EngineTokens& tokens);
TKV_API Status engine_encode(const EngineConfig& config, const EngineLayer& layer,
                             const EngineTokens& tokens, GpuStream stream);

// The sequences of a step. Sequence s has seq_lens[s] tokens, all of them encoded, in the blocks of
// line s of the table; its queries are tokens query_start_loc[s] .. query_start_loc[s + 1] - 1 of q
// and belong to its newest tokens. 0 tokens, 0 queries and entries of -1 are padding.
struct EngineBatch {
  const int32_t* block_table = nullptr;  // [num_sequences, table_columns]
  int64_t table_stride = 0;              // 0: table_columns
  int32_t table_columns = 0;
  int32_t num_sequences = 0;                 // of the table
  const int32_t* seq_lens = nullptr;         // [num_sequences]
  const int32_t* sequences = nullptr;        // [count]; null: 0, 1, 2, ...
  int32_t count = 0;                         // at most max_sequences
  const int32_t* query_start_loc = nullptr;  // [num_sequences + 1]; null: `queries` each
  int32_t queries = 1;                       // most of a sequence; beyond it only the newest count
  // As the layers': one plan serves all layers with the same.
  int64_t block_stride = 0;
  int64_t num_blocks = 0;
};

// How the current device runs a config, for each number of queries.
struct EngineGrid {
  AttentionGrid of[kMaxQueryTokens];
};
// kUnsupported, kCuda. Not to be called while a stream is captured.
TKV_API Result<EngineGrid> engine_grid(const EngineConfig& config);

// Device memory of one stream and one plan at a time, aligned to 256 bytes, set to zero before its
// first use.
TKV_API size_t engine_workspace_bytes(const EngineConfig& config, const EngineGrid& grid);

// Must precede attend(), and follow every change of the tables or lengths.
TKV_API Status engine_plan(const EngineConfig& config, const EngineGrid& grid,
                           const EngineBatch& batch, const AttentionWorkspace& workspace,
                           GpuStream stream);

struct EngineAttend {
  EngineBatch batch;  // as it was planned
  EngineLayer layer;
  const void* q = nullptr;  // dtype [num_tokens, num_q_heads, head_dim] by the strides
  void* out = nullptr;      // likewise; rows without a query are not written
  EngineStrides q_strides, out_strides;
  float* lse = nullptr;  // natural logarithm, of all tokens seen; -infinity without tokens; may
  EngineStrides lse_strides;  // be null
  int64_t num_tokens = 0;     // of q and out
  int32_t* errors = nullptr;  // [kEngineErrors] or null
};
TKV_API Status engine_attend(const EngineConfig& config, const EngineGrid& grid,
                             const EngineAttend& call, const AttentionWorkspace& workspace,
                             GpuStream stream);
// Plans and attends, in double. kCorrupt, and nothing is written, where a device would count
// kStrayBlocks.
TKV_API Status engine_attend_host(const EngineConfig& config, const EngineAttend& call);

// Ranges of cached tokens: range i is the tokens first[i] .. of sequence sequences[i] of the table,
// to the rows starts[i] .. starts[i + 1] - 1 of k and v. Tokens of blocks outside the layer are 0.
// kInvalidArgument where count * max_tokens * num_kv_heads is 2^31 or more, on a device also for
// more than 65535 ranges.
struct EngineRanges {
  const int32_t* block_table = nullptr;  // [num_sequences, table_stride]
  int64_t table_stride = 0;
  int32_t num_sequences = 0;
  const int32_t* sequences = nullptr;  // [count]; null: 0, 1, 2, ...
  const int32_t* first = nullptr;      // [count]; null: 0
  const int32_t* starts = nullptr;     // [count + 1]
  int32_t count = 0;
  int32_t max_tokens = 0;     // of a range; the rest of a longer one is left out
  int64_t num_rows = 0;       // of k and v
  void* k = nullptr;          // dtype [num_rows, num_kv_heads, head_dim], 16-byte aligned; or null
  void* v = nullptr;          // likewise
  int32_t* errors = nullptr;  // [kEngineErrors] or null
};
TKV_API Status engine_decode_host(const EngineConfig& config, const EngineLayer& layer,
                                  const EngineRanges& ranges);
TKV_API Status engine_decode(const EngineConfig& config, const EngineLayer& layer,
                             const EngineRanges& ranges, GpuStream stream);

}  // namespace tierkv
