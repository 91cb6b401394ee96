// SPDX-License-Identifier: Apache-2.0
#include "datasets/slab.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "datasets/hdf5/hdf5_dataset.h"

namespace tierkv::datasets {
namespace {

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

using Index = std::array<int64_t, 3>;

// Rank 1 and 2 are rank 3 with leading extents of one.
Index padded(const std::vector<int64_t>& v, int64_t fill) {
  Index out = {fill, fill, fill};
  std::copy(v.begin(), v.end(), out.end() - static_cast<std::ptrdiff_t>(v.size()));
  return out;
}

struct StoredChunk {
  Index origin;
  uint32_t skipped = 0;
  std::vector<uint8_t> bytes;
};

// A slab as it lies in the file: `whole` for contiguous layouts, unless it is one run of the file
// that is still to be read; chunks otherwise.
struct StoredSlab {
  Index start, count, chunk;
  int64_t element_bytes = 0;
  ChunkPipeline pipeline;
  LargeBytes* whole = nullptr;
  int64_t run_offset = -1, run_bytes = 0;
  std::vector<StoredChunk> chunks;
};

// Bytes [offset, offset + size) of the file.
Status read_run(int descriptor, int64_t offset, int64_t size, LargeBytes* out) {
  const Status damaged = corrupt("cannot be read (damaged)");
  struct stat info;
  if (fstat(descriptor, &info) != 0 || size > info.st_size || offset > info.st_size - size) {
    return damaged;
  }
  out->resize(size);
  for (int64_t done = 0; done < size;) {
    const ssize_t n = pread(descriptor, out->data() + done, size - done, offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return damaged;
    done += n;
  }
  return Status::ok();
}

Status check_slab(const Slab& slab, const std::vector<int64_t>& shape, int64_t element_bytes) {
  if (slab.start.size() != shape.size() || slab.count.size() != shape.size()) {
    return Status(StatusCode::kInvalidArgument, "has another rank than what is asked for");
  }
  for (size_t i = 0; i < shape.size(); ++i) {
    if (slab.start[i] < 0 || slab.count[i] < 1 || slab.start[i] > shape[i] ||
        slab.count[i] > shape[i] - slab.start[i]) {
      return Status(StatusCode::kInvalidArgument, "is smaller than what is asked for");
    }
  }
  if (slab.elements() > kMaxSlabBytes / element_bytes) {
    return Status(StatusCode::kUnsupported, "holds more than " + std::to_string(kMaxSlabBytes) +
                                                " bytes in what is read at once");
  }
  return Status::ok();
}

// The index of a slab's first element, -1 where its elements are not one run of the array.
int64_t run_of(const Slab& slab, const std::vector<int64_t>& shape) {
  int64_t first = 0;
  bool within = false;  // a dimension before this one holds more than one index
  for (size_t i = 0; i < shape.size(); ++i) {
    if (within && slab.count[i] != shape[i]) return -1;
    within |= slab.count[i] > 1;
    first = first * shape[i] + slab.start[i];
  }
  return first;
}

void find_run(const ContiguousArray& array, const Slab& slab, StoredSlab* out) {
  const int64_t first = run_of(slab, array.shape);
  if (first < 0) return;
  out->run_offset = array.offset + first * array.element_bytes;
  out->run_bytes = slab.elements() * array.element_bytes;
}

// Where the elements of a contiguous dataset lie, if around HDF5 they can be read at all.
bool locate(const SlabFile& file, const Dataset& d, ContiguousArray* out) {
  if (file.descriptor < 0) return false;
  const haddr_t offset = H5Dget_offset(d.handle.id());
  if (offset == HADDR_UNDEF || offset > static_cast<haddr_t>(INT64_MAX) / 2) return false;
  *out = {static_cast<int64_t>(offset), d.element_bytes, d.shape};
  return true;
}

Status fetch_contiguous(const Dataset& d, const Slab& slab, LargeBytes* out) {
  const std::vector<hsize_t> start(slab.start.begin(), slab.start.end()),
      count(slab.count.begin(), slab.count.end());
  out->resize(slab.elements() * d.element_bytes);
  const Handle space(H5Dget_space(d.handle.id()));
  const Handle memory(H5Screate_simple(static_cast<int>(count.size()), count.data(), nullptr));
  if (H5Sselect_hyperslab(space.id(), H5S_SELECT_SET, start.data(), nullptr, count.data(),
                          nullptr) < 0 ||
      H5Dread(d.handle.id(), d.type.id(), memory.id(), space.id(), H5P_DEFAULT, out->data()) < 0) {
    return corrupt("cannot be read (damaged)");
  }
  return Status::ok();
}

Status fetch_chunk(const Dataset& d, const Index& origin, StoredChunk* out) {
  hsize_t offset[3];
  const size_t rank = d.shape.size();
  for (size_t i = 0; i < rank; ++i) offset[i] = origin[3 - rank + i];
  // H5Dget_chunk_storage_size() names the size of the shape where there are no filters, whatever is
  // stored and will be read.
  hsize_t bytes = 0;
  unsigned skipped = 0;
  haddr_t at = HADDR_UNDEF;
  if (H5Dget_chunk_info_by_coord(d.handle.id(), offset, &skipped, &at, &bytes) < 0 ||
      at == HADDR_UNDEF || bytes == 0) {
    return corrupt("a chunk was never written");
  }
  if (bytes > static_cast<hsize_t>(d.pipeline.max_stored_bytes())) {
    return corrupt("a chunk of " + std::to_string(bytes) + " bytes holds more than its shape");
  }
  out->origin = origin;
  out->bytes.resize(bytes);
  if (H5Dread_chunk(d.handle.id(), H5P_DEFAULT, offset, &out->skipped, out->bytes.data()) < 0) {
    return corrupt("a chunk cannot be read (damaged)");
  }
  return Status::ok();
}

Status fetch_chunks(const Dataset& d, StoredSlab* out) {
  Index first, last;
  for (int i = 0; i < 3; ++i) {
    first[i] = out->start[i] / out->chunk[i];
    last[i] = (out->start[i] + out->count[i] - 1) / out->chunk[i];
  }
  for (int64_t a = first[0]; a <= last[0]; ++a) {
    for (int64_t b = first[1]; b <= last[1]; ++b) {
      for (int64_t c = first[2]; c <= last[2]; ++c) {
        out->chunks.emplace_back();
        const Index origin = {a * out->chunk[0], b * out->chunk[1], c * out->chunk[2]};
        if (Status s = fetch_chunk(d, origin, &out->chunks.back()); !s) return s;
      }
    }
  }
  return Status::ok();
}

Status fetch(const SlabFile& file, const std::string& path, const Slab& slab, StoredSlab* out) {
  const Hdf5Lock lock;
  if (const auto known = file.arrays.find(path); known != file.arrays.end()) {
    const ContiguousArray& array = known->second;
    if (Status s = check_slab(slab, array.shape, array.element_bytes); !s) return s;
    find_run(array, slab, out);
    if (out->run_offset >= 0) return Status::ok();
  }
  Result<Dataset> d = open_dataset(file.id, path);
  if (!d) return d.status();
  if (Status s = check_slab(slab, d->shape, d->element_bytes); !s) return s;
  out->element_bytes = d->element_bytes;
  if (d->chunk.empty()) {
    if (Status s = check_complete(*d); !s) return s;
    ContiguousArray array;
    if (locate(file, *d, &array)) {
      find_run(array, slab, out);
      file.arrays.emplace(path, std::move(array));
      if (out->run_offset >= 0) return Status::ok();
    }
    return fetch_contiguous(*d, slab, out->whole);
  }
  out->start = padded(slab.start, 0);
  out->count = padded(slab.count, 1);
  out->chunk = padded(d->chunk, 1);
  out->pipeline = d->pipeline;
  return fetch_chunks(*d, out);
}

// Copies what a decoded chunk and the slab have in common.
void place(const StoredSlab& slab, const StoredChunk& chunk, uint8_t* out) {
  Index low, high;
  for (int i = 0; i < 3; ++i) {
    low[i] = std::max(slab.start[i], chunk.origin[i]);
    high[i] = std::min(slab.start[i] + slab.count[i], chunk.origin[i] + slab.chunk[i]);
  }
  const int64_t run = (high[2] - low[2]) * slab.element_bytes;
  for (int64_t a = low[0]; a < high[0]; ++a) {
    for (int64_t b = low[1]; b < high[1]; ++b) {
      const int64_t from =
          ((a - chunk.origin[0]) * slab.chunk[1] + b - chunk.origin[1]) * slab.chunk[2] + low[2] -
          chunk.origin[2];
      const int64_t to = ((a - slab.start[0]) * slab.count[1] + b - slab.start[1]) * slab.count[2] +
                         low[2] - slab.start[2];
      std::memcpy(out + to * slab.element_bytes, chunk.bytes.data() + from * slab.element_bytes,
                  run);
    }
  }
}

Status assemble(StoredSlab& stored, LargeBytes* bytes) {
  if (stored.chunks.empty()) return Status::ok();
  bytes->resize(stored.count[0] * stored.count[1] * stored.count[2] * stored.element_bytes);
  for (StoredChunk& chunk : stored.chunks) {
    if (Status s = decode_chunk(stored.pipeline, chunk.skipped, &chunk.bytes); !s) return s;
    place(stored, chunk, bytes->data());
    chunk.bytes = {};
  }
  return Status::ok();
}

template <class T>
Status read_converted(const SlabFile& file, const std::string& path, const Slab& slab,
                      hid_t memory_type, std::vector<T>* out) {
  LargeBytes bytes;
  if (Status s = read_slab(file, path, slab, &bytes); !s) return s;
  const Hdf5Lock lock;
  Result<Dataset> d = open_dataset(file.id, path);
  if (!d) return d.status().with_context(path);
  // H5Tconvert works in place, so the buffer must hold the wider of both types.
  const size_t n = bytes.size() / d->element_bytes;
  bytes.resize(n * std::max<size_t>(sizeof(T), d->element_bytes));
  if (H5Tconvert(d->type.id(), memory_type, n, bytes.data(), nullptr, H5P_DEFAULT) < 0) {
    return corrupt(path + ": has a type that cannot be converted");
  }
  out->resize(n);
  std::memcpy(out->data(), bytes.data(), n * sizeof(T));
  return Status::ok();
}

}  // namespace

int64_t Slab::elements() const {
  int64_t n = 1;
  for (const int64_t c : count) n *= c;
  return n;
}

SlabFile::SlabFile(hid_t file) : id(file) {
  const Hdf5Lock lock;
  const Handle access(H5Fget_access_plist(file)), creation(H5Fget_create_plist(file));
  hsize_t user_block = 1;
  void* handle = nullptr;
  unsigned intent = H5F_ACC_RDWR;
  // What HDF5 may still write it holds back from the file.
  if (H5Fget_intent(file, &intent) < 0 || intent != H5F_ACC_RDONLY) return;
  if (access.ok() && creation.ok() && H5Pget_driver(access.id()) == H5FD_SEC2 &&
      H5Pget_userblock(creation.id(), &user_block) >= 0 && user_block == 0 &&
      H5Fget_vfd_handle(file, access.id(), &handle) >= 0 && handle != nullptr) {
    descriptor = *static_cast<int*>(handle);
  }
}

Status read_slab(const SlabFile& file, const std::string& path, const Slab& slab,
                 LargeBytes* bytes) {
  StoredSlab stored;
  stored.whole = bytes;
  if (Status s = fetch(file, path, slab, &stored); !s) return s.with_context(path);
  if (stored.run_offset >= 0) {
    return read_run(file.descriptor, stored.run_offset, stored.run_bytes, bytes).with_context(path);
  }
  return assemble(stored, bytes).with_context(path);
}

Status read_slab_as(const SlabFile& file, const std::string& path, const Slab& slab,
                    std::vector<float>* out) {
  return read_converted(file, path, slab, H5T_NATIVE_FLOAT, out);
}

Status read_slab_as(const SlabFile& file, const std::string& path, const Slab& slab,
                    std::vector<double>* out) {
  return read_converted(file, path, slab, H5T_NATIVE_DOUBLE, out);
}

Status read_slab_as(const SlabFile& file, const std::string& path, const Slab& slab,
                    std::vector<int64_t>* out) {
  return read_converted(file, path, slab, H5T_NATIVE_INT64, out);
}

}  // namespace tierkv::datasets
