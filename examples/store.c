/* The store from C: a prompt, then tokens one by one with attention over the compressed cache, and
 * the sequence as bytes into a second store. The model is a stand-in: random keys, values, queries.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "tierkv/tierkv_kv_c.h"

enum {
  kLayers = 2,
  kQHeads = 8,
  kKvHeads = 2,
  kHeadDim = 128,
  kPrompt = 500,
  kSteps = 20,
  kMaxTokens = kPrompt + kSteps,
  kTokenValues = kKvHeads * kHeadDim
};

static uint16_t k[kPrompt * kTokenValues], v[kPrompt * kTokenValues];
static float scores[kKvHeads * kPrompt];
static uint16_t q[kQHeads * kHeadDim], out[kQHeads * kHeadDim];

static int failed(tkv_status status, const tkv_error* error) {
  if (status != TKV_OK) fprintf(stderr, "%s: %s\n", tkv_status_string(status), error->message);
  return status != TKV_OK;
}

/* fp16: a sign, the exponents of 1/4 to 1/2, and random digits. */
static uint16_t random_half(void) {
  return (uint16_t)((rand() & 1) << 15 | 0x3400 | (rand() & 0x3ff));
}

static void random_tokens(int tokens) {
  for (int i = 0; i < tokens * kTokenValues; ++i) {
    k[i] = random_half();
    v[i] = random_half();
  }
}

/* What a prompt's attention would have found: a few tokens matter. */
static void random_significance(void) {
  for (int i = 0; i < kKvHeads * kPrompt; ++i) {
    scores[i] = rand() % 8 == 0 ? 0.02f : 0.0005f;
  }
}

static void random_query(void) {
  for (int i = 0; i < kQHeads * kHeadDim; ++i) q[i] = random_half();
}

/* [calls] */
static int fill_prompt(tkv_kv_store* store, tkv_sequence_id id, tkv_error* error) {
  if (failed(tkv_kv_begin(store, &id, 1, kPrompt, error), error)) return 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    random_tokens(kPrompt);
    random_significance();
    tkv_kv_append_call tokens = {.struct_size = sizeof tokens,
                                 .sequences = &id,
                                 .num_sequences = 1,
                                 .layer = layer,
                                 .tokens = kPrompt,
                                 .k = k,
                                 .v = v,
                                 .significance = scores,
                                 .stride = kPrompt};
    if (failed(tkv_kv_append(store, &tokens, error), error)) return 1;
  }
  return 0;
}

static int generate(tkv_kv_store* store, tkv_sequence_id id, tkv_error* error) {
  if (failed(tkv_kv_begin(store, &id, 1, 1, error), error)) return 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    random_tokens(1);
    tkv_kv_append_call token = {.struct_size = sizeof token,
                                .sequences = &id,
                                .num_sequences = 1,
                                .layer = layer,
                                .tokens = 1,
                                .k = k,
                                .v = v};
    if (failed(tkv_kv_append(store, &token, error), error)) return 1;
    random_query();
    tkv_kv_attend_call request = {.struct_size = sizeof request,
                                  .sequences = &id,
                                  .num_sequences = 1,
                                  .layer = layer,
                                  .q = q,
                                  .out = out,
                                  .count_query = 1};
    if (failed(tkv_kv_attend(store, &request, error), error)) return 1;
  }
  return 0;
}
/* [calls] */

/* Sequences move between stores, hosts and back ends as bytes. */
static int move(tkv_kv_store* from, tkv_sequence_id id, tkv_kv_store* to, tkv_error* error) {
  tkv_buffer bytes = {.struct_size = sizeof bytes};
  if (tkv_kv_export_sequence(from, id, &bytes, error) != TKV_BUFFER_TOO_SMALL) return 1;
  bytes.capacity = bytes.size;
  bytes.data = malloc(bytes.capacity);
  if (bytes.data == NULL) return 1;
  tkv_sequence_id copy = 0;
  int32_t tokens = 0;
  int wrong = failed(tkv_kv_export_sequence(from, id, &bytes, error), error) ||
              failed(tkv_kv_import_sequence(to, bytes.data, bytes.size, &copy, error), error) ||
              failed(tkv_kv_num_tokens(to, copy, &tokens, error), error);
  free(bytes.data);
  printf("%d tokens moved as %zu bytes\n", tokens, bytes.size);
  if (wrong || tokens != kMaxTokens) return 1;
  /* It is as long as the config allows. */
  return tkv_kv_begin(to, &copy, 1, 1, error) != TKV_OUT_OF_RANGE;
}

static int run(tkv_kv_store* store, tkv_kv_store* other, tkv_error* error) {
  tkv_sequence_id id = 0;
  if (failed(tkv_kv_add_sequence(store, &id, error), error)) return 1;
  if (fill_prompt(store, id, error)) return 1;
  for (int i = 0; i < kSteps; ++i) {
    if (generate(store, id, error)) return 1;
  }
  tkv_kv_usage usage = {.struct_size = sizeof usage};
  if (failed(tkv_kv_get_usage(store, &usage, error), error)) return 1;
  printf("%lld of %lld bytes\n", (long long)usage.nominal_bytes, (long long)usage.raw_bytes);
  if (2 * usage.nominal_bytes > usage.raw_bytes) return 1;
  if (move(store, id, other, error)) return 1;
  if (failed(tkv_kv_release(store, id, error), error)) return 1;
  return tkv_kv_release(store, id, error) != TKV_STALE_SEQUENCE;
}

int main(void) {
  tkv_error error = {.struct_size = sizeof error};
  /* [create] */
  tkv_tier_class every_head = {
      .struct_size = sizeof every_head, .alpha_high = 1, .alpha_low = 0.02, .share = 1};
  const tkv_tier_class* const classes[] = {&every_head};
  tkv_tiers_format tiers = {.struct_size = sizeof tiers, .classes = classes, .num_classes = 1};
  tkv_kv_config config = {.struct_size = sizeof config,
                          .num_layers = kLayers,
                          .num_q_heads = kQHeads,
                          .num_kv_heads = kKvHeads,
                          .head_dim = kHeadDim,
                          .dtype = TKV_FLOAT16,
                          .tiers = &tiers,
                          .max_sequences = 2,
                          .max_tokens = kMaxTokens,
                          .memory_bytes = 8 << 20};
  tkv_kv_store* store = NULL;
  if (failed(tkv_kv_create(&config, &store, &error), &error)) return 1;
  /* [create] */
  tkv_kv_store* other = NULL;
  int wrong = failed(tkv_kv_create(&config, &other, &error), &error) || run(store, other, &error);
  tkv_kv_destroy(other);
  tkv_kv_destroy(store);
  return wrong;
}
