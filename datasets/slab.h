// Reading a rectangular part of a dataset: what is stored is fetched under the lock, then decoded
// and assembled outside of it, so that threads decode in parallel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "datasets/hdf5_util.h"

namespace tierkv::datasets {

// A rectangular part of a dataset.
struct Slab {
  std::vector<int64_t> start, count;

  int64_t elements() const;
};
inline constexpr int64_t kMaxSlabBytes = int64_t{1} << 32;

// Reads a slab in the type it is stored in, row-major. Takes the lock while it calls HDF5 only;
// chunks are decoded outside of it. Messages start with the dataset's path.
Status read_slab(hid_t file, const std::string& path, const Slab& slab,
                 std::vector<uint8_t>* bytes);
// The same converted by HDF5 to native float, double or int64_t. Integers and floating-point
// datasets both convert to float and double; int64_t clamps.
Status read_slab_as(hid_t file, const std::string& path, const Slab& slab, std::vector<float>* out);
Status read_slab_as(hid_t file, const std::string& path, const Slab& slab,
                    std::vector<double>* out);
Status read_slab_as(hid_t file, const std::string& path, const Slab& slab,
                    std::vector<int64_t>* out);

}  // namespace tierkv::datasets
