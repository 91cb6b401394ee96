// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include "tests/datasets/bad_dumps.h"

namespace tierkv::datasets {
namespace {

class OpenTest : public DumpTest {
 protected:
  void expect_refused(const std::string& file, StatusCode code, const std::string& message) {
    const Status s = DumpReader::open(file).status();
    EXPECT_EQ(s.code(), code) << s.message();
    EXPECT_EQ(s.message(), file + ": " + message);
  }
};

TEST_F(OpenTest, WhatIsNoFileOfOursIsRefused) {
  expect_refused(path("nothing"), StatusCode::kIo, "No such file or directory");
  expect_refused(dir_.string(), StatusCode::kIo, "is not a regular file");
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  expect_refused(path("fifo"), StatusCode::kIo, "is not a regular file");
  std::ofstream(path("empty")).close();
  expect_refused(path("empty"), StatusCode::kCorrupt, "is empty");
  std::string noise(10000, '\0');
  for (char& c : noise) c = static_cast<char>(rng_());
  noise[8] = '\0';  // a brace there could be safetensors
  std::ofstream(path("noise"), std::ios::binary) << noise;
  expect_refused(path("noise"), StatusCode::kCorrupt, "is not an HDF5 file");
}

// As h5py writes Python values: True is an enumeration, 10000 an integer.
TEST_F(OpenTest, AttributesOfPythonsTypesAreRead) {
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("d.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    drop_attribute(f.id(), "rope_applied");
    const Handle type(H5Tenum_create(H5T_NATIVE_INT8)), space(H5Screate(H5S_SCALAR));
    int8_t value = 0;
    H5Tenum_insert(type.id(), "FALSE", &value);
    value = 1;
    H5Tenum_insert(type.id(), "TRUE", &value);
    const Handle a(
        H5Acreate2(f.id(), "rope_applied", type.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT));
    ASSERT_GE(H5Awrite(a.id(), type.id(), &value), 0);
    set_int(f.id(), "rope_theta", 500000);
    set_int(f.id(), "sm_scale", 1);
    drop_attribute(f.id(), "model_id");
    drop_attribute(f.id(), "created_by");
    const Handle text(H5Tcopy(H5T_C_S1));  // as numpy.bytes_ is written
    H5Tset_size(text.id(), 5);
    const Handle by(
        H5Acreate2(f.id(), "created_by", text.id(), space.id(), H5P_DEFAULT, H5P_DEFAULT));
    ASSERT_GE(H5Awrite(by.id(), text.id(), "numpy"), 0);
  }
  const Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump) << dump.status().message();
  EXPECT_TRUE(dump->info().layout.rope_applied);
  EXPECT_EQ(dump->info().layout.rope_theta, 500000);
  EXPECT_EQ(dump->info().layout.sm_scale, 1);
  EXPECT_EQ(dump->info().model_id, "");
  EXPECT_EQ(dump->info().created_by, "numpy");
}

TEST_F(OpenTest, TheFirstBadElementIsNamedByItsIndex) {
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("d.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    const Handle d(H5Dopen2(f.id(), "/seq/a/layer/1/v", H5P_DEFAULT));
    std::vector<float> x(2 * kTokens * 8, 1.0f);
    x[(1 * kTokens + 3) * 8 + 6] = NAN;
    x[(1 * kTokens + 4) * 8 + 1] = NAN;
    ASSERT_GE(H5Dwrite(d.id(), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, x.data()), 0);
  }
  const Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump);
  RowData row;
  EXPECT_TRUE(dump->read_row(0, 1, 0, Component::kValue, &row));
  const Status s = dump->read_row(0, 1, 1, Component::kValue, &row);
  EXPECT_EQ(s.code(), StatusCode::kNonFinite);
  EXPECT_NE(s.message().find("/seq/a/layer/1/v: element [1, 3, 6] is not finite"),
            std::string::npos)
      << s.message();
}

TEST_F(OpenTest, NothingStaysOpen) {
  const auto open_objects = [] { return H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL); };
  ASSERT_EQ(open_objects(), 0);
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  ASSERT_EQ(open_objects(), 0);
  {
    const Result<DumpReader> dump = DumpReader::open(path("d.h5"));
    ASSERT_TRUE(dump);
    ASSERT_TRUE(read_everything(*dump));
    EXPECT_EQ(open_objects(), 1);
  }
  EXPECT_EQ(open_objects(), 0);
  {
    const Hdf5Lock lock;
    const Handle f(H5Fopen(path("d.h5").c_str(), H5F_ACC_RDWR, H5P_DEFAULT));
    remove(f.id(), "/seq/a/layer/1/v");
  }
  EXPECT_FALSE(DumpReader::open(path("d.h5")));
  EXPECT_EQ(open_objects(), 0);
}

TEST_F(OpenTest, TheCallersErrorPrinterIsPutBack) {
  H5E_auto2_t before = nullptr, after = nullptr;
  void *before_data = nullptr, *after_data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &before_data);
  ASSERT_TRUE(write_small(path("d.h5"), kTokens));
  ASSERT_TRUE(DumpReader::open(path("d.h5")));
  H5Eget_auto2(H5E_DEFAULT, &after, &after_data);
  EXPECT_NE(before, nullptr);
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace tierkv::datasets
