// SPDX-License-Identifier: Apache-2.0
#include "datasets/hdf5/hdf5_dataset.h"

namespace tierkv::datasets {

namespace {

constexpr int64_t kMaxElements = int64_t{1} << 40;
constexpr int kMaxRank = 3;

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

// Fills shape, type and element size of an opened dataset of numbers.
Status read_extent(Dataset* d) {
  const Handle space(H5Dget_space(d->handle.id()));
  d->type = Handle(H5Dget_type(d->handle.id()));
  if (!space.ok() || !d->type.ok() || H5Sget_simple_extent_type(space.id()) != H5S_SIMPLE) {
    return corrupt("is not an array");
  }
  const H5T_class_t type_class = H5Tget_class(d->type.id());
  d->element_bytes = static_cast<int64_t>(H5Tget_size(d->type.id()));
  if ((type_class != H5T_INTEGER && type_class != H5T_FLOAT) || d->element_bytes < 1 ||
      d->element_bytes > 8) {
    return corrupt("is not an array of numbers of at most 64 bits");
  }
  const int rank = H5Sget_simple_extent_ndims(space.id());
  if (rank < 1 || rank > kMaxRank) {
    return corrupt("has rank " + std::to_string(rank) + " (expected 1 to 3)");
  }
  hsize_t dims[kMaxRank] = {0};
  H5Sget_simple_extent_dims(space.id(), dims, nullptr);
  int64_t elements = 1;
  for (int i = 0; i < rank; ++i) {
    if (dims[i] > static_cast<hsize_t>(kMaxElements) ||
        (dims[i] > 0 && elements > kMaxElements / static_cast<int64_t>(dims[i]))) {
      return corrupt("is absurdly large (more than 2^40 elements)");
    }
    elements *= static_cast<int64_t>(dims[i]);
    d->shape.push_back(static_cast<int64_t>(dims[i]));
  }
  return Status::ok();
}

Status read_filters(hid_t plist, ChunkPipeline* pipeline) {
  const int filters = H5Pget_nfilters(plist);
  if (filters < 0) return corrupt("filters cannot be read");
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0;
    unsigned values[8] = {0};
    size_t count = 8;
    const H5Z_filter_t f = H5Pget_filter2(plist, i, &flags, &count, values, 0, nullptr, &config);
    if (!is_known_filter(f)) {
      return Status(StatusCode::kUnsupported,
                    "filter " + std::to_string(f) +
                        " is not known (gzip, shuffle, fletcher32 and zstd 32015 are)");
    }
    pipeline->filters.push_back(static_cast<Filter>(f));
  }
  return Status::ok();
}

// Layout and filters of a dataset whose shape and element size are known.
Status read_storage(Dataset* d) {
  const Handle plist(H5Dget_create_plist(d->handle.id()));
  if (!plist.ok()) return corrupt("creation properties cannot be read");
  const H5D_layout_t layout = H5Pget_layout(plist.id());
  if (layout == H5D_VIRTUAL) {
    return Status(StatusCode::kUnsupported, "virtual datasets are refused");
  }
  if (H5Pget_external_count(plist.id()) != 0) {
    return Status(StatusCode::kUnsupported, "external storage is refused");
  }
  if (layout != H5D_CHUNKED) {
    if (layout != H5D_CONTIGUOUS && layout != H5D_COMPACT) return corrupt("has an unknown layout");
    return Status::ok();
  }
  hsize_t dims[kMaxRank] = {0};
  const auto rank = static_cast<int>(d->shape.size());
  if (H5Pget_chunk(plist.id(), rank, dims) != rank) {
    return corrupt("chunks have another rank than the dataset");
  }
  int64_t bytes = d->element_bytes;
  for (int i = 0; i < rank; ++i) {
    if (dims[i] < 1 || dims[i] > static_cast<hsize_t>(kMaxChunkBytes / bytes)) {
      return corrupt("has chunks of more than " + std::to_string(kMaxChunkBytes) + " bytes");
    }
    d->chunk.push_back(static_cast<int64_t>(dims[i]));
    bytes *= d->chunk.back();
  }
  unsigned options = 0;
  if (H5Pget_chunk_opts(plist.id(), &options) < 0 || options != 0) {
    return Status(StatusCode::kUnsupported, "chunks with unfiltered edges are refused");
  }
  d->pipeline.chunk_bytes = bytes;
  d->pipeline.element_bytes = static_cast<int32_t>(d->element_bytes);
  return read_filters(plist.id(), &d->pipeline);
}

}  // namespace

int64_t Dataset::elements() const {
  int64_t n = 1;
  for (const int64_t s : shape) n *= s;
  return n;
}

Result<Dataset> open_dataset(hid_t file, const std::string& path) {
  if (Status s = check_links(file, path); !s) return s;
  Dataset d;
  d.handle = Handle(H5Oopen(file, path.c_str(), H5P_DEFAULT));
  if (!d.handle.ok()) return corrupt("cannot be opened");
  if (H5Iget_type(d.handle.id()) != H5I_DATASET) return corrupt("is not a dataset");
  if (Status s = read_extent(&d); !s) return s;
  if (Status s = read_storage(&d); !s) return s;
  return d;
}

Status check_complete(const Dataset& d) {
  if (d.chunk.empty()) {
    const hsize_t stored = H5Dget_storage_size(d.handle.id());
    if (stored != static_cast<hsize_t>(d.elements() * d.element_bytes)) {
      return corrupt("holds " + std::to_string(stored) + " bytes, its shape needs " +
                     std::to_string(d.elements() * d.element_bytes));
    }
    return Status::ok();
  }
  int64_t expected = 1;
  for (size_t i = 0; i < d.shape.size(); ++i)
    expected *= (d.shape[i] + d.chunk[i] - 1) / d.chunk[i];
  const Handle space(H5Dget_space(d.handle.id()));
  hsize_t chunks = 0;
  if (H5Dget_num_chunks(d.handle.id(), space.id(), &chunks) < 0) {
    return corrupt("its chunks cannot be listed");
  }
  if (chunks != static_cast<hsize_t>(expected)) {
    return corrupt("has " + std::to_string(chunks) + " chunks, its shape needs " +
                   std::to_string(expected));
  }
  return Status::ok();
}

Handle create_dataset(hid_t group, const char* name, hid_t type, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& chunk, int32_t gzip_level) {
  const std::vector<hsize_t> dims(shape.begin(), shape.end()),
      chunk_dims(chunk.begin(), chunk.end());
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  const Handle plist(H5Pcreate(H5P_DATASET_CREATE));
  H5Pset_obj_track_times(plist.id(), false);
  if (chunk.empty()) {
    H5Pset_alloc_time(plist.id(), H5D_ALLOC_TIME_EARLY);
  } else {
    H5Pset_chunk(plist.id(), static_cast<int>(chunk_dims.size()), chunk_dims.data());
    H5Pset_shuffle(plist.id());
    H5Pset_deflate(plist.id(), static_cast<unsigned>(gzip_level));
  }
  return Handle(H5Dcreate2(group, name, type, space.id(), H5P_DEFAULT, plist.id(), H5P_DEFAULT));
}

Handle create_group(hid_t parent, const char* name) {
  const Handle plist(H5Pcreate(H5P_GROUP_CREATE));
  H5Pset_obj_track_times(plist.id(), false);
  return Handle(H5Gcreate2(parent, name, H5P_DEFAULT, plist.id(), H5P_DEFAULT));
}

}  // namespace tierkv::datasets
