// SPDX-License-Identifier: Apache-2.0
// Checksums of chunks by the device's kernels, their source run on the host, beside xxh3().
#include <gtest/gtest.h>

#include <vector>

#include "codec/file/container_format.h"
#include "codec/gpu/chunk_checksums.cuh"
#include "tests/support/emulator/fibers.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

class EmulatedChecksums : public RandomTest {};

TEST_F(EmulatedChecksums, AreThoseOfTheHost) {
  // The ends of stripes, blocks and of four blocks that are scrambled at once, and on either side.
  std::vector<int64_t> sizes = {256, 960, 1008, 1024, 1040, 1088, 2048, 4096, 4112, 5120, 9216};
  for (int32_t i = 0; i < 12; ++i) sizes.push_back(16 * (16 + static_cast<int64_t>(rng_() % 700)));
  sizes.push_back(kXxh3ShortBytes);
  std::vector<ChecksumChunk> chunks;
  int64_t bytes = 0, blocks = 0;
  for (const int64_t size : sizes) {
    chunks.push_back({bytes, size, blocks});
    bytes += size;
    blocks += size / kChecksumBlock + 1;
  }
  std::vector<uint64_t> words(bytes / 8), sums(blocks * kChecksumLanes, ~0ull);
  for (uint64_t& x : words) x = uint64_t{rng_()} << 32 | rng_();
  std::vector<uint64_t> checksums(chunks.size(), ~0ull);
  ChecksumCall call;
  call.bytes = reinterpret_cast<const uint8_t*>(words.data());
  call.chunks = chunks.data();
  call.sums = sums.data();
  call.checksums = checksums.data();
  call.keys = xxh3_keys();
  const auto count = static_cast<int32_t>(chunks.size());
  constexpr int32_t kColumns = 2;
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t x = 0; x < kColumns; ++x) {
      emulator::cta().run({x, i}, 32 * kChecksumWarps, [&] { sum_blocks_kernel(call); },
                          {kColumns, count});
    }
    emulator::cta().run({i, 0}, 32, [&] { chunk_checksum_kernel(call); }, {count, 1});
    const auto size = static_cast<size_t>(sizes[i]);
    const uint64_t expected = chunks[i].is_short() ? 0 : xxh3(call.bytes + chunks[i].first, size);
    EXPECT_EQ(checksums[i], expected) << size;
  }
}

}  // namespace
}  // namespace tierkv
