// SPDX-License-Identifier: Apache-2.0
// HDF5 datasets of numbers: opening them with every check that can be made before reading, and
// creating them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "datasets/hdf5/chunk_codec.h"
#include "datasets/hdf5/hdf5_util.h"

namespace tierkv::datasets {

// An opened dataset of numbers that passed the checks: hard links only, stored in this file, known
// filters, extent and chunks within limits.
struct Dataset {
  Handle handle;
  Handle type;
  int64_t element_bytes = 0;
  std::vector<int64_t> shape;  // rank 1 to 3
  std::vector<int64_t> chunk;  // empty where the layout is contiguous or compact
  ChunkPipeline pipeline;      // of a chunked layout

  int64_t elements() const;
};
Result<Dataset> open_dataset(hid_t file, const std::string& path);
// kCorrupt unless every element was written: HDF5 would return zeros for what was not.
Status check_complete(const Dataset& dataset);

// Creates a dataset without timestamps; chunk empty: contiguous, with its place in the file and
// without anything in it, otherwise shuffled and gzipped.
Handle create_dataset(hid_t group, const char* name, hid_t type, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& chunk, int32_t gzip_level = 4);

// Creates a group without timestamps, so that equal contents make equal files.
Handle create_group(hid_t parent, const char* name);

}  // namespace tierkv::datasets
