// SPDX-License-Identifier: Apache-2.0
// HDF5 files whose attributes, shapes, types, filters, chunks and links are drawn from a fuzz
// target's input.
#pragma once

#include <hdf5.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "datasets/hdf5/hdf5_dataset.h"
#include "tests/datasets/zstd_filter.h"
#include "tests/fuzz/fuzz_input.h"

namespace tierkv::datasets {

using fuzz::Input;

// The valid value most of the time, else one that is close, extreme or anything.
inline int64_t vary(Input& in, int64_t valid) {
  if (!in.one_in(16)) return valid;
  switch (in.byte() % 6) {
    case 0:
      return valid + 1;
    case 1:
      return valid - 1;
    case 2:
      return 0;
    case 3:
      return -valid;
    case 4:
      return int64_t{1} << in.byte() % 63;
    default:
      return static_cast<int64_t>(in.word());
  }
}

inline void attribute_int(Input& in, hid_t object, const char* name, int64_t valid) {
  if (in.one_in(32)) return;
  if (in.one_in(32)) {
    write_string_attribute(object, name, std::to_string(valid));
  } else {
    write_int_attribute(object, name, vary(in, valid));
  }
}

inline void attribute_double(Input& in, hid_t object, const char* name, double valid) {
  if (in.one_in(32)) return;
  if (in.one_in(16)) {
    const uint64_t bits = in.word();
    std::memcpy(&valid, &bits, sizeof(valid));
  }
  write_double_attribute(object, name, valid);
}

inline void attribute_string(Input& in, hid_t object, const char* name, std::string valid) {
  if (in.one_in(32)) return;
  if (in.one_in(16)) {
    valid.resize(in.byte());
    for (char& c : valid) c = static_cast<char>(in.byte());
  }
  if (!in.one_in(4)) {
    write_string_attribute(object, name, valid);
    return;
  }
  const Handle type(H5Tcopy(H5T_C_S1)), space(H5Screate(H5S_SCALAR));
  H5Tset_size(type.id(), H5T_VARIABLE);
  const Handle a(H5Acreate2(object, name, type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT));
  const char* text = valid.c_str();
  if (a.ok()) H5Awrite(a.id(), type.id(), &text);
}

inline Handle draw_type(Input& in, hid_t valid) {
  if (!in.one_in(16)) return Handle(H5Tcopy(valid));
  const hid_t types[] = {H5T_IEEE_F32LE, H5T_IEEE_F64LE, H5T_IEEE_F32BE, H5T_STD_I8LE,
                         H5T_STD_I16BE,  H5T_STD_U64LE,  H5T_C_S1,       H5T_STD_REF_OBJ};
  const uint8_t choice = in.byte() % 10;
  if (choice < 8) return Handle(H5Tcopy(types[choice]));
  return hdf5_type(choice == 8 ? DType::kBFloat16 : DType::kFloat16);
}

// Chunks and filters, or contiguous.
inline Handle draw_storage(Input& in, const std::vector<hsize_t>& dims) {
  Handle plist(H5Pcreate(H5P_DATASET_CREATE));
  if (in.one_in(2)) return plist;
  std::vector<hsize_t> chunk;
  for (const hsize_t n : dims) chunk.push_back(1 + in.byte() % std::max<hsize_t>(1, n));
  H5Pset_chunk(plist.id(), static_cast<int>(chunk.size()), chunk.data());
  for (int i = in.byte() % 4; i > 0; --i) {
    const unsigned level = in.byte() % 4;
    switch (in.byte() % 5) {
      case 0:
        H5Pset_deflate(plist.id(), level);
        break;
      case 1:
        H5Pset_shuffle(plist.id());
        break;
      case 2:
        H5Pset_fletcher32(plist.id());
        break;
      case 3:
        register_zstd_filter();
        H5Pset_filter(plist.id(), kZstdFilterId, 0, 1, &level);
        break;
      default:
        H5Pset_scaleoffset(plist.id(), H5Z_SO_INT, 0);
    }
  }
  return plist;
}

// Fills a dataset with first, first + 1, ..., or leaves it unwritten, or stores one chunk of
// arbitrary bytes.
inline void fill(Input& in, const Handle& d, size_t elements, int first) {
  if (in.one_in(32)) return;
  std::vector<double> x(elements);
  for (size_t i = 0; i < elements; ++i) x[i] = static_cast<double>(i) + first;
  if (in.one_in(16) && elements > 0) x[in.byte() % elements] = in.one_in(2) ? NAN : -1e30;
  H5Dwrite(d.id(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data());
  if (!in.one_in(8) || elements == 0) return;  // HDF5 1.10 crashes on a chunk of nothing
  std::vector<uint8_t> stored(1 + in.byte());
  for (uint8_t& b : stored) b = in.byte();
  const hsize_t origin[4] = {0, 0, 0, 0};
  // Without filters a chunk has the room of its shape: more would lie over what follows it.
  const Handle plist(H5Dget_create_plist(d.id()));
  hsize_t room = 0;
  if (H5Pget_nfilters(plist.id()) == 0 && H5Dget_chunk_storage_size(d.id(), origin, &room) >= 0 &&
      room < stored.size()) {
    stored.resize(room);
  }
  if (stored.empty()) return;
  H5Dwrite_chunk(d.id(), H5P_DEFAULT, in.byte(), origin, stored.size(), stored.data());
}

inline void dataset(Input& in, hid_t group, const char* name, hid_t type, std::vector<hsize_t> dims,
                    int first = 0) {
  if (in.one_in(32)) return;
  if (in.one_in(32)) {
    H5Lcreate_soft("/seq", group, name, H5P_DEFAULT, H5P_DEFAULT);
    return;
  }
  if (in.one_in(32)) {
    H5Lcreate_external("other.h5", "/seq", group, name, H5P_DEFAULT, H5P_DEFAULT);
    return;
  }
  if (in.one_in(32)) {
    const Handle g = create_group(group, name);
    return;
  }
  // At most a few thousand elements are written; larger extents stay unwritten.
  if (in.one_in(16)) dims.push_back(1 + in.byte() % 3);
  if (in.one_in(16)) dims.pop_back();
  size_t elements = 1;
  for (hsize_t& n : dims) {
    n = static_cast<hsize_t>(vary(in, static_cast<int64_t>(n)) & 0x7fffffffffff);
    elements = n > 4096 || elements > 4096 ? 4097 : elements * n;
  }
  const Handle space(dims.empty()
                         ? H5Screate(H5S_SCALAR)
                         : H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  if (!space.ok()) return;
  const Handle plist = draw_storage(in, dims), stored = draw_type(in, type);
  const Handle d(
      H5Dcreate2(group, name, stored.id(), space.id(), H5P_DEFAULT, plist.id(), H5P_DEFAULT));
  if (d.ok() && elements <= 4096) fill(in, d, elements, first);
}

}  // namespace tierkv::datasets
