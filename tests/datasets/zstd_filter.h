// SPDX-License-Identifier: Apache-2.0
// HDF5 filter 32015 (zstd), so that HDF5 itself writes and reads such chunks. The reader of dumps
// decodes them without it (datasets/hdf5/chunk_codec.h).
#pragma once

#include <hdf5.h>
#include <zstd.h>

#include <cstdlib>

#include "datasets/hdf5/chunk_codec.h"

namespace tierkv::datasets {

inline constexpr H5Z_filter_t kZstdFilterId = 32015;

// HDF5's contract: *buffer is malloc'ed, the result replaces it; 0 means failure and leaves
// everything as it was.
inline size_t zstd_filter(unsigned flags, size_t num_values, const unsigned* values, size_t bytes,
                          size_t* buffer_size, void** buffer) {
  void* out = nullptr;
  size_t capacity = 0, size = 0;
  if ((flags & H5Z_FLAG_REVERSE) != 0) {
    const unsigned long long content = ZSTD_getFrameContentSize(*buffer, bytes);
    if (content == ZSTD_CONTENTSIZE_ERROR || content == ZSTD_CONTENTSIZE_UNKNOWN ||
        content > static_cast<unsigned long long>(kMaxChunkBytes))
      return 0;
    capacity = content > 0 ? content : 1;
    out = std::malloc(capacity);
    if (out == nullptr) return 0;
    size = ZSTD_decompress(out, capacity, *buffer, bytes);
  } else {
    capacity = ZSTD_compressBound(bytes);
    out = std::malloc(capacity);
    if (out == nullptr) return 0;
    size = ZSTD_compress(out, capacity, *buffer, bytes,
                         num_values > 0 ? static_cast<int>(values[0]) : 3);
  }
  if (ZSTD_isError(size)) {
    std::free(out);
    return 0;
  }
  std::free(*buffer);
  *buffer = out;
  *buffer_size = capacity;
  return size;
}

// Before the filter is used. HDF5 allows it more than once.
inline bool register_zstd_filter() {
  static const H5Z_class2_t kClass = {H5Z_CLASS_T_VERS, kZstdFilterId, 1,       1,
                                      "zstd",           nullptr,       nullptr, zstd_filter};
  return H5Zregister(&kClass) >= 0;
}

}  // namespace tierkv::datasets
