#include "datasets/hdf5_util.h"

#include <string.h>

#include <algorithm>

#include "datasets/zstd_filter.h"

namespace tierkv::datasets {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 40;
constexpr int64_t kMaxString = 1 << 16;

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

bool known_filter(H5Z_filter_t filter) {
  return filter == H5Z_FILTER_DEFLATE || filter == H5Z_FILTER_SHUFFLE ||
         filter == H5Z_FILTER_FLETCHER32 || filter == kZstdFilterId;
}

Status check_storage(hid_t dataset) {
  const Handle plist(H5Dget_create_plist(dataset));
  if (!plist.ok()) return corrupt("creation properties cannot be read");
  if (H5Pget_layout(plist.id()) == H5D_VIRTUAL) {
    return Status(StatusCode::kUnsupported, "virtual datasets are refused");
  }
  if (H5Pget_external_count(plist.id()) != 0) {
    return Status(StatusCode::kUnsupported, "external storage is refused");
  }
  const int filters = H5Pget_nfilters(plist.id());
  for (int i = 0; i < filters; ++i) {
    unsigned flags = 0, config = 0;
    size_t count = 0;
    char name[64] = {0};
    const H5Z_filter_t f =
        H5Pget_filter2(plist.id(), i, &flags, &count, nullptr, sizeof(name), name, &config);
    if (!known_filter(f)) {
      return Status(StatusCode::kUnsupported,
                    "filter " + std::to_string(f) +
                        " is not known (gzip, shuffle, fletcher32 and zstd 32015 are)");
    }
  }
  return Status::ok();
}

// Every component of the path must be a hard link, so that nothing outside the file is opened.
Status check_links(hid_t file, const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string part = path.substr(0, slash);
    H5L_info_t info;
    if (H5Lget_info(file, part.c_str(), &info, H5P_DEFAULT) < 0) {
      return Status(StatusCode::kNotFound, "is missing");
    }
    if (info.type != H5L_TYPE_HARD) {
      return Status(StatusCode::kUnsupported, "soft and external links are refused");
    }
    if (slash == std::string::npos) return Status::ok();
  }
}

Handle open_attribute(hid_t object, const char* name) {
  if (H5Aexists(object, name) <= 0) return Handle();
  return Handle(H5Aopen(object, name, H5P_DEFAULT));
}

// The attribute's type class where it is a scalar of that class.
Status check_scalar(const Handle& attribute, const char* name, H5T_class_t wanted,
                    const char* what) {
  if (!attribute.ok())
    return Status(StatusCode::kNotFound, "attribute '" + std::string(name) + "' is missing");
  const Handle type(H5Aget_type(attribute.id())), space(H5Aget_space(attribute.id()));
  if (!type.ok() || !space.ok() || H5Sget_simple_extent_npoints(space.id()) != 1 ||
      H5Tget_class(type.id()) != wanted) {
    return corrupt("attribute '" + std::string(name) + "' is not " + what);
  }
  return Status::ok();
}

}  // namespace

std::recursive_mutex& hdf5_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

Hdf5Lock::Hdf5Lock() : lock_(hdf5_mutex()) {
  static const bool ready = [] {
    H5open();
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
    return register_zstd_filter();
  }();
  (void)ready;
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // the setting is per thread in thread-safe builds
}

bool Handle::close() {
  if (id_ < 0) return true;
  const hid_t id = id_;
  id_ = -1;
  const Hdf5Lock lock;
  switch (H5Iget_type(id)) {
    case H5I_FILE:
      return H5Fclose(id) >= 0;
    case H5I_GROUP:
      return H5Gclose(id) >= 0;
    case H5I_DATATYPE:
      return H5Tclose(id) >= 0;
    case H5I_DATASPACE:
      return H5Sclose(id) >= 0;
    case H5I_DATASET:
      return H5Dclose(id) >= 0;
    case H5I_ATTR:
      return H5Aclose(id) >= 0;
    case H5I_GENPROP_LST:
      return H5Pclose(id) >= 0;
    default:
      return false;
  }
}

