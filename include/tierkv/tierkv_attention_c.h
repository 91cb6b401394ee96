// SPDX-License-Identifier: Apache-2.0
/* tierkv's attention for C: over pages that the caller owns, and the significance of prompts. The
 * rules of tierkv_c.h hold; names and meanings are those of attention.h and significance.h, which
 * are the manuals of the calls.
 *
 * A build without CUDA refuses the device calls with TKV_UNSUPPORTED. A stream is a cudaStream_t as
 * a pointer; the device is the one that is current. Device pointers are those of cudaMalloc or of
 * whatever allocates with it (a framework's tensors).
 */
#ifndef TIERKV_TIERKV_ATTENTION_C_H_
#define TIERKV_TIERKV_ATTENTION_C_H_

#include "tierkv/tierkv_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The format of the tokens of a tier. */
typedef struct tkv_tier_format {
  size_t struct_size;
  int32_t k_bits; /* 16 (raw), 8, 4 or 2 */
  int32_t v_bits;
  int32_t k_group; /* channels that share scale and zero point; 0: all */
  int32_t v_group;
} tkv_tier_format;

/* ---- Attention over pages that the caller owns, in device memory ---- */

/* A checked configuration and how the device that was current runs it. */
typedef struct tkv_attention tkv_attention;

/* The format of the pages on one side of the page tables. */
typedef struct tkv_attention_tier {
  size_t struct_size;
  int32_t side; /* 0 to 3 */
  const tkv_tier_format* format;
} tkv_attention_tier;

typedef struct tkv_attention_config {
  size_t struct_size;
  int32_t num_layers; /* 0: 1 */
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t q_len;   /* queries of a sequence, those of its newest tokens, up to 8; 0: 1 */
  tkv_dtype dtype; /* of q, out and raw pages */
  double sm_scale; /* 0: 1 / sqrt(head_dim) */
  int64_t page_bytes;
  const tkv_attention_tier* tiers; /* [num_tiers], which share struct_size */
  int32_t num_tiers;               /* 1 to 3 */
  int32_t sliding_window_tokens;   /* must be 0: refused by name */
} tkv_attention_config;

/* Needs no device: TKV_INVALID_ARGUMENT or TKV_UNSUPPORTED with the field's name. */
TKV_API tkv_status tkv_attention_validate(const tkv_attention_config* config, tkv_error* error);
TKV_API tkv_status tkv_attention_create(const tkv_attention_config* config,
                                        tkv_attention** attention, tkv_error* error);
TKV_API void tkv_attention_destroy(tkv_attention* attention);
/* Bytes of device memory, aligned to 256 bytes, zero before its first use, for one stream. */
TKV_API tkv_status tkv_attention_workspace_bytes(const tkv_attention* attention,
                                                 int32_t num_sequences, size_t* bytes,
                                                 tkv_error* error);

/* Which pages a row holds: page_table.h. slots and tokens are device memory, the struct is not. */
typedef struct tkv_page_table {
  size_t struct_size;
  int32_t num_sequences;
  int32_t rows_per_sequence;  /* num_layers * num_kv_heads */
  int32_t num_sides;          /* 1 to 4 */
  int32_t table_slots[2];     /* of a row */
  int32_t tokens_per_page[4]; /* by side */
  const int32_t* slots;       /* [rows, table_slots[0] + table_slots[1] rounded up to 4] */
  const int32_t* tokens;      /* [rows, 4], by side; aligned to 16 bytes */
} tkv_page_table;

/* The pages themselves, device memory. */
typedef struct tkv_page_pool {
  size_t struct_size;
  void* pages; /* [num_pages, page_bytes], aligned to 128 bytes */
  int64_t page_bytes;
  int32_t num_pages;
} tkv_page_pool;

/* Where the newest q_len tokens of each sequence lie: in one tier, in the same places for every
 * kv_head. */
typedef struct tkv_attention_tail {
  size_t struct_size;
  int32_t tier;          /* an index of config.tiers */
  const int32_t* newest; /* device [num_sequences], where in the tier; null: the last one */
  /* Once the tier holds ring_first + ring_tokens tokens, those from index ring_first on are a ring,
   * and those before it older than all others. 0: no ring. */
  int32_t ring_first;
  int32_t ring_tokens;
} tkv_attention_tail;

/* Which pages of a tier nothing writes that may still run: attention.h. */
typedef int32_t tkv_settled;
enum {
  TKV_SETTLED_NOTHING = 0,
  TKV_SETTLED_ALL_BUT_LAST_PAGE = 1, /* of every row: tokens are appended behind them */
  TKV_SETTLED_ALL = 2
};

