// SPDX-License-Identifier: Apache-2.0
/* tierkv for C and for every language that can call C: the codec and the `.tkv` container.
 *
 * Use it where C++17 is not at hand, or where the library is loaded at run time: a program keeps
 * working with every later libtierkv.so of the same soname (before 1.0: of the same minor version)
 * without being compiled again. What reads and writes kv-dumps needs HDF5 and lives in a library of
 * its own, tierkv_dumps_c.h.
 *
 *   tkv_container* cache;
 *   tkv_error error = {.struct_size = sizeof error};
 *   if (tkv_container_open("cache.tkv", &cache, &error) != TKV_OK) puts(error.message);
 *
 * Rules that hold everywhere:
 *   - Functions that can fail return a tkv_status and take a tkv_error last, which may be null. A
 *     failed call has written nothing else, unless its declaration says otherwise.
 *   - Every struct begins with struct_size, which the caller sets to sizeof the struct; the rest of
 *     a zeroed struct is the default. Newer versions append fields and read what is missing as
 *     zero; a field that this version does not know must be zero.
 *   - Opaque handles are released by their *_destroy function; null is allowed there. Pointers that
 *     a handle returns live as long as the handle. A handle may be read by several threads at once.
 *   - Arrays are the caller's, dense and row-major. Nothing throws, exits or prints.
 */
#ifndef TIERKV_TIERKV_C_H_
#define TIERKV_TIERKV_C_H_

#include <stddef.h>
#include <stdint.h>

#include "tierkv/export.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TKV_VERSION_MAJOR 0
#define TKV_VERSION_MINOR 2
#define TKV_VERSION_PATCH 0

/* The version of the library that is loaded: "0.2.0". */
TKV_API const char* tkv_version(void);

/* ---- Errors ---- */

typedef int32_t tkv_status;
enum {
  TKV_OK = 0,
  TKV_INVALID_ARGUMENT = 1, /* null pointer, size or configuration out of range */
  TKV_UNSUPPORTED = 2,      /* a combination the library names and refuses */
  TKV_NON_FINITE = 3,       /* NaN or infinity in the input */
  TKV_OUT_OF_RANGE = 4,     /* a value that its format cannot hold, an index beyond its table */
  TKV_OUT_OF_PAGES = 5,
  TKV_CORRUPT = 6, /* compressed bytes or a file that contradicts itself */
  TKV_BUFFER_TOO_SMALL = 7,
  TKV_STALE_SEQUENCE = 8,
  TKV_NOT_FOUND = 9,
  TKV_IO = 10, /* the operating system refused a read or a write */
  TKV_CUDA = 11,
  TKV_VERSION = 12,       /* a format version this build does not know */
  TKV_OUT_OF_MEMORY = 13, /* no host or device memory left */
  TKV_INTERNAL = 101      /* a bug: please report it with the message */
};

/* "invalid_argument" for TKV_INVALID_ARGUMENT and so on; "unknown" for other numbers. Static text.
 */
TKV_API const char* tkv_status_string(tkv_status status);

/* What went wrong, for people: names the file, field or element. Empty after success. */
typedef struct tkv_error {
  size_t struct_size;
  char message[504]; /* UTF-8, ends with a zero, cut where it is longer */
} tkv_error;

/* ---- Types ---- */

typedef int32_t tkv_dtype;
enum { TKV_FLOAT16 = 0, TKV_BFLOAT16 = 1, TKV_FLOAT32 = 2 };

typedef int32_t tkv_component;
enum { TKV_KEY = 0, TKV_VALUE = 1 };

/* What a profile of a model holds; rows = num_layers * num_kv_heads, in order (layer, kv_head).
 * Arrays that may be null are marked so: what they would hold is unknown. */
typedef struct tkv_profile_data {
  size_t struct_size;
  const char* model_id; /* not empty */
  int32_t num_layers;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  double sm_scale;
  double alpha_high;
  double alpha_low;
  int32_t rope_pairing;       /* 0 none, 1 halves, 2 neighbours, -1 unknown */
  int32_t rope_dims;          /* rotated dims, even; 0 with none or unknown */
  int32_t rope_layers;        /* 1: the same in all layers, or num_layers; 0: unknown */
  const float* rope_inv_freq; /* [rope_layers, rope_dims / 2]; zeros: a layer without rotation */
  const float* key_mean;      /* [rows, head_dim], sinks left out as in all statistics */
  const float* value_mean;    /* [rows, head_dim] */
  const float* key_mean_before_rope; /* [rows, head_dim] or null */
  const float* query_energy;         /* [rows, head_dim] mean squared query component, or null;
                                      * both dims of a RoPE pair hold the mean of the two */
  const double* query_trace;         /* [rows] mean |q|^2 */
  const double* value_signal;        /* [rows] mean |v|^2 */
  const double* key_scale;           /* [rows] head scales, positive; null when written: ones */
  const double* value_scale;         /* likewise */
  const double* key_sensitivity;     /* [rows] KL in nats when this component of this row alone */
  const double* value_sensitivity;   /* is coarse, positive; joint: keys and values together; */
  const double* joint_sensitivity;   /* or null */
} tkv_profile_data;

