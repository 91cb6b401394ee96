// SPDX-License-Identifier: Apache-2.0
/* Compresses a kv-dump into a container, and prints what other schemes would have done to it. */
#include <stdio.h>

#include "tierkv/tierkv_dumps_c.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  tkv_error error = {.struct_size = sizeof error};
  tkv_compress_options options = {.struct_size = sizeof options, .preset = argv[3]};
  if (tkv_compress(argv[1], argv[2], &options, &error) != TKV_OK) {
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }
  fprintf(stderr, "%lld bytes\n", (long long)options.file_bytes);

  const char* files[] = {argv[1]};
  const char* presets[] = {argv[3], "k4v2"};
  tkv_analyze_options analyze = {.struct_size = sizeof analyze,
                                 .files = files,
                                 .num_files = 1,
                                 .presets = presets,
                                 .num_presets = 2};
  tkv_text* json = NULL;
  if (tkv_analyze(&analyze, &json, &error) != TKV_OK) {
    fprintf(stderr, "%s\n", error.message);
    return 1;
  }
  fputs(tkv_text_data(json), stdout);
  tkv_text_destroy(json);
  return 0;
}
