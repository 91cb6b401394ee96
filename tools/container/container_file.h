// SPDX-License-Identifier: Apache-2.0
// A dumped cache into a `.tkv` container and back.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "codec/file/cache_decoder.h"
#include "codec/policy/profile.h"
#include "datasets/dump.h"
#include "tools/presets/preset.h"

namespace tierkv::analysis {

struct CompressOptions {
  Preset preset;
  int32_t threads = 1;
  const Profile* profile = nullptr;      // means and steps; null: each sequence's own
  std::function<void(double)> progress;  // fraction done, called by one thread at a time
  bool without_queries = false;          // nothing is carried over but keys and values
  bool overwrite = true;                 // a file that stands at the path in the end
};

struct CompressSummary {
  int64_t values = 0;              // 2 * tokens * num_kv_heads * head_dim over layers
  int64_t file_bytes = 0;          // of the container
  int64_t query_bytes = 0;         // of it: query positions, queries and significance carried over
  int64_t tokens[kNumTiers] = {};  // (row, token) pairs by tier
  // Time of the stages, added up over the threads.
  double read_seconds = 0, encode_seconds = 0, write_seconds = 0;
};

// Writes `path` whole or not at all; the bytes depend on the dump, the preset and the profile
// alone. kUnsupported names a preset that the container cannot hold.
Result<CompressSummary> compress(datasets::DumpReader& reader, const CompressOptions& options,
                                 const std::string& path);

struct DecompressOptions {
  DType dtype = DType::kFloat16;
  int32_t threads = 1;
  int32_t gzip_level = 0;                // of the dump, 0 to 9
  std::function<void(double)> progress;  // fraction done, called by one thread at a time
  bool overwrite = true;                 // a file that stands at the path in the end
};

// Writes the kv-dump `path` whole or not at all.
Status decompress(const CacheDecoder& decoder, const DecompressOptions& options,
                  const std::string& path);

}  // namespace tierkv::analysis
