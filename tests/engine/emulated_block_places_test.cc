// SPDX-License-Identifier: Apache-2.0
// The places of many blocks, by a CTA run on the host, beside place_block() one after the other.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "store/rows/coded/coded_shape.h"
#include "store/rows/coded/device_block_places.cuh"
#include "tests/support/random_input.h"

namespace tierkv::store {
namespace {

// blocks of 0 to most_units units, where a page has page_units.
void expect_places(testing::RandomInput& input, int32_t blocks, int32_t most_units,
                   int32_t page_units) {
  const int32_t begin = input.uniform(0, 5 * page_units);
  std::vector<int32_t> units(static_cast<size_t>(blocks)), expected(units), got(units);
  int64_t used = begin;
  for (size_t i = 0; i < units.size(); ++i) {
    units[i] = input.uniform(0, most_units);
    used = place_block(used, units[i], page_units);
    expected[i] = static_cast<int32_t>(used);
    used += units[i];
  }
  const auto shared = std::make_unique<BlockPlaces>();
  std::vector<int32_t> ends(BlockPlaces::kThreads, -1), sizes(units.size(), -1);
  std::fill(got.begin(), got.end(), -1);
  const auto place = [&] {
    ends[threadIdx.x] = shared->place(
        begin, blocks, page_units, [&](int32_t i) { return units[static_cast<size_t>(i)]; },
        [&](int32_t i, int32_t at, int32_t size) {
          got[static_cast<size_t>(i)] = at, sizes[static_cast<size_t>(i)] = size;
        });
  };
  emulator::cta().run({0, 0}, BlockPlaces::kThreads, place, {1, 1});
  EXPECT_EQ(got, expected) << page_units << " units a page, from " << begin;
  EXPECT_EQ(sizes, units);
  for (const int32_t end : ends) ASSERT_EQ(end, used);
}

TEST(EmulatedBlockPlaces, AreThoseOfOneBlockAfterTheOther) {
  testing::RandomInput input;
  for (const int32_t blocks : {0, 1, 2, 31, 300, 1023, 1024, 1025, 2100, 5000}) {
    for (const int32_t page_units : {1, 7, 256, 4096}) {
      expect_places(input, blocks, page_units, page_units);
      expect_places(input, blocks, input.uniform(1, page_units), page_units);
    }
  }
}

}  // namespace
}  // namespace tierkv::store
