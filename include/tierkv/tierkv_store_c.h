/* tierkv's store and attention for C: the compressed cache of many sequences, and attention over
 * caller-owned pages. The rules of tierkv_c.h hold; names and meanings are those of store.h and
 * attention.h, which are the manuals of the calls.
 *
 *   tkv_store* store;
 *   tkv_sequence_id id;
 *   tkv_store_create(&config, &store, &error);              on the host, or
 *   tkv_store_create_device(&config, stream, &store, &error);
 *   tkv_store_add_sequence(store, &id, &error);
 *   tkv_store_begin_prompt(store, &id, 1, n, &error);
 *   for each layer: tkv_store_append(), tkv_store_score_prompt()
 *   tkv_store_end_prompt(store, &id, 1, &error);
 *   for each token:
 *     tkv_store_begin_step(store, &id, 1, 1, &error);
 *     for each layer: tkv_store_append(), tkv_store_attend(), tkv_store_update_scores()
 *
 * A build without CUDA refuses the device calls with TKV_UNSUPPORTED. A stream is a cudaStream_t as
 * a pointer; the device is the one that is current. Device pointers are those of cudaMalloc or of
 * whatever allocates with it (a framework's tensors).
 */
#ifndef TIERKV_TIERKV_STORE_C_H_
#define TIERKV_TIERKV_STORE_C_H_

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

/* ---- The store ---- */

/* Calls on one store must not overlap. */
typedef struct tkv_store tkv_store;

/* Names a sequence of one store; 0 names none. A released id stays stale for good. */
typedef uint64_t tkv_sequence_id;

typedef int32_t tkv_basis_kind;
enum { TKV_BASIS_NONE = 0, TKV_BASIS_MEAN = 1, TKV_BASIS_HADAMARD = 2, TKV_BASIS_MATRIX = 3 };

/* The coordinates in which one component is stored: y_j = sum_i (x_i - mean_i) forward[i][j].
 * append and attend change bases by themselves. */
typedef struct tkv_basis {
  size_t struct_size;
  tkv_basis_kind kind;  /* forward of MEAN is the identity, of HADAMARD the library's rotation */
  const float* means;   /* [num_layers, num_kv_heads, head_dim], rounded to fp16; null: none */
  const float* forward; /* of MATRIX: [num_layers, num_kv_heads, head_dim, head_dim] */
  const float* inverse; /* likewise */
} tkv_basis;

typedef int32_t tkv_mean_source;
enum { TKV_MEANS_OF_PROMPT = 0, TKV_MEANS_NONE = 1, TKV_MEANS_GIVEN = 2 };
typedef int32_t tkv_step_source;
enum { TKV_STEPS_GIVEN = 0, TKV_STEPS_OF_PROMPT = 1 };
typedef int32_t tkv_codebook_source;
enum { TKV_CODEBOOKS_OF_HOST = 0, TKV_CODEBOOKS_OF_DEVICE = 1, TKV_CODEBOOKS_GIVEN = 2 };

/* Entropy-coded pages instead of tiers, as coded.h explains. Formats, policy but for window_tokens
 * (with fixed_format: but for alpha_low), score_interval and page_bytes then stay at their
 * defaults. */
typedef struct tkv_coded_config {
  size_t struct_size;
  const float* key_steps;   /* of STEPS_GIVEN: [num_layers, num_kv_heads], positive; else null */
  const float* value_steps; /* likewise */
  tkv_mean_source means;
  tkv_codebook_source codebooks;
  const float* key_means;           /* of MEANS_GIVEN: [num_layers, num_kv_heads, head_dim] */
  const float* value_means;         /* likewise */
  const tkv_codebook* const* given; /* of CODEBOOKS_GIVEN: [num_given], of both components */
  int32_t num_given;
  int32_t max_length;       /* bits of the longest code word; 0: 10 */
  int32_t streams_per_lane; /* 1 or 2; 0: 2 */
  tkv_step_source steps;
  float key_relative; /* of STEPS_OF_PROMPT: step / range of the row's prompt, 2^-14 to 1; else 0 */
  float value_relative; /* likewise */
  /* Of important blocks, 8 or 4 bits: those with sinks or with tokens whose significance is that of
   * the high tier. null: none are kept at a fixed rate. */
  const tkv_tier_format* fixed_format;
} tkv_coded_config;

