// SPDX-License-Identifier: Apache-2.0
/* The cache of a serving engine from C: two sequences behind block tables, a prompt, then steps of
 * one token each with attention over the compressed blocks. Host memory stands in for the GPU's:
 * the calls without _host take device pointers and a stream, and a plan before the first attention
 * of a step. The model is a stand-in: random keys, values, queries.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "tierkv/tierkv_engine_c.h"

enum {
  kQHeads = 8,
  kKvHeads = 2,
  kHeadDim = 128,
  kBlockTokens = 64,
  kBlocks = 8,
  kColumns = 4, /* of the block table */
  kSequences = 2,
  kPrompt = 100,
  kSteps = 40,
  kTokenValues = kKvHeads * kHeadDim
};

static const int32_t block_table[kSequences][kColumns] = {{5, 0, 2, 7}, {1, 6, 3, 4}};
static uint16_t k[kPrompt * kTokenValues], v[kPrompt * kTokenValues];
static uint16_t q[kSequences * kQHeads * kHeadDim], out[kSequences * kQHeads * kHeadDim];
static int64_t slots[kPrompt];
static int32_t seq_lens[kSequences], errors[4];

static int failed(tkv_status status, const tkv_error* error) {
  if (status != TKV_OK) fprintf(stderr, "%s: %s\n", tkv_status_string(status), error->message);
  return status != TKV_OK;
}

/* fp16: a sign, the exponents of 1/4 to 1/2, and random digits. */
static void random_values(uint16_t* x, int count) {
  for (int i = 0; i < count; ++i) x[i] = (uint16_t)((rand() & 1) << 15 | 0x3400 | (rand() & 0x3ff));
}

/* What an engine calls slot mapping. */
static int64_t slot_of(int sequence, int token) {
  return (int64_t)block_table[sequence][token / kBlockTokens] * kBlockTokens + token % kBlockTokens;
}

/* [calls] */
static int encode(const tkv_engine* engine, const tkv_engine_layer* layer, int64_t count,
                  tkv_error* error) {
  const tkv_engine_tokens tokens = {.struct_size = sizeof tokens,
                                    .k = k,
                                    .v = v,
                                    .slots = slots,
                                    .count = count,
                                    .errors = errors};
  return failed(tkv_engine_encode_host(engine, layer, &tokens, error), error);
}

static int attend(const tkv_engine* engine, const tkv_engine_layer* layer, tkv_error* error) {
  const tkv_engine_batch batch = {.struct_size = sizeof batch,
                                  .block_table = block_table[0],
                                  .table_columns = kColumns,
                                  .num_sequences = kSequences,
                                  .seq_lens = seq_lens,
                                  .count = kSequences,
                                  .num_blocks = layer->num_blocks};
  const tkv_engine_queries queries = {.struct_size = sizeof queries,
                                      .q = q,
                                      .out = out,
                                      .num_tokens = kSequences,
                                      .errors = errors};
  return failed(tkv_engine_attend_host(engine, &batch, layer, &queries, error), error);
}
/* [calls] */

static int run(const tkv_engine* engine, const tkv_engine_layer* layer, tkv_error* error) {
  for (int s = 0; s < kSequences; ++s) {
    random_values(k, kPrompt * kTokenValues);
    random_values(v, kPrompt * kTokenValues);
    for (int t = 0; t < kPrompt; ++t) slots[t] = slot_of(s, t);
    if (encode(engine, layer, kPrompt, error)) return 1;
    seq_lens[s] = kPrompt;
  }
  for (int step = 0; step < kSteps; ++step) {
    random_values(k, kSequences * kTokenValues);
    random_values(v, kSequences * kTokenValues);
    random_values(q, kSequences * kQHeads * kHeadDim);
    for (int s = 0; s < kSequences; ++s) slots[s] = slot_of(s, seq_lens[s]++);
    if (encode(engine, layer, kSequences, error)) return 1;
    if (attend(engine, layer, error)) return 1;
  }
  printf("%d tokens a sequence, %d errors\n", seq_lens[0],
         errors[0] + errors[1] + errors[2] + errors[3]);
  return 0;
}

int main(void) {
  const tkv_engine_config config = {.struct_size = sizeof config,
                                    .num_q_heads = kQHeads,
                                    .num_kv_heads = kKvHeads,
                                    .head_dim = kHeadDim,
                                    .k_bits = 4,
                                    .v_bits = 4,
                                    .max_sequences = kSequences,
                                    .max_blocks = kColumns};
  tkv_error error = {.struct_size = sizeof error};
  tkv_engine* engine = NULL;
  int64_t page_bytes = 0;
  if (failed(tkv_engine_page_bytes(&config, &page_bytes, &error), &error)) return 1;
  if (failed(tkv_engine_create_host(&config, &engine, &error), &error)) return 1;
  const size_t bytes = (size_t)(kBlocks * kKvHeads * page_bytes);
  uint8_t* memory = malloc(bytes + 128);
  if (memory == NULL) return 1;
  const tkv_engine_layer layer = {.struct_size = sizeof layer,
                                  .blocks = memory + (128 - (uintptr_t)memory % 128) % 128,
                                  .num_blocks = kBlocks};
  const int status = run(engine, &layer, &error);
  printf("%.2f of fp16\n", (double)page_bytes / (kBlockTokens * 4 * kHeadDim));
  free(memory);
  tkv_engine_destroy(engine);
  return status;
}
