// SPDX-License-Identifier: Apache-2.0
/* tierkv for C, the part that reads and writes kv-dumps (HDF5): analysis, calibration, compression.
 *
 * It is a library of its own, libtierkv_dumps.so, so that a serving process that links libtierkv.so
 * does not load HDF5, which is not thread-safe, not hardened against malicious files, and on Debian
 * brings libcurl, Kerberos and LDAP with it. The rules of tierkv_c.h hold.
 */
#ifndef TIERKV_TIERKV_DUMPS_C_H_
#define TIERKV_TIERKV_DUMPS_C_H_

#include "tierkv/tierkv_c.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Called now and then with the fraction that is done, from any thread, one call at a time. */
typedef struct tkv_progress {
  size_t struct_size;
  void (*update)(void* user, double fraction);
  void* user;
} tkv_progress;

/* Text that a call made. */
typedef struct tkv_text tkv_text;
TKV_API const char* tkv_text_data(const tkv_text* text); /* UTF-8, ends with a zero */
TKV_API size_t tkv_text_size(const tkv_text* text);
TKV_API void tkv_text_destroy(tkv_text* text);

typedef struct tkv_analyze_options {
  size_t struct_size;
  const char* const* files; /* [num_files] kv-dumps */
  size_t num_files;
  /* [num_presets], as `tierkv analyze --preset`; none: its defaults, but for those that a file
     cannot serve */
  const char* const* presets;
  size_t num_presets;
  const char* profile;  /* a kv-profile, or null: each sequence's own means and steps */
  const char* sequence; /* only this one, or null: all */
  int32_t first_layer;
  int32_t num_layers; /* 0: to the last one */
  int32_t threads;    /* 0: all cores */
  const tkv_progress* progress;
} tkv_analyze_options;

/* What each preset would do to the dumps: the JSON of `tierkv analyze --json`, schema
 * tierkv.analyze/1. */
TKV_API tkv_status tkv_analyze(const tkv_analyze_options* options, tkv_text** json,
                               tkv_error* error);

typedef struct tkv_calibrate_options {
  size_t struct_size;
  const char* const* files; /* [num_files] kv-dumps of one model, with q */
  size_t num_files;
  int32_t no_thresholds; /* 1: leave alpha_high 1 and alpha_low 0 (dumps without significance) */
  double error_budget;   /* of alpha_high; 0: 0.25 */
  double prune_budget;   /* of alpha_low; 0: every token is kept */
  int32_t threads;       /* 0: all cores */
  const tkv_progress* progress;
  double alpha_high;    /* out */
  double alpha_low;     /* out */
  const char* model_id; /* of the profile; null: the dumps', which must then have the same one */
  int32_t overwrite;    /* 1: replaces a profile that exists */
} tkv_calibrate_options;

/* Writes a profile of what dumps can tell: means, energies and thresholds of a model. TKV_IO where
 * the profile is one of the dumps, or exists and `overwrite` is 0. */
TKV_API tkv_status tkv_calibrate(tkv_calibrate_options* options, const char* profile,
                                 tkv_error* error);

/* A profile as numbers: what a store wants to know of a model. */
typedef struct tkv_profile tkv_profile;
TKV_API tkv_status tkv_profile_open(const char* path, tkv_profile** profile, tkv_error* error);
TKV_API void tkv_profile_destroy(tkv_profile* profile);

/* The pointers in *data are valid until the profile is destroyed. */
TKV_API tkv_status tkv_profile_get_data(const tkv_profile* profile, tkv_profile_data* data,
                                        tkv_error* error);
/* Replaces the file, whole or not at all. */
TKV_API tkv_status tkv_profile_write(const tkv_profile_data* data, const char* path,
                                     tkv_error* error);

/* Head scales of sensitivities, all positive: sensitivity^(-1/4), normalised to a geometric mean of
 * 1, then clamped to [1/8, 8]. Both [rows]. */
TKV_API tkv_status tkv_head_scales(const double* sensitivities, int32_t rows, double* scales,
                                   tkv_error* error);
/* The class of each head, out [rows]: the most sensitive round(shares[0] * rows) heads are class 0,
 * and so on; the rest are class num_shares. Equally sensitive heads: the lower row first. */
TKV_API tkv_status tkv_assign_classes(const double* shares, int32_t num_shares,
                                      const double* sensitivities, int32_t rows, int32_t* classes,
                                      tkv_error* error);

typedef struct tkv_compress_options {
  size_t struct_size;
  const char* preset;
  const char* profile;     /* or null */
  int32_t threads;         /* 0: all cores */
  int32_t overwrite;       /* 1: replaces a container that exists */
  int32_t without_queries; /* 1: queries and significance are left out */
  const tkv_progress* progress;
  int64_t values;        /* out: number of values, of keys and of values */
  int64_t file_bytes;    /* out: of the container */
  int64_t carried_bytes; /* out: of file_bytes, those of queries and significance */
  int64_t tokens[4];     /* out: (row, token) pairs in window, high, low, pruned */
} tkv_compress_options;

/* A kv-dump into a container, written whole or not at all. TKV_IO where the container is the dump
 * or the profile, or exists and `overwrite` is 0. */
TKV_API tkv_status tkv_compress(const char* dump, const char* container,
                                tkv_compress_options* options, tkv_error* error);

typedef struct tkv_decompress_options {
  size_t struct_size;
  int32_t convert; /* 1: write `dtype`; 0: the dtype the cache had before it was compressed */
  tkv_dtype dtype;
  int32_t threads;    /* 0: all cores */
  int32_t gzip_level; /* of the dump, 0 (none) to 9 */
  const tkv_progress* progress;
  int32_t overwrite; /* 1: replaces a dump that exists */
} tkv_decompress_options;

/* A container back into a kv-dump; pruned tokens are zeros, named in the dataset `pruned`. TKV_IO
 * where the dump is the container, or exists and `overwrite` is 0. */
TKV_API tkv_status tkv_decompress(const char* container, const char* dump,
                                  const tkv_decompress_options* options, tkv_error* error);

#ifdef __cplusplus
}
#endif

#endif /* TIERKV_TIERKV_DUMPS_C_H_ */
