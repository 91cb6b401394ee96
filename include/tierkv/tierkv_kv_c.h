// SPDX-License-Identifier: Apache-2.0
/* The KV store for C. The rules of tierkv_c.h hold; names and meanings are those of
 * kv_store.h, which is the manual of the calls.
 *
 *   tkv_kv_store* store;
 *   tkv_sequence_id id;
 *   tkv_kv_create(&config, &store, &error);
 *   tkv_kv_add_sequence(store, &id, &error);
 *   tkv_kv_begin(store, &id, 1, n, &error);          a prompt, a turn or a step: any n >= 1
 *   for each layer: tkv_kv_append(), tkv_kv_attend()
 *
 * Calls on one store must not overlap.
 */
#ifndef TIERKV_TIERKV_KV_C_H_
#define TIERKV_TIERKV_KV_C_H_

#include "tierkv/tierkv_attention_c.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tkv_kv_store tkv_kv_store;

/* Names a sequence of one store; 0 names none. A released id stays stale for good. */
typedef uint64_t tkv_sequence_id;

/* How a model rotates keys and queries by position. */
typedef struct tkv_rope {
  size_t struct_size;
  int32_t pairing;       /* 0 none, 1 halves, 2 neighbours */
  int32_t dims;          /* rotated dims, even */
  int32_t layers;        /* 1: the same in all layers, or num_layers */
  const float* inv_freq; /* [layers, dims / 2] radians a position */
} tkv_rope;

/* Entropy-coded weighted steps. Zeros are the defaults. */
typedef struct tkv_coded_format {
  size_t struct_size;
  double k;                 /* 0: 0.55, without a profile of sensitivities 0.33; kv_store.h */
  double v;                 /* 0: 0.5, without a profile of sensitivities 0.28 */
  int32_t max_length;       /* bits of the longest code word, 8 to 14, if a GPU has room; 0: 10 */
  int32_t streams_per_lane; /* 1 or 2; 0: 2 */
  int32_t key_books;        /* codebooks of a layer's keys, 1 to 4, on a device 1; 0: 1 */
} tkv_coded_format;

/* A class of heads. */
typedef struct tkv_tier_class {
  size_t struct_size;
  const tkv_tier_format* high; /* null: 8-bit keys, 4-bit values */
  const tkv_tier_format* low;  /* null: 4-bit keys, 2-bit values */
  double alpha_high;           /* i * significance >= alpha_high: high; 0: 1 */
  double alpha_low;            /* i * significance < alpha_low: pruned */
  double share; /* of the heads, most sensitive first; the last class takes the rest */
} tkv_tier_class;

/* Fixed widths by importance. */
typedef struct tkv_tiers_format {
  size_t struct_size;
  const tkv_tier_class* const* classes; /* [num_classes]; none: one class with its defaults */
  int32_t num_classes;                  /* 0 to 4; several need a profile */
  int32_t plain_keys;                   /* 1: keys are not rotated by a Hadamard matrix */
  int32_t plain_values;                 /* likewise */
} tkv_tiers_format;

/* Blocks of channel-wise keys. Zeros are the defaults. */
typedef struct tkv_channel_config {
  size_t struct_size;
  int32_t k_bits;       /* 4 or 2; 0: 4 */
  int32_t v_bits;       /* likewise */
  int32_t block_tokens; /* 64 or 128; 0: 64 */
} tkv_channel_config;

/* Exactly one of coded, tiers and channel may be given; none: coded with its defaults. */
typedef struct tkv_kv_config {
  size_t struct_size;
  int32_t num_layers;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  tkv_dtype dtype;      /* of keys and values as they are appended: TKV_FLOAT16 or TKV_BFLOAT16 */
  double sm_scale;      /* 0: 1 / sqrt(head_dim) */
  const tkv_rope* rope; /* null: the profile's, or none */
  const tkv_coded_format* coded;
  const tkv_tiers_format* tiers;
  const tkv_channel_config* channel;
  const tkv_profile_data* profile; /* null: none */
  const int32_t* raw_layers;       /* [num_raw_layers] that stay fp16, ascending */
  int32_t num_raw_layers;
  int32_t sink_tokens;   /* 0: 4; -1: none */
  int32_t window_tokens; /* 0: 64 */
  int32_t max_sequences; /* at once */
  int32_t max_tokens;    /* of a sequence */
  int64_t memory_bytes;  /* everything that the store allocates for its sequences */
  int64_t page_bytes;    /* 0: the format's choice */
} tkv_kv_config;

/* Everything is checked; the arrays of the config are copied. */
TKV_API tkv_status tkv_kv_create(const tkv_kv_config* config, tkv_kv_store** store,
                                 tkv_error* error);
/* In device memory: k, v, q, out, significance, lse, probabilities and sinks of calls lie there,
 * sequence ids and exported bytes in host memory. Calls run on `stream`, a cudaStream_t that
 * outlives the store. TKV_UNSUPPORTED where the library was built without CUDA. */
TKV_API tkv_status tkv_kv_create_device(const tkv_kv_config* config, void* stream,
                                        tkv_kv_store** store, tkv_error* error);
TKV_API void tkv_kv_destroy(tkv_kv_store* store);

/* Tokens of all sequences together, when all are open and equally long: with codes of typical size,
 * and whatever the values are. */
TKV_API tkv_status tkv_kv_tokens_that_fit(const tkv_kv_config* config, int64_t* typical,
                                          int64_t* least, tkv_error* error);

TKV_API tkv_status tkv_kv_add_sequence(tkv_kv_store* store, tkv_sequence_id* sequence,
                                       tkv_error* error);
