// SPDX-License-Identifier: Apache-2.0
// Decoding of one stored HDF5 chunk, outside HDF5: HDF5's own pipeline trusts a chunk to decode to
// its full size and reads past the end when it does not, and it decodes under a global lock. Here
// every size is checked and any number of threads may decode at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tierkv/status.h"

namespace tierkv::datasets {

inline constexpr int64_t kMaxChunkBytes = int64_t{1} << 28;

// HDF5's registered filter ids.
enum class Filter : int32_t { kDeflate = 1, kShuffle = 2, kFletcher32 = 3, kZstd = 32015 };

// True for the filters of enum Filter; others are refused by name.
bool is_known_filter(int64_t id);

struct ChunkPipeline {
  std::vector<Filter> filters;  // in the order they were applied when writing
  int32_t element_bytes = 0;    // shuffle's
  int64_t chunk_bytes = 0;      // of the decoded chunk, 1 to kMaxChunkBytes

  // The most a chunk may occupy in the file: incompressible data plus the filters' overhead.
  int64_t max_stored_bytes() const { return chunk_bytes + chunk_bytes / 8 + 4096; }
};

// Undoes the filters that `skipped` (bit i: filter i was not applied) leaves, in place. kCorrupt
// when the result is not exactly chunk_bytes long.
Status decode_chunk(const ChunkPipeline& pipeline, uint32_t skipped, std::vector<uint8_t>* data);

// HDF5's Fletcher-32 of big-endian 16-bit words.
uint32_t fletcher32(const uint8_t* data, size_t bytes);

}  // namespace tierkv::datasets
