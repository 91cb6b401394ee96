// SPDX-License-Identifier: Apache-2.0
/* Compresses 64 tokens into a page (8-bit keys, 4-bit values) and reads them back. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tierkv/tierkv_c.h"

enum { kHeadDim = 128, kTokens = 64, kValues = kHeadDim * kTokens };

static int failed(tkv_status status, const tkv_error* error) {
  if (status != TKV_OK) {
    fprintf(stderr, "%s: %s\n", tkv_status_string(status), error->message);
  }
  return status != TKV_OK;
}

static double relative_error(const float* a, const float* b) {
  double error = 0, norm = 0;
  for (int i = 0; i < kValues; ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += a[i] * a[i];
  }
  return sqrt(error / norm);
}

int main(void) {
  static float k[kValues], v[kValues], k_back[kValues], v_back[kValues];
  for (int i = 0; i < kValues; ++i) {
    k[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  }
  /* [readme] */
  tkv_error error = {.struct_size = sizeof error};
  tkv_page_format format = {
      .struct_size = sizeof format, .head_dim = kHeadDim, .k_bits = 8, .v_bits = 4};
  tkv_page_choice choice = {.struct_size = sizeof choice};
  if (failed(tkv_page_choose_size(&format, 1, &choice, &error), &error)) return 1;
  format.page_bytes = choice.page_bytes;

  void* page = malloc((size_t)format.page_bytes);
  tkv_tokens in = {
      .struct_size = sizeof in, .count = kTokens, .dtype = TKV_FLOAT32, .k = k, .v = v};
  if (failed(tkv_page_encode(&format, page, 0, &in, &error), &error)) return 1;
  tkv_tokens out = {
      .struct_size = sizeof out, .count = kTokens, .dtype = TKV_FLOAT32, .k = k_back, .v = v_back};
  if (failed(tkv_page_decode(&format, page, 0, &out, &error), &error)) return 1;
  /* [readme] */
  free(page);

  const double k_error = relative_error(k, k_back), v_error = relative_error(v, v_back);
  printf("tierkv %s: page of %d bytes, relative error of keys %.4f, of values %.4f\n",
         tkv_version(), format.page_bytes, k_error, v_error);
  /* Uniform values in [-1/2, 1/2) have deviation 0.289, n-bit codes an error of 1 / (2^n - 1) /
   * sqrt(12): a ratio of 0.0039 for 8 bits and 0.067 for 4. */
  return k_error < 0.006 && v_error < 0.08 && v_error > 0.03 ? 0 : 1;
}