/* Blocks of channel-wise keys instead of tiers, as channel.h explains. What stays at its defaults
 * with coded does so here. */
typedef struct tkv_channel_config {
  size_t struct_size;
  int32_t k_bits;       /* 4 or 2; 0: 4 */
  int32_t v_bits;       /* likewise */
  int32_t block_tokens; /* 64 or 128; 0: 64 */
} tkv_channel_config;

/* Every field counts as it is given; for the defaults give no policy at all. */
typedef struct tkv_tier_policy {
  size_t struct_size;
  double alpha_high;     /* significance >= alpha_high / i: high */
  double alpha_low;      /* significance >= alpha_low / i: low; below: pruned */
  int32_t window_tokens; /* the newest, never downgraded; at least 8 */
  int32_t sink_tokens;   /* the first, never downgraded */
} tkv_tier_policy;

typedef struct tkv_store_config {
  size_t struct_size;
  int32_t num_layers;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  tkv_dtype dtype;     /* of keys and values as they are appended */
  int32_t before_rope; /* 1: keys come before the rotary embedding; exported sequences say so */
  double rope_theta;
  double sm_scale;                      /* 0: 1 / sqrt(head_dim) */
  const tkv_tier_format* window_format; /* null: 8-bit keys, 4-bit values */
  const tkv_tier_format* high_format;   /* null: likewise */
  const tkv_tier_format* low_format;    /* null: 4-bit keys, 2-bit values */
  const tkv_tier_policy* policy;        /* null: alphas 1 and 0, a window of 64, no sinks */
  int32_t score_interval;               /* every n-th query is counted; 0: 1 */
  int32_t num_pages;
  int64_t page_bytes; /* 0: chosen for the three formats */
  int32_t max_sequences;
  int32_t max_tokens;                /* of a sequence */
  const tkv_basis* key_basis;        /* null: none */
  const tkv_basis* value_basis;      /* null: none */
  const tkv_coded_config* coded;     /* null: tiers */
  const tkv_channel_config* channel; /* null: likewise; not with coded */
} tkv_store_config;

/* Everything in host memory. TKV_OUT_OF_MEMORY where there is no memory for the pool. */
TKV_API tkv_status tkv_store_create(const tkv_store_config* config, tkv_store** store,
                                    tkv_error* error);
/* Everything in device memory, all work on `stream`, which must outlive the store. */
TKV_API tkv_status tkv_store_create_device(const tkv_store_config* config, void* stream,
                                           tkv_store** store, tkv_error* error);
/* Waits for the stream of a device store. */
TKV_API void tkv_store_destroy(tkv_store* store);

typedef struct tkv_store_info {
  size_t struct_size;
  int64_t page_bytes;
  int32_t on_device;
} tkv_store_info;
TKV_API tkv_status tkv_store_get_info(const tkv_store* store, tkv_store_info* info,
                                      tkv_error* error);

TKV_API tkv_status tkv_store_add_sequence(tkv_store* store, tkv_sequence_id* sequence,
                                          tkv_error* error);
/* Lists of sequences lie in host memory for both back ends, 1 to max_sequences, none twice. */
TKV_API tkv_status tkv_store_begin_prompt(tkv_store* store, const tkv_sequence_id* sequences,
                                          int32_t num_sequences, int32_t tokens, tkv_error* error);
TKV_API tkv_status tkv_store_end_prompt(tkv_store* store, const tkv_sequence_id* sequences,
                                        int32_t num_sequences, tkv_error* error);
TKV_API tkv_status tkv_store_begin_step(tkv_store* store, const tkv_sequence_id* sequences,
                                        int32_t num_sequences, int32_t tokens, tkv_error* error);