/* A call for one layer. tkv_plan_attention reads table, sequences and workspace. */
typedef struct tkv_attend_call {
  size_t struct_size;
  const tkv_page_table* table;
  const tkv_page_pool* pool;
  const int32_t* sequences; /* device [num_sequences], -1 is padding; null: 0, 1, 2, ... */
  int32_t num_sequences;
  int32_t layer;
  const void* q; /* device [num_sequences, q_len, num_q_heads, head_dim], aligned to 16 bytes */
  void* out;     /* device, like q */
  float* lse;    /* device [num_sequences, q_len, num_q_heads], natural logarithm; may be null */
  /* 1: nothing that may still run writes plan and tables: attention.h. */
  int32_t plan_is_settled;
  void* workspace;
  size_t workspace_bytes;
  const tkv_attention_tail* tail; /* null: the last tokens of the last tier; unused for q_len 1 */
  const float* sinks;             /* device [num_q_heads], learned sinks: attention.h; null: none */
  tkv_settled settled[3];         /* of config.tiers; looked at where the plan is settled */
} tkv_attend_call;

/* Cuts the work of all layers; follows every change of the table or the sequences, and precedes
 * tkv_attend. Both can be captured in a CUDA graph. */
TKV_API tkv_status tkv_plan_attention(const tkv_attention* attention, const tkv_attend_call* call,
                                      void* stream, tkv_error* error);
TKV_API tkv_status tkv_attend(const tkv_attention* attention, const tkv_attend_call* call,
                              void* stream, tkv_error* error);
/* Where the tkv_status of each row of call->layer lies in the workspace: device memory
 * [num_sequences, num_kv_heads], valid once the last tkv_attend of the layer is done. */
TKV_API tkv_status tkv_attention_row_status(const tkv_attention* attention,
                                            const tkv_attend_call* call, const int32_t** status,
                                            tkv_error* error);

/* Joins two partial results over disjoint tokens. An lse of -infinity: that part has no tokens.
 * Outputs may be the inputs. */
typedef struct tkv_merge_call {
  size_t struct_size;
  const void* a_out;  /* dtype [rows, head_dim] */
  const float* a_lse; /* [rows] */
  const void* b_out;
  const float* b_lse;
  void* out;
  float* lse;
  int64_t rows;
  int32_t head_dim;
  tkv_dtype dtype;
} tkv_merge_call;
/* Device memory. */
TKV_API tkv_status tkv_merge_attention(const tkv_merge_call* call, void* stream, tkv_error* error);
TKV_API tkv_status tkv_merge_attention_host(const tkv_merge_call* call, tkv_error* error);

/* Adds learned sinks to finished results, in place: attention.h. */
typedef struct tkv_sink_call {
  size_t struct_size;
  void* out;          /* dtype [rows, num_q_heads, head_dim] */
  float* lse;         /* [rows, num_q_heads] */
  const float* sinks; /* [num_q_heads]; -infinity: none */
  int64_t rows;
  int32_t num_q_heads;
  int32_t head_dim;
  tkv_dtype dtype;
} tkv_sink_call;
/* Device memory. */
TKV_API tkv_status tkv_apply_sinks(const tkv_sink_call* call, void* stream, tkv_error* error);
TKV_API tkv_status tkv_apply_sinks_host(const tkv_sink_call* call, tkv_error* error);

/* ---- Significance of prompts ---- */

/* How much later queries look at the tokens of prompts, by layer: significance.h. Sequences lie one
 * after the other. Strides count elements; 0: dense, [total_tokens, heads, head_dim]. */
typedef struct tkv_significance_call {
  size_t struct_size;
  const void* q; /* dtype [total_tokens, num_q_heads, head_dim] */
  const void* k; /* dtype [total_tokens, num_kv_heads, head_dim] */
  /* [num_sequences + 1] first token of each sequence, ascending; null: num_sequences is 1 */
  const int32_t* starts;
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int32_t num_sequences;
  /* At least the longest sequence, at most total_tokens; the host calls do not look at it. */
  int32_t max_tokens;
  int32_t total_tokens;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  tkv_dtype dtype;
  int32_t query_stride; /* every n-th query counts, from the last; 1: all; 0: 16 */
  double sm_scale;      /* 0: 1 / sqrt(head_dim) */
  float* lse;           /* [num_q_heads, total_tokens]; of counted queries, others kept or NaN */
  float* significance;  /* [num_kv_heads, total_tokens] */
} tkv_significance_call;
/* Reads lse, writes significance. All arrays in device memory, q and k aligned to 16 bytes. */
TKV_API tkv_status tkv_prompt_significance(const tkv_significance_call* call, void* stream,
                                           tkv_error* error);
/* Writes lse, in device memory. */
TKV_API tkv_status tkv_prompt_lse(const tkv_significance_call* call, void* stream,
                                  tkv_error* error);
/* The references, in host memory: slow and in double. Significance needs no lse. */
TKV_API tkv_status tkv_prompt_significance_host(const tkv_significance_call* call,
                                                tkv_error* error);
TKV_API tkv_status tkv_prompt_lse_host(const tkv_significance_call* call, tkv_error* error);

#ifdef __cplusplus
}
#endif

#endif /* TIERKV_TIERKV_ATTENTION_C_H_ */
