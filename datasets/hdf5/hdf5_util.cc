// SPDX-License-Identifier: Apache-2.0
#include "datasets/hdf5/hdf5_util.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>

#include "datasets/dump.h"

namespace tierkv::datasets {
namespace {

constexpr int64_t kMaxString = 1 << 16;

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

std::string attribute_text(const char* name) {
  return "attribute '" + std::string(name) + "'";
}

Handle open_attribute(hid_t object, const char* name) {
  if (H5Aexists(object, name) <= 0) return Handle();
  return Handle(H5Aopen(object, name, H5P_DEFAULT));
}

// The type class of a scalar attribute.
Result<H5T_class_t> scalar_class(const Handle& attribute, const char* name) {
  if (!attribute.ok()) return Status(StatusCode::kNotFound, attribute_text(name) + " is missing");
  const Handle type(H5Aget_type(attribute.id())), space(H5Aget_space(attribute.id()));
  if (!type.ok() || !space.ok() || H5Sget_simple_extent_npoints(space.id()) != 1) {
    return corrupt(attribute_text(name) + " is not one value");
  }
  return H5Tget_class(type.id());
}

// Bytes of the longest scalar integer or float that is converted.
constexpr size_t kMaxScalarBytes = 16;

// An enumeration's integer: HDF5 does not convert enumerations to integers, their base type it
// does.
Result<int64_t> read_enum(const Handle& attribute, const char* name) {
  const Handle type(H5Aget_type(attribute.id())), base(H5Tget_super(type.id()));
  alignas(8) char buffer[kMaxScalarBytes] = {0};
  if (!base.ok() || H5Tget_class(base.id()) != H5T_INTEGER || H5Tget_size(type.id()) > 8 ||
      H5Aread(attribute.id(), type.id(), buffer) < 0 ||
      H5Tconvert(base.id(), H5T_NATIVE_INT64, 1, buffer, nullptr, H5P_DEFAULT) < 0) {
    return corrupt(attribute_text(name) + " cannot be read");
  }
  int64_t value = 0;
  std::memcpy(&value, buffer, sizeof(value));
  return value;
}

}  // namespace

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

std::recursive_mutex& hdf5_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

namespace {

thread_local std::string last_write_error;

// HDF5 puts what the system said into its own text: "... error message = 'No space left', ...".
extern "C" herr_t note_system_error(unsigned, const H5E_error2_t* error, void*) {
  constexpr std::string_view kBefore = "error message = '";
  const std::string_view text = error->desc == nullptr ? "" : error->desc;
  const size_t at = text.find(kBefore);
  if (at == std::string_view::npos) return 0;
  const std::string_view rest = text.substr(at + kBefore.size());
  last_write_error = ": " + std::string(rest.substr(0, rest.find('\'')));
  return 1;
}

extern "C" herr_t note_error(hid_t stack, void*) {
  return H5Ewalk2(stack, H5E_WALK_UPWARD, note_system_error, nullptr);
}

}  // namespace

std::string write_error() {
  return last_write_error;
}
void forget_write_error() {
  last_write_error.clear();
}

Hdf5Lock::Hdf5Lock() : lock_(hdf5_mutex()) {
  H5Eget_auto2(H5E_DEFAULT, &printer_, &printer_data_);
  H5Eset_auto2(H5E_DEFAULT, note_error, nullptr);
}

Hdf5Lock::~Hdf5Lock() {
  H5Eset_auto2(H5E_DEFAULT, printer_, printer_data_);
}

std::string printable(const std::string& text) {
  constexpr size_t kMaxBytes = 100;
  std::string out = text.substr(0, kMaxBytes);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return text.size() > kMaxBytes ? out + "..." : out;
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
  if (H5Tget_class(type) != H5T_FLOAT || H5Tget_order(type) != H5T_ORDER_LE) return std::nullopt;
  size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
  if (H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0 ||
      mantissa != 0 || exponent != mantissa_bits || sign != exponent + exponent_bits ||
      H5Tget_offset(type) != 0 || H5Tget_norm(type) != H5T_NORM_IMPLIED) {
    return std::nullopt;
  }
  const size_t size = H5Tget_size(type), bias = H5Tget_ebias(type);
  const auto is = [&](size_t bytes, size_t e, size_t m, size_t b) {
    return size == bytes && exponent_bits == e && mantissa_bits == m && bias == b;
  };
  if (is(2, 5, 10, 15)) return DType::kFloat16;
  if (is(2, 8, 7, 127)) return DType::kBFloat16;
  if (is(4, 8, 23, 127)) return DType::kFloat32;
  return std::nullopt;
}

Handle create_file(const std::string& path) {
  const Handle access(H5Pcreate(H5P_FILE_ACCESS)), creation(H5Pcreate(H5P_FILE_CREATE));
  H5Pset_libver_bounds(access.id(), H5F_LIBVER_V110, H5F_LIBVER_V110);
  H5Pset_obj_track_times(creation.id(), false);
  return Handle(H5Fcreate(path.c_str(), H5F_ACC_EXCL, creation.id(), access.id()));
}

void discard_writes(hid_t object) {
  const Handle file(H5Iget_file_id(object));
  const Handle access(H5Fget_access_plist(file.id()));
  void* descriptor = nullptr;
  if (!access.ok() || H5Pget_driver(access.id()) != H5FD_SEC2 ||
      H5Fget_vfd_handle(file.id(), access.id(), &descriptor) < 0 || descriptor == nullptr) {
    return;
  }
  const int memory = memfd_create("discarded", MFD_CLOEXEC);
  if (memory < 0) return;
  dup2(memory, *static_cast<int*>(descriptor));
  close(memory);
}

bool flushed(const Handle& dataset, bool written) {
  if (written && H5Dflush(dataset.id()) >= 0) return true;
  if (dataset.ok()) discard_writes(dataset.id());
  return false;
}

namespace {

// Names the command that makes a kv-dump of the file, where there is one.
Status not_hdf5(const std::string& path) {
  char begin[9] = {};
  std::ifstream(path, std::ios::binary).read(begin, sizeof(begin));
  std::string what = kNotHdf5;
  if (std::memcmp(begin, "\x89TKV", 4) == 0) {
    what += ": it is a container, tierkv decompress makes a kv-dump of it";
  } else if (begin[8] == '{') {
    what += ": if it is safetensors, tierkv convert makes a kv-dump of it";
  }
  return corrupt(what);
}

}  // namespace

Result<Handle> open_file(const std::string& path) {
  // Anything but a regular file could block or never end.
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return Status(StatusCode::kIo, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return Status(StatusCode::kIo, "is not a regular file");
  if (info.st_size == 0) return corrupt("is empty");
  if (access(path.c_str(), R_OK) != 0) return Status(StatusCode::kIo, std::strerror(errno));
  if (H5Fis_hdf5(path.c_str()) <= 0) return not_hdf5(path);
  Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  if (!file.ok()) return corrupt("cannot be opened as HDF5 (truncated or damaged)");
  return file;
}

Result<Handle> open_image(const void* bytes, size_t size) {
  const Handle access(H5Pcreate(H5P_FILE_ACCESS));
  if (H5Pset_fapl_core(access.id(), 1 << 16, false) < 0 ||
      H5Pset_file_image(access.id(), const_cast<void*>(bytes), size) < 0) {
    return Status(StatusCode::kInvalidArgument, "is not a file image");
  }
  // HDF5 refuses an image under the name of a file that exists, so it gets a name that no file can
  // have.
  Handle file(H5Fopen("/dev/null/image", H5F_ACC_RDONLY, access.id()));
  if (!file.ok()) return corrupt("cannot be opened as HDF5 (truncated or damaged)");
  return file;
}

Result<int64_t> read_int_attribute(hid_t object, const char* name) {
  const Handle a = open_attribute(object, name);
  const Result<H5T_class_t> type = scalar_class(a, name);
  if (!type) return type.status();
  if (*type == H5T_ENUM) return read_enum(a, name);
  if (*type != H5T_INTEGER) return corrupt(attribute_text(name) + " is not an integer");
  int64_t value = 0;
  if (H5Aread(a.id(), H5T_NATIVE_INT64, &value) < 0)
    return corrupt(attribute_text(name) + " cannot be read");
  return value;
}

Result<double> read_double_attribute(hid_t object, const char* name) {
  const Handle a = open_attribute(object, name);
  const Result<H5T_class_t> type = scalar_class(a, name);
  if (!type) return type.status();
  if (*type != H5T_FLOAT && *type != H5T_INTEGER) {
    return corrupt(attribute_text(name) + " is not a number");
  }
  double value = 0;
  if (H5Aread(a.id(), H5T_NATIVE_DOUBLE, &value) < 0)
    return corrupt(attribute_text(name) + " cannot be read");
  return value;
}

Result<std::string> read_string_attribute(hid_t object, const char* name) {
  const Handle a = open_attribute(object, name);
  const Result<H5T_class_t> type_class = scalar_class(a, name);
  if (!type_class) return type_class.status();
  if (*type_class != H5T_STRING) return corrupt(attribute_text(name) + " is not a string");
  const Handle type(H5Aget_type(a.id()));
  const std::string unreadable = attribute_text(name) + " cannot be read";
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
    return corrupt(attribute_text(name) + " is longer than " + std::to_string(kMaxString) +
                   " bytes");
  std::string value(size, '\0');
  if (H5Aread(a.id(), type.id(), value.data()) < 0) return corrupt(unreadable);
  value.resize(std::min(value.find('\0'), value.size()));
  return value;
}

Status check_text(const char* name, const std::string& value) {
  if (value.size() <= kMaxString) return Status::ok();
  return Status(StatusCode::kInvalidArgument,
                std::string(name) + " has " + std::to_string(value.size()) +
                    " bytes (expected at most " + std::to_string(kMaxString) + ")");
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
  H5Tset_strpad(type.id(), H5T_STR_NULLPAD);
  H5Tset_cset(type.id(), H5T_CSET_UTF8);
  return write_attribute(object, name, type.id(), value.c_str());
}

namespace {

constexpr size_t kMaxMembers = 100000;

struct Listing {
  std::vector<std::string> names;
  Status status;
};

extern "C" herr_t visit_link(hid_t, const char* name, const H5L_info_t* link, void* data) {
  auto* listing = static_cast<Listing*>(data);
  const std::string text(name, strnlen(name, 512));
  if (link->type != H5L_TYPE_HARD) {
    listing->status =
        Status(StatusCode::kUnsupported,
               "member '" + printable(text) + "': soft and external links are refused");
  } else if (text != printable(text) || text.find('/') != std::string::npos) {
    listing->status = corrupt("member '" + printable(text) +
                              "': has a name of more than 100 bytes or with control characters");
  } else if (listing->names.size() == kMaxMembers) {
    listing->status = corrupt("has more than " + std::to_string(kMaxMembers) + " members");
  }
  if (!listing->status) return 1;
  listing->names.push_back(text);
  return 0;
}

}  // namespace

Result<std::vector<std::string>> list_group(hid_t file, const std::string& path) {
  if (Status s = check_links(file, path); !s) return s;
  const Handle group(H5Gopen2(file, path.c_str(), H5P_DEFAULT));
  if (!group.ok()) return corrupt("is not a group");
  Listing listing;
  hsize_t next = 0;
  if (H5Literate(group.id(), H5_INDEX_NAME, H5_ITER_INC, &next, visit_link, &listing) < 0) {
    return corrupt("cannot be listed");
  }
  if (!listing.status) return listing.status;
  return std::move(listing.names);
}

}  // namespace tierkv::datasets
