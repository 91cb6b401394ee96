// SPDX-License-Identifier: Apache-2.0
// Small RAII wrappers over the HDF5 C API. Every call is made under hdf5_mutex(), because Debian's
// HDF5 is not thread-safe, and with HDF5's own error printing off: callers build their own
// messages.
//
// HDF5 is not hardened against malicious files. What can be checked is checked (sizes, types,
// filters, links) before anything is read; files from strangers belong in a sandbox all the same.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "datasets/printable.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv::datasets {

std::recursive_mutex& hdf5_mutex();

// Locks the library and notes HDF5's errors for write_error() instead of printing them until the
// lock ends.
class Hdf5Lock {
 public:
  Hdf5Lock();
  ~Hdf5Lock();
  Hdf5Lock(const Hdf5Lock&) = delete;
  Hdf5Lock& operator=(const Hdf5Lock&) = delete;

 private:
  std::lock_guard<std::recursive_mutex> lock_;
  H5E_auto2_t printer_ = nullptr;  // the caller's, put back at the end
  void* printer_data_ = nullptr;
};

// ": No space left on device" or the like: what the system last refused HDF5 in this thread, since
// forget_write_error(). Empty where it refused nothing.
std::string write_error();
void forget_write_error();

// Any HDF5 identifier; closed by reference count.
class Handle {
 public:
  Handle() = default;
  explicit Handle(hid_t id) : id_(id) {}
  Handle(Handle&& other) noexcept : id_(other.id_) { other.id_ = -1; }
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { close(); }

  hid_t id() const { return id_; }
  bool ok() const { return id_ >= 0; }
  // False when HDF5 could not close it, which for a file means that not everything was written.
  bool close();

 private:
  hid_t id_ = -1;
};

// A new file, refused where one exists; in HDF5 1.10's format, which has checksums on its metadata.
Handle create_file(const std::string& path);

// What HDF5 still holds back from the file of an object that is being written goes to memory
// instead, for a file that will not be kept: after a failed write HDF5 1.10 tries again when it
// closes the file, leaves it half released when that fails too, and crashes when the process ends.
void discard_writes(hid_t object);
// Whether a dataset was `written` and all of it is in the file; else discards what is not, so that
// the dataset can be closed.
bool flushed(const Handle& dataset, bool written);

// The type a DType is stored as; bfloat16 is a custom 16-bit float (8 exponent bits, 7 mantissa
// bits).
Handle hdf5_type(DType t);
// The DType of a stored type, nullopt when it is none of the three.
std::optional<DType> dtype_of(hid_t type);

// An existing regular HDF5 file, for reading; messages do not repeat the path.
Result<Handle> open_file(const std::string& path);

// The bytes of an HDF5 file, for reading; HDF5 copies them.
Result<Handle> open_image(const void* bytes, size_t size);

// Attributes of a group or file; kNotFound, or kCorrupt for a wrong type. Booleans (h5py writes an
// enumeration) are integers, integers are also numbers.
Result<int64_t> read_int_attribute(hid_t object, const char* name);
Result<double> read_double_attribute(hid_t object, const char* name);
Result<std::string> read_string_attribute(hid_t object, const char* name);
// kInvalidArgument naming the attribute where a text is longer than read_string_attribute() reads.
Status check_text(const char* name, const std::string& value);
bool write_int_attribute(hid_t object, const char* name, int64_t value);
bool write_double_attribute(hid_t object, const char* name, double value);
// Writes UTF-8 of fixed length: texts of variable length lie in HDF5's global heap, which has no
// checksum and crashes HDF5 when damaged.
bool write_string_attribute(hid_t object, const char* name, const std::string& value);

// kOk when every component of the path is a hard link, so that nothing outside the file is opened;
// kNotFound where one is missing, kUnsupported at a soft or external link.
Status check_links(hid_t file, const std::string& path);

// Names of the members of a group in increasing order; kUnsupported when it holds a soft or
// external link, kCorrupt when a name is not printable.
Result<std::vector<std::string>> list_group(hid_t file, const std::string& path);

}  // namespace tierkv::datasets