/* Arrays of the structs below: host memory of a host store, device memory of a device store. */
typedef struct tkv_append_call {
  size_t struct_size;
  const tkv_sequence_id* sequences; /* [num_sequences] */
  int32_t num_sequences;
  int32_t layer;
  int32_t tokens; /* as begin_prompt or begin_step said */
  const void* k;  /* config.dtype [num_sequences, tokens, num_kv_heads, head_dim] */
  const void* v;  /* likewise */
} tkv_append_call;
TKV_API tkv_status tkv_store_append(tkv_store* store, const tkv_append_call* call,
                                    tkv_error* error);

typedef struct tkv_prompt_scores {
  size_t struct_size;
  const tkv_sequence_id* sequences;
  int32_t num_sequences;
  int32_t layer;
  const float* significance; /* [num_sequences, num_kv_heads, stride], by position */
  int64_t stride;            /* at least the tokens of the longest sequence */
} tkv_prompt_scores;
TKV_API tkv_status tkv_store_score_prompt(tkv_store* store, const tkv_prompt_scores* scores,
                                          tkv_error* error);

/* Attention of the newest tokens' queries over all that the layer holds, each over the tokens up
 * to its own. */
typedef struct tkv_attend_request {
  size_t struct_size;
  const tkv_sequence_id* sequences;
  int32_t num_sequences;
  int32_t layer;
  const void* q; /* dtype [num_sequences, q_len, num_q_heads, head_dim] */
  void* out;     /* like q */
  float* lse;    /* [num_sequences, q_len, num_q_heads], natural logarithm; may be null */
  /* [q_len, num_sequences, num_kv_heads, stride]: of query j what tkv_score_update takes with back
   * = q_len - 1 - j; may be null */
  float* probabilities;
  int64_t stride;  /* of probabilities */
  tkv_dtype dtype; /* of q and out: fp16 or bfloat16; which a store takes says store.h */
  /* 1: also counts the queries, as tkv_store_update_scores of their probabilities would, oldest
   * first, instead of those calls. Host and device find probabilities that differ by up to 2e-3 of
   * themselves. */
  int32_t count_query;
  void* scratch; /* for count_query: device memory of a device store, aligned to 8 bytes */
  size_t scratch_bytes;
  int32_t q_len;      /* queries of each sequence, oldest first, up to 8: store.h; 0: 1 */
  const float* sinks; /* [num_q_heads], learned sinks of the layer: store.h; null: none */
} tkv_attend_request;
/* Of scratch, for up to `num_sequences` sequences of up to `tokens` tokens with q_len queries each;
 * 0 for a host store. */
TKV_API tkv_status tkv_store_count_scratch_bytes(const tkv_store* store, int32_t num_sequences,
                                                 int32_t tokens, int32_t q_len, size_t* bytes,
                                                 tkv_error* error);
TKV_API tkv_status tkv_store_attend(tkv_store* store, const tkv_attend_request* request,
                                    tkv_error* error);

/* For each token the largest probability that a query head of the group gave it. */
typedef struct tkv_score_update {
  size_t struct_size;
  const tkv_sequence_id* sequences;
  int32_t num_sequences;
  int32_t layer;
  int32_t back;               /* the query is that of the newest token but `back` */
  const float* probabilities; /* [num_sequences, num_kv_heads, stride], by position */
  int64_t stride;             /* at least the tokens of the longest sequence */
} tkv_score_update;
TKV_API tkv_status tkv_store_update_scores(tkv_store* store, const tkv_score_update* update,
                                           tkv_error* error);

TKV_API tkv_status tkv_store_fork(tkv_store* store, tkv_sequence_id source, tkv_sequence_id* copy,
                                  tkv_error* error);
TKV_API tkv_status tkv_store_truncate(tkv_store* store, tkv_sequence_id sequence, int32_t tokens,
                                      tkv_error* error);
TKV_API tkv_status tkv_store_release(tkv_store* store, tkv_sequence_id sequence, tkv_error* error);
TKV_API tkv_status tkv_store_num_tokens(tkv_store* store, tkv_sequence_id sequence, int32_t* tokens,
                                        tkv_error* error);