Handle hdf5_type(DType t) {
  if (t == DType::kFloat32) return Handle(H5Tcopy(H5T_IEEE_F32LE));
  Handle type(H5Tcopy(H5T_IEEE_F32LE));
  const bool half = t == DType::kFloat16;
  // Fields first, then the size: HDF5 refuses to shrink a type below its fields.
  const size_t exponent_bits = half ? 5 : 8, mantissa_bits = half ? 10 : 7;
  H5Tset_fields(type.id(), 15, mantissa_bits, exponent_bits, 0, mantissa_bits);
  H5Tset_precision(type.id(), 16);
  H5Tset_ebias(type.id(), half ? 15 : 127);
  H5Tset_size(type.id(), 2);
  return type;
}

std::optional<DType> dtype_of(hid_t type) {
  for (const DType t : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const Handle expected = hdf5_type(t);
    if (H5Tequal(type, expected.id()) > 0) return t;
  }
  return std::nullopt;
}

Result<Dataset> open_dataset(hid_t file, const std::string& path) {
  if (Status s = check_links(file, path); !s) return s;
  H5O_info_t object;
  if (H5Oget_info_by_name1(file, path.c_str(), &object, H5P_DEFAULT) < 0)
    return corrupt("cannot be opened");
  if (object.type != H5O_TYPE_DATASET) return corrupt("is not a dataset");
  Dataset d;
  d.handle = Handle(H5Dopen2(file, path.c_str(), H5P_DEFAULT));
  if (!d.handle.ok()) return corrupt("cannot be opened");
  if (Status s = check_storage(d.handle.id()); !s) return s;
  const Handle space(H5Dget_space(d.handle.id()));
  d.type = Handle(H5Dget_type(d.handle.id()));
  if (!space.ok() || !d.type.ok() || H5Sget_simple_extent_type(space.id()) != H5S_SIMPLE) {
    return corrupt("is not an array");
  }
  const int rank = H5Sget_simple_extent_ndims(space.id());
  if (rank < 1 || rank > 4) return corrupt("has rank " + std::to_string(rank));
  std::vector<hsize_t> dims(rank);
  H5Sget_simple_extent_dims(space.id(), dims.data(), nullptr);
  int64_t elements = 1;
  for (const hsize_t n : dims) {
    if (n > static_cast<hsize_t>(kMaxElements) ||
        (n > 0 && elements > kMaxElements / static_cast<int64_t>(n))) {
      return corrupt("is absurdly large");
    }
    elements *= static_cast<int64_t>(n);
    d.shape.push_back(static_cast<int64_t>(n));
  }
  return d;
}

Result<int64_t> read_int_attribute(hid_t object, const char* name) {
  const Handle a = open_attribute(object, name);
  if (Status s = check_scalar(a, name, H5T_INTEGER, "an integer"); !s) return s;
  int64_t value = 0;
  if (H5Aread(a.id(), H5T_NATIVE_INT64, &value) < 0)
    return corrupt("attribute '" + std::string(name) + "' cannot be read");
  return value;
}

Result<double> read_double_attribute(hid_t object, const char* name) {
  const Handle a = open_attribute(object, name);
  if (Status s = check_scalar(a, name, H5T_FLOAT, "a number"); !s) return s;
  double value = 0;
  if (H5Aread(a.id(), H5T_NATIVE_DOUBLE, &value) < 0)
    return corrupt("attribute '" + std::string(name) + "' cannot be read");
  return value;
}

