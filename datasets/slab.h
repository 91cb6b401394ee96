// SPDX-License-Identifier: Apache-2.0
// Reading a rectangular part of a dataset: where it is stored is found under the lock; it is read,
// decoded and assembled outside of it, so that threads do so in parallel.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "codec/host/large_vector.h"
#include "datasets/hdf5/hdf5_util.h"

namespace tierkv::datasets {

// A rectangular part of a dataset.
struct Slab {
  std::vector<int64_t> start, count;

  int64_t elements() const;
};
inline constexpr int64_t kMaxSlabBytes = int64_t{1} << 32;

// A dataset whose elements lie in the file one after the other.
struct ContiguousArray {
  int64_t offset = 0;
  int64_t element_bytes = 0;
  std::vector<int64_t> shape;
};

// A file that stays open for as long, and what reading around HDF5 needs. An identifier will do for
// a single read.
struct SlabFile {
  SlabFile(hid_t file);

  hid_t id;
  // Open where a plain file is only read and its addresses are offsets, else -1.
  int descriptor = -1;
  // Contiguous datasets that passed all checks, by path; used under the lock.
  mutable std::map<std::string, ContiguousArray> arrays;
};

// Reads a slab in the type it is stored in, row-major. Takes the lock while it calls HDF5 only.
// Messages start with the dataset's path.
Status read_slab(const SlabFile& file, const std::string& path, const Slab& slab,
                 LargeBytes* bytes);
// The same converted by HDF5 to native float, double or int64_t. Integers and floating-point
// datasets both convert to float and double; int64_t clamps.
Status read_slab_as(const SlabFile& file, const std::string& path, const Slab& slab,
                    std::vector<float>* out);
Status read_slab_as(const SlabFile& file, const std::string& path, const Slab& slab,
                    std::vector<double>* out);
Status read_slab_as(const SlabFile& file, const std::string& path, const Slab& slab,
                    std::vector<int64_t>* out);

}  // namespace tierkv::datasets