typedef struct tkv_store_stats {
  size_t struct_size;
  int64_t window_tokens; /* of all rows (sequence, layer, kv_head); sinks among them */
  int64_t high_tokens;
  int64_t low_tokens;
  int64_t pruned_tokens;
  int32_t sequences;
  int32_t pages;
  int32_t pages_free;
  int32_t pages_shared;
  int64_t page_bytes;
  int64_t raw_bytes;     /* the same tokens, pruned ones included, as 16-bit values */
  int64_t nominal_bytes; /* codes, metadata, scores and positions of the tokens kept */
} tkv_store_stats;
TKV_API tkv_status tkv_store_get_stats(tkv_store* store, tkv_store_stats* stats, tkv_error* error);

/* To and from host memory for both back ends. */
TKV_API tkv_status tkv_store_export_sequence(tkv_store* store, tkv_sequence_id sequence,
                                             tkv_buffer* out, tkv_error* error);
TKV_API tkv_status tkv_store_import_sequence(tkv_store* store, const uint8_t* bytes, size_t size,
                                             tkv_sequence_id* sequence, tkv_error* error);

/* The cold tier, as cold.h explains: a sequence as the bytes of a .tkv container, page by page, and
 * back. entropy_coded 0 or 1: whether the codes of tiered pages are; threads 0: all cores. */
TKV_API tkv_status tkv_store_save_sequence(tkv_store* store, tkv_sequence_id sequence,
                                           int32_t entropy_coded, int32_t threads, tkv_buffer* out,
                                           tkv_error* error);
TKV_API tkv_status tkv_store_load_sequence(tkv_store* store, const uint8_t* bytes, size_t size,
                                           int32_t threads, tkv_sequence_id* sequence,
                                           tkv_error* error);

/* Waits for what was enqueued and tells the first failure that the device found. */
TKV_API tkv_status tkv_store_take_status(tkv_store* store, tkv_error* error);
/* A captured step was replayed once more. TKV_UNSUPPORTED on a host store. */
TKV_API tkv_status tkv_store_note_replay(tkv_store* store, const tkv_sequence_id* sequences,
                                         int32_t num_sequences, int32_t tokens, tkv_error* error);

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
  int32_t sliding_window_tokens;   /* 0: none */
} tkv_attention_config;

/* Needs no device: TKV_INVALID_ARGUMENT or TKV_UNSUPPORTED with the field's name. */
TKV_API tkv_status tkv_attention_validate(const tkv_attention_config* config, tkv_error* error);
TKV_API tkv_status tkv_attention_create(const tkv_attention_config* config,
                                        tkv_attention** attention, tkv_error* error);
TKV_API void tkv_attention_destroy(tkv_attention* attention);
/* Of device memory aligned to 256 bytes, zero before its first use, for one stream. */
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
  void* pages;   /* [num_pages, page_bytes], aligned to 128 bytes */
  void* records; /* [num_pages, 16 bytes], the side table of page.h */
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

/* What of the pages of a tier nothing writes that may still run: attention.h. */
typedef int32_t tkv_settled;
enum {
  TKV_SETTLED_NOTHING = 0,
  TKV_SETTLED_ALL_BUT_LAST_PAGE = 1, /* of every row: tokens are appended behind them */
  TKV_SETTLED_ALL = 2
};

/* Of one layer. tkv_plan_attention reads table, sequences and workspace. */
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
  const void* q;         /* dtype [total_tokens, num_q_heads, head_dim] */
  const void* k;         /* dtype [total_tokens, num_kv_heads, head_dim] */
  const int32_t* starts; /* [num_sequences + 1] first token of each sequence, ascending */
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int32_t num_sequences;
  int32_t max_tokens; /* of a sequence, at least; the host calls do not look at it */
  int32_t total_tokens;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  tkv_dtype dtype;
  int32_t query_stride; /* counted are every so many queries, from the last; 1: all; 0: 16 */
  double sm_scale;      /* 0: 1 / sqrt(head_dim) */
  float* lse;           /* [num_q_heads, total_tokens]; of queries that are counted */
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

#endif /* TIERKV_TIERKV_STORE_C_H_ */