/* Bytes that a function writes. size is set to what was written or, with TKV_BUFFER_TOO_SMALL, to
 * what is needed. */
typedef struct tkv_buffer {
  size_t struct_size;
  uint8_t* data;
  size_t capacity;
  size_t size;
} tkv_buffer;

/* ---- Unified pages: tokens of one row (sequence, layer, kv_head) in a page of fixed size ---- */

/* How a page stores its tokens: token-wise min-max codes, or raw 16-bit values. */
typedef struct tkv_page_format {
  size_t struct_size;
  int32_t head_dim; /* 64, 96, 128 or 256 */
  int32_t k_bits;   /* 16 (raw), 8, 4 or 2 */
  int32_t v_bits;
  int32_t k_group; /* channels that share scale and zero point, a multiple of 16; 0: all */
  int32_t v_group;
  int32_t page_bytes;  /* a multiple of 128; ignored by tkv_page_choose_size */
  tkv_dtype raw_dtype; /* of components with 16 bits: TKV_FLOAT16 or TKV_BFLOAT16 */
} tkv_page_format;

typedef struct tkv_page_choice {
  size_t struct_size;
  double max_waste;     /* in: of page_bytes, for a full page of any format; 0: 0.06 */
  int32_t min_tokens;   /* in: of the smallest format, per page; 0: 64 */
  int32_t page_bytes;   /* out */
  double worst_waste;   /* out */
  int32_t within_limit; /* out: 0 where no size keeps max_waste; page_bytes then wastes least */
} tkv_page_choice;

/* The page size that serves all of `count` formats, which share struct_size and head_dim. Give
 * every format that pages of one pool may have (window, high tier, low tier). */
TKV_API tkv_status tkv_page_choose_size(const tkv_page_format* formats, size_t count,
                                        tkv_page_choice* choice, tkv_error* error);

/* Tokens that a page of this format holds. */
TKV_API tkv_status tkv_page_tokens(const tkv_page_format* format, int32_t* tokens,
                                   tkv_error* error);

/* Tokens to be written to, or read from, consecutive slots of a page. When reading, null arrays are
 * skipped; when writing, k and v are required, scores default to 0 and positions to the slots. */
typedef struct tkv_tokens {
  size_t struct_size;
  int32_t count;
  tkv_dtype dtype;    /* of k and v */
  void* k;            /* [count, head_dim] */
  void* v;            /* [count, head_dim] */
  float* scores;      /* [count] significance; finite */
  int32_t* positions; /* [count] not negative */
} tkv_tokens;

/* Appends tokens to a page of format->page_bytes bytes that holds `used` tokens. The bytes are
 * those that the GPU kernels read and write; a page that was never written needs no initialisation.
 * After TKV_NON_FINITE or TKV_OUT_OF_RANGE the page still holds its `used` tokens, what lies behind
 * them is unspecified. */
TKV_API tkv_status tkv_page_encode(const tkv_page_format* format, void* page, int32_t used,
                                   const tkv_tokens* tokens, tkv_error* error);
/* Reads slots first_slot, first_slot + 1, ... into the arrays of `tokens`. Any bytes can be read:
 * damaged scales give NaN or infinity. */
TKV_API tkv_status tkv_page_decode(const tkv_page_format* format, const void* page,
                                   int32_t first_slot, const tkv_tokens* tokens, tkv_error* error);

/* ---- Token-wise quantisation of rows, outside of pages ---- */

/* One token a row: scale = fp16((max - min) / (2^bits - 1)), zero_point = fp16(min) of each group
 * of channels, code = round((x - zero_point) / scale); back: scale * code + zero_point. */
typedef struct tkv_codes {
  size_t struct_size;
  int64_t tokens;
  int32_t head_dim;     /* 1 to 4096 */
  int32_t bits;         /* 1 to 8 */
  int32_t group;        /* channels per group, divides head_dim; 0: head_dim */
  uint8_t* codes;       /* [tokens, head_dim], one byte a code */
  uint16_t* scale;      /* fp16 [tokens, head_dim / group] */
  uint16_t* zero_point; /* likewise */
} tkv_codes;

/* x [tokens, head_dim]. After TKV_NON_FINITE or TKV_OUT_OF_RANGE the arrays are unspecified; the
 * message names the token. */
TKV_API tkv_status tkv_quantize(const float* x, const tkv_codes* codes, tkv_error* error);
TKV_API tkv_status tkv_dequantize(const tkv_codes* codes, float* x, tkv_error* error);

