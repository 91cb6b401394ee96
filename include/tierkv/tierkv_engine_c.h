// SPDX-License-Identifier: Apache-2.0
/* tierkv for serving engines in C: compressed KV blocks behind block tables of the engine's own.
 *
 * Use it where an engine (vLLM and others) owns memory, block tables and slot mappings. A block is
 * block_tokens tokens of one layer, 64 by default; it holds a page for every kv_head, one behind
 * the other. include/tierkv/engine.h says what the calls do; here they are in C.
 *
 *   tkv_engine_config config = {.struct_size = sizeof config, .num_q_heads = 32, .num_kv_heads = 8,
 *     .head_dim = 128, .k_bits = 4, .v_bits = 4, .max_sequences = 256, .max_blocks = 128};
 *   tkv_engine* engine;
 *   if (tkv_engine_create(&config, &engine, &error) != TKV_OK) puts(error.message);
 *
 * Once a layer: tkv_engine_encode. Once a step: tkv_engine_plan; then tkv_engine_attend for every
 * layer. All arrays are device memory; structs are host memory, a stream is a cudaStream_t; no call
 * allocates, synchronises or reads device memory on the host, so all but tkv_engine_create can be
 * captured in a CUDA graph. The functions that end in _host take host memory and need no GPU; they
 * are the reference. The rules of tierkv_c.h hold.
 */
#ifndef TIERKV_TIERKV_ENGINE_C_H_
#define TIERKV_TIERKV_ENGINE_C_H_

#include "tierkv/tierkv_c.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tkv_engine tkv_engine;

typedef struct tkv_engine_config {
  size_t struct_size;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim; /* 64, 96, 128 or 256 */
  int32_t k_bits;   /* 16 (raw), 8, 4 or 2; codes of 2 bits are clipped at the token's norm */
  int32_t v_bits;
  int32_t no_rotation;           /* 1: keys and values are not rotated */
  tkv_dtype dtype;               /* TKV_FLOAT16 or TKV_BFLOAT16: keys, values, queries, outputs */
  double sm_scale;               /* 0: 1 / sqrt(head_dim) */
  int32_t block_tokens;          /* a multiple of 16; 0: 64 */
  int32_t max_sequences;         /* of a batch */
  int32_t max_queries;           /* of a sequence in a batch, 1 to 8; 0: 1 */
  int32_t max_blocks;            /* of a sequence */
  int32_t sliding_window_tokens; /* must be 0: refused by name */
} tkv_engine_config;

/* Bytes of a page: one kv_head of a block. Reads head_dim, k_bits, v_bits and block_tokens. */
TKV_API tkv_status tkv_engine_page_bytes(const tkv_engine_config* config, int64_t* page_bytes,
                                         tkv_error* error);
/* TKV_UNSUPPORTED and TKV_INVALID_ARGUMENT name the field. */
TKV_API tkv_status tkv_engine_validate(const tkv_engine_config* config, tkv_error* error);
/* For the current device. */
TKV_API tkv_status tkv_engine_create(const tkv_engine_config* config, tkv_engine** engine,
                                     tkv_error* error);
/* For the _host functions, and for tkv_engine_encode and tkv_engine_decode, which need no plan. */
TKV_API tkv_status tkv_engine_create_host(const tkv_engine_config* config, tkv_engine** engine,
                                          tkv_error* error);
TKV_API void tkv_engine_destroy(tkv_engine* engine);

/* Device memory of one stream, 256-byte aligned, zero before its first use. It holds one plan. */
TKV_API tkv_status tkv_engine_workspace_bytes(const tkv_engine* engine, size_t* bytes,
                                              tkv_error* error);

/* Counters that calls add to, [4]: slots outside the blocks, tokens that are not finite, tokens
 * that the format cannot hold, reads outside the block table. May be null everywhere. */
enum {
  TKV_ENGINE_STRAY_SLOTS = 0,
  TKV_ENGINE_NON_FINITE_TOKENS = 1,
  TKV_ENGINE_OUT_OF_RANGE_TOKENS = 2,
  TKV_ENGINE_STRAY_BLOCKS = 3
};

/* The blocks of one layer. */
typedef struct tkv_engine_layer {
  size_t struct_size;
  void* blocks;         /* block 0, 128-byte aligned */
  int64_t block_stride; /* bytes, a multiple of the page's; 0: num_kv_heads pages */
  int64_t num_blocks;
  const float* key_reflection; /* [num_kv_heads, head_dim]; null: none */
} tkv_engine_layer;