Result<std::string> read_string_attribute(hid_t object, const char* name) {
  const Handle a = open_attribute(object, name);
  if (Status s = check_scalar(a, name, H5T_STRING, "a string"); !s) return s;
  const Handle type(H5Aget_type(a.id()));
  const std::string unreadable = "attribute '" + std::string(name) + "' cannot be read";
  if (H5Tis_variable_str(type.id()) > 0) {
    char* text = nullptr;
    const Handle memory(H5Tcopy(H5T_C_S1));
    H5Tset_size(memory.id(), H5T_VARIABLE);
    H5Tset_cset(memory.id(), H5Tget_cset(type.id()));
    if (H5Aread(a.id(), memory.id(), &text) < 0) return corrupt(unreadable);
    const std::string value = text == nullptr ? "" : std::string(text, strnlen(text, kMaxString));
    H5free_memory(text);
    return value;
  }
  const size_t size = H5Tget_size(type.id());
  if (size == 0 || size > kMaxString)
    return corrupt("attribute '" + std::string(name) + "' is absurdly long");
  std::string value(size, '\0');
  if (H5Aread(a.id(), type.id(), value.data()) < 0) return corrupt(unreadable);
  value.resize(std::min(value.find('\0'), value.size()));
  return value;
}

static bool write_attribute(hid_t object, const char* name, hid_t type, const void* value) {
  const Handle space(H5Screate(H5S_SCALAR));
  const Handle a(H5Acreate2(object, name, type, space.id(), H5P_DEFAULT, H5P_DEFAULT));
  return a.ok() && H5Awrite(a.id(), type, value) >= 0;
}

bool write_int_attribute(hid_t object, const char* name, int64_t value) {
  return write_attribute(object, name, H5T_NATIVE_INT64, &value);
}
bool write_double_attribute(hid_t object, const char* name, double value) {
  return write_attribute(object, name, H5T_NATIVE_DOUBLE, &value);
}
bool write_string_attribute(hid_t object, const char* name, const std::string& value) {
  const Handle type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.id(), std::max<size_t>(1, value.size()));
  return write_attribute(object, name, type.id(), value.data());
}

Result<std::vector<std::string>> list_group(hid_t file, const std::string& path) {
  if (Status s = check_links(file, path); !s) return s;
  const Handle group(H5Gopen2(file, path.c_str(), H5P_DEFAULT));
  if (!group.ok()) return corrupt("is not a group");
  H5G_info_t info;
  if (H5Gget_info(group.id(), &info) < 0) return corrupt("cannot be listed");
  if (info.nlinks > 100000) return corrupt("has more than 100000 members");
  std::vector<std::string> names;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    H5L_info_t link;
    char name[512];
    const ssize_t n = H5Lget_name_by_idx(group.id(), ".", H5_INDEX_NAME, H5_ITER_INC, i, name,
                                         sizeof(name), H5P_DEFAULT);
    if (n <= 0 || n >= static_cast<ssize_t>(sizeof(name)) ||
        H5Lget_info_by_idx(group.id(), ".", H5_INDEX_NAME, H5_ITER_INC, i, &link, H5P_DEFAULT) <
            0) {
      return corrupt("has an unreadable member");
    }
    if (link.type != H5L_TYPE_HARD) {
      return Status(StatusCode::kUnsupported,
                    "member '" + std::string(name) + "': soft and external links are refused");
    }
    names.emplace_back(name);
  }
  return names;
}

Handle create_dataset(hid_t group, const char* name, hid_t type, const std::vector<int64_t>& shape,
                      const std::vector<int64_t>& chunk) {
  const std::vector<hsize_t> dims(shape.begin(), shape.end()),
      chunk_dims(chunk.begin(), chunk.end());
  const Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  const Handle plist(H5Pcreate(H5P_DATASET_CREATE));
  if (!chunk.empty()) {
    H5Pset_chunk(plist.id(), static_cast<int>(chunk_dims.size()), chunk_dims.data());
    H5Pset_shuffle(plist.id());
    H5Pset_deflate(plist.id(), 4);
  }
  return Handle(H5Dcreate2(group, name, type, space.id(), H5P_DEFAULT, plist.id(), H5P_DEFAULT));
}

}  // namespace tierkv::datasets