/* ---- Entropy-coded blocks: up to 64 tokens of signed 16-bit codes of one component ---- */

typedef struct tkv_codebook tkv_codebook;

typedef struct tkv_codebook_spec {
  size_t struct_size;
  tkv_component component;
  int32_t head_dim;         /* 1 to 4096 */
  int32_t max_length;       /* bits of the longest code word, 8 to 14; 0: 12 */
  int32_t streams_per_lane; /* 1 or 2; 0: 1 */
} tkv_codebook_spec;

/* The Huffman codebook that suits codes [tokens, head_dim]; it codes any other codes too, rare ones
 * as exceptions. */
TKV_API tkv_status tkv_codebook_build(const tkv_codebook_spec* spec, const int16_t* codes,
                                      int64_t tokens, tkv_codebook** codebook, tkv_error* error);
/* From the bytes that tkv_codebook_serialize wrote; any bytes are safe. */
TKV_API tkv_status tkv_codebook_parse(const uint8_t* bytes, size_t size, tkv_codebook** codebook,
                                      tkv_error* error);
TKV_API tkv_status tkv_codebook_serialize(const tkv_codebook* codebook, tkv_buffer* out,
                                          tkv_error* error);
TKV_API void tkv_codebook_destroy(tkv_codebook* codebook);

/* The most bytes that a block of 64 tokens takes. */
TKV_API size_t tkv_block_max_bytes(int32_t head_dim);
typedef struct tkv_block_shape {
  size_t struct_size;
  int32_t tokens;   /* 1 to 64 */
  int32_t head_dim; /* 1 to 4096 */
} tkv_block_shape;
/* codes [tokens, head_dim]; lossless for any codes. */
TKV_API tkv_status tkv_block_encode(const tkv_codebook* codebook, const tkv_block_shape* shape,
                                    const int16_t* codes, tkv_buffer* out, tkv_error* error);
/* Reads in->size bytes, which the block must fill. After TKV_CORRUPT every code is 0. */
TKV_API tkv_status tkv_block_decode(const tkv_codebook* codebook, const tkv_block_shape* shape,
                                    const tkv_buffer* in, int16_t* codes, tkv_error* error);

/* ---- `.tkv` containers: compressed caches in files ---- */

typedef struct tkv_container tkv_container;

typedef struct tkv_container_info {
  size_t struct_size;
  int64_t file_bytes;
  int32_t num_sequences;
  int32_t num_layers;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  tkv_dtype dtype; /* of the cache before it was compressed */
  int32_t rope_applied;
  double rope_theta;
  double sm_scale;
  const char* preset; /* how it was compressed */
  const char* model_id;
  const char* created_by;
} tkv_container_info;

typedef struct tkv_sequence_info {
  size_t struct_size;
  int64_t num_tokens;
  const char* id;
  const char* kind;
  const int32_t* tokens; /* [num_tokens] */
} tkv_sequence_info;

/* Reads header, index and sequences, and checks them. The file is kept open. TKV_UNSUPPORTED for
 * what tkv_kv_export_sequence wrote: only a store imports it. */
TKV_API tkv_status tkv_container_open(const char* path, tkv_container** container,
                                      tkv_error* error);
/* The same for a container in memory, which is copied; `name` stands for the path in messages. */
TKV_API tkv_status tkv_container_open_bytes(const uint8_t* bytes, size_t size, const char* name,
                                            tkv_container** container, tkv_error* error);
TKV_API void tkv_container_destroy(tkv_container* container);

TKV_API tkv_status tkv_container_get_info(const tkv_container* container, tkv_container_info* info,
                                          tkv_error* error);
TKV_API tkv_status tkv_container_get_sequence(const tkv_container* container, int32_t sequence,
                                              tkv_sequence_info* info, tkv_error* error);

typedef struct tkv_layer {
  size_t struct_size;
  int32_t sequence;
  int32_t layer;
  int32_t threads; /* 0: all cores */
  float* k;        /* out [num_kv_heads, num_tokens, head_dim]; pruned tokens are zeros; or null */
  float* v;        /* likewise */
  uint8_t* pruned; /* out [num_kv_heads, num_tokens]: 1 where the token was dropped; or null */
} tkv_layer;

/* Decodes one layer; after TKV_CORRUPT the arrays are unspecified. */
TKV_API tkv_status tkv_container_decode_layer(const tkv_container* container,
                                              const tkv_layer* layer, tkv_error* error);
/* Checks every checksum and decodes everything; TKV_CORRUPT names the first chunk that is wrong.
 * threads 0: all cores. */
TKV_API tkv_status tkv_container_verify(const tkv_container* container, int32_t threads,
                                        tkv_error* error);

#ifdef __cplusplus
}
#endif

#endif /* TIERKV_TIERKV_C_H_ */
