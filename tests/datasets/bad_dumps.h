// SPDX-License-Identifier: Apache-2.0
// A valid dump changed through the HDF5 API into one that contradicts its format; the reader must
// name the file, the object and what is wrong with it.
#pragma once

#include <hdf5.h>

#include <functional>

#include "datasets/hdf5/hdf5_dataset.h"
#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {

inline constexpr int64_t kTokens = 5;
inline constexpr char kKeys[] = "/seq/a/layer/0/k";

inline void remove(hid_t file, const char* name) {
  ASSERT_GE(H5Ldelete(file, name, H5P_DEFAULT), 0);
}

// Replaces a dataset by a contiguous one of another type or shape, filled with `fill`.
inline void replace(hid_t file, const char* name, hid_t type, const std::vector<int64_t>& shape,
                    double fill = 0.5) {
  if (H5Lexists(file, name, H5P_DEFAULT) > 0) remove(file, name);
  const Handle d = create_dataset(file, name, type, shape, {});
  ASSERT_TRUE(d.ok());
  int64_t n = 1;
  for (const int64_t s : shape) n *= s;
  const std::vector<double> x(n, fill);
  if (n > 0) {
    ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data()), 0);
  }
}

inline void replace_f16(hid_t file, const char* name, const std::vector<int64_t>& shape,
                        double fill = 0.5) {
  replace(file, name, hdf5_type(DType::kFloat16).id(), shape, fill);
}

inline void write_integers(hid_t file, const char* name, const std::vector<int64_t>& values) {
  remove(file, name);
  const Handle d =
      create_dataset(file, name, H5T_STD_I64LE, {static_cast<int64_t>(values.size())}, {});
  ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()), 0);
}

inline void drop_attribute(hid_t file, const char* name) {
  ASSERT_GE(H5Adelete(file, name), 0);
}
inline void set_int(hid_t file, const char* name, int64_t value) {
  drop_attribute(file, name);
  ASSERT_TRUE(write_int_attribute(file, name, value));
}
inline void set_double(hid_t file, const char* name, double value) {
  drop_attribute(file, name);
  ASSERT_TRUE(write_double_attribute(file, name, value));
}
inline void set_string(hid_t file, const char* name, const std::string& value) {
  drop_attribute(file, name);
  ASSERT_TRUE(write_string_attribute(file, name, value));
}

// k of shape [2, kTokens, 8] created with a property list that the case changes.
inline void create_keys(hid_t file, const std::function<void(hid_t)>& change) {
  remove(file, kKeys);
  const hsize_t dims[3] = {2, kTokens, 8};
  const Handle space(H5Screate_simple(3, dims, nullptr)), plist(H5Pcreate(H5P_DATASET_CREATE));
  change(plist.id());
  const Handle d(H5Dcreate2(file, kKeys, hdf5_type(DType::kFloat16).id(), space.id(), H5P_DEFAULT,
                            plist.id(), H5P_DEFAULT));
  ASSERT_TRUE(d.ok());
}

struct Case {
  const char* name;
  std::function<void(hid_t)> change;
  StatusCode code;
  const char* message;  // after "FILE: "
};

inline std::string case_name(const testing::TestParamInfo<Case>& parameter) {
  return parameter.param.name;
}

// Applies the case's change to a valid dump at `file` and expects it to be refused as the case
// says.
inline void expect_refused(const Case& c, const std::string& file) {
  ASSERT_TRUE(write_small(file, kTokens));
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(file.c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    ASSERT_TRUE(f.ok());
    c.change(f.id());
  }
  const Result<DumpReader> dump = DumpReader::open(file);
  const Status s = dump ? read_everything(*dump) : dump.status();
  EXPECT_EQ(s.code(), c.code) << s.message();
  EXPECT_EQ(s.message().rfind(file + ": /", 0), 0u) << s.message();
  EXPECT_NE(s.message().find(c.message), std::string::npos) << s.message();
  EXPECT_LT(s.message().size(), file.size() + 300);
}

}  // namespace tierkv::datasets
