// SPDX-License-Identifier: Apache-2.0
// The C++ half of h5py_test.py, which runs these two with a path in TIERKV_H5PY_DUMP.
#include <cstdlib>

#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {
namespace {

std::string dump_path() {
  const char* path = std::getenv("TIERKV_H5PY_DUMP");
  return path == nullptr ? "" : path;
}

TEST(H5pyTest, DISABLED_ReadsTheExample) {
  const Result<DumpReader> dump = DumpReader::open(dump_path());
  ASSERT_TRUE(dump) << dump.status().message();
  EXPECT_EQ(dump->info().layout.num_layers, 3);
  EXPECT_EQ(dump->info().layout.sm_scale, 0.25);
  EXPECT_TRUE(dump->info().layout.rope_applied);
  EXPECT_EQ(dump->info().sequences[0].num_tokens, 300);
  const Status s = read_everything(*dump);
  EXPECT_TRUE(s) << s.message();
}

TEST(H5pyTest, DISABLED_Writes) {
  const std::string stem = std::filesystem::path(dump_path()).stem().string();
  for (const DType t : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    if (stem != dtype_name(t)) continue;
    const Status s = write_small(dump_path(), 300, small_info(t));
    EXPECT_TRUE(s) << s.message();
  }
  EXPECT_TRUE(std::filesystem::exists(dump_path()));
}

}  // namespace
}  // namespace tierkv::datasets