/* What keys are reflected by, from their means: both [num_kv_heads, head_dim] in host memory. A
 * mean of zeros gives zeros, which reflect nothing. TKV_NON_FINITE. */
TKV_API tkv_status tkv_engine_key_reflections(const tkv_engine* engine, const float* key_mean,
                                              float* out, tkv_error* error);

/* Strides are in elements, channels are neighbours; both of an array 0: dense. */
typedef struct tkv_engine_tokens {
  size_t struct_size;
  const void* k; /* [count, num_kv_heads, head_dim] */
  const void* v;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int64_t v_token_stride;
  int64_t v_head_stride;
  const int64_t* slots; /* [count]: block * block_tokens + place; -1 is skipped; distinct */
  int64_t count;
  int32_t* errors;
} tkv_engine_tokens;

TKV_API tkv_status tkv_engine_encode(const tkv_engine* engine, const tkv_engine_layer* layer,
                                     const tkv_engine_tokens* tokens, void* stream,
                                     tkv_error* error);
TKV_API tkv_status tkv_engine_encode_host(const tkv_engine* engine, const tkv_engine_layer* layer,
                                          const tkv_engine_tokens* tokens, tkv_error* error);

typedef struct tkv_engine_batch {
  size_t struct_size;
  const int32_t* block_table; /* [num_sequences, table_columns] */
  int64_t table_stride;       /* 0: table_columns */
  int32_t table_columns;
  int32_t num_sequences;
  const int32_t* seq_lens;        /* [num_sequences]; 0: padding */
  const int32_t* sequences;       /* [count], -1: padding; null: 0, 1, 2, ... */
  const int32_t* query_start_loc; /* [num_sequences + 1]; null: `queries` of each */
  int32_t count;
  int32_t queries;      /* the most of a sequence; 0: 1 */
  int64_t block_stride; /* as the layers' */
  int64_t num_blocks;
  void* workspace;
  size_t workspace_bytes;
} tkv_engine_batch;

/* After every change of tables or lengths, before tkv_engine_attend. */
TKV_API tkv_status tkv_engine_plan(const tkv_engine* engine, const tkv_engine_batch* batch,
                                   void* stream, tkv_error* error);

typedef struct tkv_engine_queries {
  size_t struct_size;
  const void* q; /* [num_tokens, num_q_heads, head_dim] */
  void* out;     /* likewise; rows without a query are not written */
  int64_t q_token_stride;
  int64_t q_head_stride;
  int64_t out_token_stride;
  int64_t out_head_stride;
  float* lse; /* natural logarithm, [num_tokens, num_q_heads] by the strides; may be null */
  int64_t lse_token_stride;
  int64_t lse_head_stride;
  int64_t num_tokens;
  int32_t* errors;
} tkv_engine_queries;

TKV_API tkv_status tkv_engine_attend(const tkv_engine* engine, const tkv_engine_batch* batch,
                                     const tkv_engine_layer* layer,
                                     const tkv_engine_queries* queries, void* stream,
                                     tkv_error* error);
/* Needs neither plan nor workspace. */
TKV_API tkv_status tkv_engine_attend_host(const tkv_engine* engine, const tkv_engine_batch* batch,
                                          const tkv_engine_layer* layer,
                                          const tkv_engine_queries* queries, tkv_error* error);

/* Range i: the tokens first[i] .. of sequence sequences[i], to the rows starts[i] .. starts[i + 1]
 * - 1 of k and v. */
typedef struct tkv_engine_ranges {
  size_t struct_size;
  const int32_t* block_table; /* [num_sequences, table_stride] */
  int64_t table_stride;
  int32_t num_sequences;
  int32_t count;
  const int32_t* sequences; /* [count]; null: 0, 1, 2, ... */
  const int32_t* first;     /* [count]; null: 0 */
  const int32_t* starts;    /* [count + 1] */
  int32_t max_tokens;       /* of a range; the rest of a longer one is left out */
  int64_t num_rows;         /* of k and v */
  void* k;                  /* [num_rows, num_kv_heads, head_dim], 16-byte aligned; or null */
  void* v;
  int32_t* errors;
} tkv_engine_ranges;

TKV_API tkv_status tkv_engine_decode(const tkv_engine* engine, const tkv_engine_layer* layer,
                                     const tkv_engine_ranges* ranges, void* stream,
                                     tkv_error* error);
TKV_API tkv_status tkv_engine_decode_host(const tkv_engine* engine, const tkv_engine_layer* layer,
                                          const tkv_engine_ranges* ranges, tkv_error* error);

#ifdef __cplusplus
}
#endif

#endif /* TIERKV_TIERKV_ENGINE_C_H_ */