TKV_API tkv_status tkv_kv_begin(tkv_kv_store* store, const tkv_sequence_id* sequences,
                                int32_t num_sequences, int32_t tokens, tkv_error* error);

typedef struct tkv_kv_append_call {
  size_t struct_size;
  const tkv_sequence_id* sequences; /* [num_sequences] */
  int32_t num_sequences;
  int32_t layer;
  int32_t tokens;
  const void* k; /* [num_sequences, tokens, num_kv_heads, head_dim] of the config's dtype */
  const void* v; /* likewise */
  const float* significance; /* [num_sequences, num_kv_heads, stride] or null */
  int64_t stride;            /* at least tokens */
  const void* q; /* instead of significances: [num_sequences, tokens, num_q_heads, head_dim] */
  int32_t query_stride; /* which of them count, as in tkv_significance_call; 0: 1, all */
} tkv_kv_append_call;
TKV_API tkv_status tkv_kv_append(tkv_kv_store* store, const tkv_kv_append_call* call,
                                 tkv_error* error);

typedef struct tkv_kv_attend_call {
  size_t struct_size;
  const tkv_sequence_id* sequences; /* [num_sequences] */
  int32_t num_sequences;
  int32_t layer;
  int32_t q_len;        /* queries of each sequence, oldest first; 0: 1 */
  tkv_dtype dtype;      /* of q and out: TKV_FLOAT16 or TKV_BFLOAT16 */
  const void* q;        /* [num_sequences, q_len, num_q_heads, head_dim] */
  void* out;            /* like q */
  float* lse;           /* [num_sequences, q_len, num_q_heads] or null */
  float* probabilities; /* [q_len, num_sequences, num_kv_heads, stride] or null */
  int64_t stride;
  const float* sinks;  /* learned sinks [num_q_heads] or null */
  int32_t count_query; /* 1: what these queries saw counts as importance */
} tkv_kv_attend_call;
TKV_API tkv_status tkv_kv_attend(tkv_kv_store* store, const tkv_kv_attend_call* call,
                                 tkv_error* error);

/* A captured step of `tokens` tokens will run once more, for these sequences: as many as were
   captured, these or others. */
TKV_API tkv_status tkv_kv_note_replay(tkv_kv_store* store, const tkv_sequence_id* sequences,
                                      int32_t num_sequences, int32_t tokens, tkv_error* error);
/* Waits for a device: the first failure that kernels have found since the last call. */
TKV_API tkv_status tkv_kv_take_status(tkv_kv_store* store, tkv_error* error);

typedef struct tkv_kv_range {
  size_t struct_size;
  tkv_sequence_id sequence;
  int32_t layer;
  int32_t first; /* positions [first, end) */
  int32_t end;
  tkv_dtype dtype; /* of k and v: TKV_FLOAT16 or TKV_BFLOAT16 */
  void* k;         /* [end - first, num_kv_heads, head_dim], after RoPE */
  void* v;         /* likewise */
} tkv_kv_range;
TKV_API tkv_status tkv_kv_decode_range(tkv_kv_store* store, const tkv_kv_range* range,
                                       tkv_error* error);

TKV_API tkv_status tkv_kv_fork(tkv_kv_store* store, tkv_sequence_id source, tkv_sequence_id* copy,
                               tkv_error* error);
TKV_API tkv_status tkv_kv_truncate(tkv_kv_store* store, tkv_sequence_id sequence, int32_t tokens,
                                   tkv_error* error);
TKV_API tkv_status tkv_kv_release(tkv_kv_store* store, tkv_sequence_id sequence, tkv_error* error);
TKV_API tkv_status tkv_kv_num_tokens(tkv_kv_store* store, tkv_sequence_id sequence, int32_t* tokens,
                                     tkv_error* error);
/* Pages that are free for sure once every call has run. Waits for nothing. */
TKV_API tkv_status tkv_kv_free_pages(tkv_kv_store* store, int64_t* pages, tkv_error* error);
/* Pages, shared ones included, and what a sequence takes beside them. Waits for a device. */
TKV_API tkv_status tkv_kv_bytes_held(tkv_kv_store* store, tkv_sequence_id sequence, int64_t* bytes,
                                     tkv_error* error);

/* Tokens count once for each row (sequence, layer, kv_head). */
typedef struct tkv_kv_usage {
  size_t struct_size;
  int64_t sequences;
  int64_t sink_tokens;
  int64_t body_tokens;
  int64_t ring_tokens;
  int64_t pages;
  int64_t pages_free;
  int64_t pages_shared;
  int64_t most_pages; /* in use at once, since the store was made */
  int64_t page_bytes;
  int64_t slot_bytes;    /* of a sequence beside its pages */
  int64_t raw_bytes;     /* the same tokens as 16-bit values */
  int64_t nominal_bytes; /* raw tokens; codes, exponents, means and directories of the body */
  int64_t missing_pages; /* what the last call with TKV_OUT_OF_PAGES lacked */
} tkv_kv_usage;
/* Waits for a device. */
TKV_API tkv_status tkv_kv_get_usage(tkv_kv_store* store, tkv_kv_usage* usage, tkv_error* error);

TKV_API tkv_status tkv_kv_export_sequence(tkv_kv_store* store, tkv_sequence_id sequence,
                                          tkv_buffer* out, tkv_error* error);
TKV_API tkv_status tkv_kv_import_sequence(tkv_kv_store* store, const uint8_t* bytes, size_t size,
                                          tkv_sequence_id* sequence, tkv_error* error);

#ifdef __cplusplus
}
#endif

#endif /* TIERKV_TIERKV_KV_C_H_ */
