// SPDX-License-Identifier: Apache-2.0
/* A compressed KV cache from C: a prompt of any length, then tokens one by one, each attending to
 * all before it. The model is a stand-in: random keys, values and queries.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "tierkv/tierkv_kv_c.h"

enum {
  kLayers = 2,
  kQHeads = 6,
  kKvHeads = 2,
  kHeadDim = 64,
  kPrompt = 600,
  kAnswer = 20,
  kToken = kKvHeads * kHeadDim
};

static uint16_t k[kPrompt * kToken], v[kPrompt * kToken]; /* fp16 */
static uint16_t q[kQHeads * kHeadDim], out[kQHeads * kHeadDim];

static int failed(tkv_status status, const tkv_error* error) {
  if (status != TKV_OK) fprintf(stderr, "%s: %s\n", tkv_status_string(status), error->message);
  return status != TKV_OK;
}

/* fp16: a sign, the exponents of 1/4 to 1/2, and random digits. */
static void random_values(uint16_t* x, int count) {
  for (int i = 0; i < count; ++i) x[i] = (uint16_t)((rand() & 1) << 15 | 0x3400 | (rand() & 0x3ff));
}

/* [pass] */
/* A forward pass over `tokens` new tokens of a sequence. */
static int forward(tkv_kv_store* store, tkv_sequence_id id, int tokens, tkv_error* error) {
  if (failed(tkv_kv_begin(store, &id, 1, tokens, error), error)) return 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    random_values(k, tokens * kToken); /* what the layer's projections would give */
    random_values(v, tokens * kToken);
    random_values(q, kQHeads * kHeadDim);
    tkv_kv_append_call append = {.struct_size = sizeof append,
                                 .sequences = &id,
                                 .num_sequences = 1,
                                 .layer = layer,
                                 .tokens = tokens,
                                 .k = k,
                                 .v = v};
    if (failed(tkv_kv_append(store, &append, error), error)) return 1;
    tkv_kv_attend_call attend = {.struct_size = sizeof attend,
                                 .sequences = &id,
                                 .num_sequences = 1,
                                 .layer = layer,
                                 .dtype = TKV_FLOAT16,
                                 .q = q,
                                 .out = out};
    if (failed(tkv_kv_attend(store, &attend, error), error)) return 1;
  }
  return 0;
}
/* [pass] */

/* [main] */
int main(void) {
  tkv_error error = {.struct_size = sizeof error};
  tkv_kv_config config = {.struct_size = sizeof config,
                          .num_layers = kLayers,
                          .dtype = TKV_FLOAT16,
                          .num_q_heads = kQHeads,
                          .num_kv_heads = kKvHeads,
                          .head_dim = kHeadDim,
                          .max_sequences = 4,
                          .max_tokens = kPrompt + kAnswer,
                          .memory_bytes = 8 << 20};
  tkv_kv_store* store = NULL;
  tkv_sequence_id id;
  if (failed(tkv_kv_create(&config, &store, &error), &error)) return 1;
  if (failed(tkv_kv_add_sequence(store, &id, &error), &error)) return 1;
  int status = forward(store, id, kPrompt, &error);
  for (int i = 0; i < kAnswer && status == 0; ++i) status = forward(store, id, 1, &error);
  /* [main] */
  int64_t held = 0;
  if (status == 0 && !failed(tkv_kv_bytes_held(store, id, &held, &error), &error)) {
    printf("%d tokens in %lld bytes, %.0f %% of fp16\n", kPrompt + kAnswer, (long long)held,
           100.0 * (double)held / (4.0 * (kPrompt + kAnswer) * kLayers * kToken));
  }
  tkv_kv_destroy(store);
  return status;
}
