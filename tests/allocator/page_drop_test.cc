// SPDX-License-Identifier: Apache-2.0
// A row's dropped pages as runs of slots, against the list of them one by one.
#include "allocator/page_drop.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tierkv {
namespace {

// Sides of 0 to 20 pages, of which the last are reserved, and which drop a run anywhere.
RowDrop random_drop(std::mt19937* rng) {
  const auto uniform = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(*rng);
  };
  RowDrop drop = {};
  for (int32_t s = 0; s < kMaxSides; ++s) {
    drop.held.of[s] = uniform(0, 20);
    drop.recorded[s] = uniform(0, drop.held.of[s]);
    drop.first[s] = uniform(0, drop.held.of[s]);
    drop.length[s] = uniform(0, drop.held.of[s] - drop.first[s]);
    drop.total += drop.length[s];
  }
  return drop;
}

TEST(PageDrop, RunsAreTheDroppedPagesInOrder) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  PageAllocator a;
  a.shape.table = {1, 1, kMaxSides, {40, 43}, {16, 16, 16, 16}};
  int32_t recorded_in_all = 0;
  for (int32_t round = 0; round < 2000; ++round) {
    const RowDrop drop = random_drop(&rng);
    std::vector<int32_t> slots, recorded;
    for (int32_t s = 0; s < kMaxSides; ++s) {
      const SlotRun run = dropped_run(a, drop, s), kept = recorded_run(a, drop, s);
      for (int32_t i = 0; i < run.length; ++i) slots.push_back(run.first + i);
      for (int32_t i = 0; i < kept.length; ++i) recorded.push_back(kept.first + i);
    }
    std::vector<int32_t> expected, expected_recorded;
    for (int32_t j = 0; j < drop.total; ++j) {
      const DroppedPage page = dropped_page(a, drop, j);
      expected.push_back(page.slot);
      if (page.is_recorded) expected_recorded.push_back(page.slot);
    }
    ASSERT_EQ(slots, expected);
    ASSERT_EQ(recorded, expected_recorded);
    recorded_in_all += static_cast<int32_t>(recorded.size());
  }
  EXPECT_GT(recorded_in_all, 0);
}

}  // namespace
}  // namespace tierkv
