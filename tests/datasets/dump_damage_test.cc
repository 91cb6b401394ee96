// SPDX-License-Identifier: Apache-2.0
// Truncated dumps and dumps with flipped bytes: a status or the data, never a crash. The same on
// arbitrary structures is fuzz_dump_attributes' work.
#include <chrono>
#include <cstdlib>

#include "tests/datasets/dump_files.h"

// HDF5 leaks an object header that it cannot decode. Our own use of it is held to account by
// OpenTest.NothingStaysOpen.
extern "C" const char* __lsan_default_suppressions() {
  return "leak:libhdf5\n";
}

namespace tierkv::datasets {
namespace {

class DamageTest : public DumpTest {
 protected:
  void SetUp() override {
    ASSERT_TRUE(write_small(path("d.h5"), 40));
    image_ = file_bytes(path("d.h5"));
  }
  // True when the image was read without complaint.
  static bool reads(const std::vector<char>& image) {
    const Result<DumpReader> dump = DumpReader::open_image("image", image.data(), image.size());
    const Status s = dump ? read_everything(*dump) : dump.status();
    EXPECT_TRUE(s || !s.message().empty());
    return s.is_ok();
  }
  std::vector<char> image_;
};

TEST_F(DamageTest, TruncatedFilesAreRefused) {
  ASSERT_TRUE(reads(image_));
  std::uniform_int_distribution<size_t> any(0, image_.size() - 1);
  for (int trial = 0; trial < 200; ++trial) {
    const size_t n = trial < 100 ? static_cast<size_t>(trial) * image_.size() / 100 : any(rng_);
    EXPECT_FALSE(reads({image_.begin(), image_.begin() + n})) << n;
    std::ofstream(path("cut.h5"), std::ios::binary).write(image_.data(), n);
    const Status s = DumpReader::open(path("cut.h5")).status();
    EXPECT_FALSE(s) << n;
    EXPECT_EQ(s.message().rfind(path("cut.h5") + ": ", 0), 0u) << s.message();
  }
}

// HDF5's metadata and our chunks carry checksums, the small contiguous arrays do not.
TEST_F(DamageTest, FlippedBytesNeverCrash) {
  // TIERKV_DAMAGE_SECONDS asks for a longer run than ctest's.
  const char* wanted = std::getenv("TIERKV_DAMAGE_SECONDS");
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(wanted != nullptr ? std::atoi(wanted) : 2);
  std::uniform_int_distribution<size_t> any(0, image_.size() - 1);
  // However slow the machine: nine in ten are refused, so that twenty cannot all pass.
  constexpr int64_t kLeastTrials = 20;
  int64_t refused = 0, trials = 0;
  for (; trials < kLeastTrials || std::chrono::steady_clock::now() < end; ++trials) {
    std::vector<char> image = image_;
    for (int flips = 1 + static_cast<int>(rng_() % 4); flips > 0; --flips) {
      image[any(rng_)] ^= static_cast<char>(1u << rng_() % 8);
    }
    refused += !reads(image);
  }
  EXPECT_GT(refused, trials / 10);
  std::printf("%lld of %lld refused\n", static_cast<long long>(refused),
              static_cast<long long>(trials));
}

}  // namespace
}  // namespace tierkv::datasets
