// SPDX-License-Identifier: Apache-2.0
#include "codec/host/parallel.h"

#include <gtest/gtest.h>

#include <new>
#include <vector>

namespace tierkv::analysis {
namespace {

TEST(ParallelFor, DoesEveryItemOnce) {
  for (const int32_t threads : {0, 1, 3, 64}) {
    for (const int64_t n : {0, 1, 2, 100}) {
      std::vector<std::atomic<int>> done(n);
      parallel_for(n, threads, [&](int64_t i) { ++done[i]; });
      for (const std::atomic<int>& d : done) EXPECT_EQ(d, 1);
    }
  }
}

TEST(ParallelFor, ThrowsOnTheCallersThreadWhatAnyThreadThrew) {
  for (const int32_t threads : {1, 4}) {
    for (const int64_t at : {0, 7, 99}) {
      std::atomic<int> after{0};
      EXPECT_THROW(parallel_for(100, threads,
                                [&](int64_t i) {
                                  if (i == at) throw std::bad_alloc();
                                  if (i > at) ++after;
                                }),
                   std::bad_alloc);
      // No item is begun once the failure is known; one thread begins none at all.
      if (threads == 1) {
        EXPECT_EQ(after, 0);
      }
    }
  }
}

}  // namespace
}  // namespace tierkv::analysis
