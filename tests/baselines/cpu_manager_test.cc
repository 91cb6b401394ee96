// SPDX-License-Identifier: Apache-2.0
// The threaded manager leaves the reference's bytes.
#include "bench/baselines/cpu_manager/cpu_manager.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/support/host_state.h"
#include "tests/support/page_trace.h"

namespace tierkv::testing {
namespace {

TEST(SpinPool, EveryThreadRunsBetweenBarriers) {
  for (int32_t threads : {1, 2, 5}) {
    SpinPool pool(threads);
    ASSERT_EQ(pool.size(), threads);
    std::vector<int32_t> first(threads, 0), second(threads, 0);
    for (int32_t round = 1; round <= 200; ++round) {
      pool.run([&](int32_t t) {
        first[t] = round;
        pool.barrier();
        for (int32_t value : first) second[t] += value == round ? 1 : 0;
      });
    }
    for (int32_t seen : second) EXPECT_EQ(seen, 200 * threads);
  }
}

class CpuManagerTest : public ::testing::TestWithParam<int32_t> {};

TEST_P(CpuManagerTest, LeavesTheReferencesBytes) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const AllocatorShape shape = with_sides(3, 9, 5, 400);
  HostState expected(shape), state(shape);
  CpuManager manager(GetParam());
  TraceMaker maker(seed, {});
  for (int32_t step = 0; step < 2000; ++step) {
    OwnedOp op = maker.next(*state);
    OwnedOp reference = op;
    ASSERT_TRUE(manager.run(*state, op.view()).is_ok());
    ASSERT_TRUE(run_page_op_host(*expected, reference.view()).is_ok());
    ASSERT_TRUE(state == expected) << "step " << step << " kind " << static_cast<int>(op.kind);
    ASSERT_EQ(std::memcmp(&op.report, &reference.report, sizeof(OpReport)), 0) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, CpuManagerTest, ::testing::Values(1, 2, 3, 7));

TEST(CpuManager, RefusesMalformedCalls) {
  const HostState state(two_sides(2, 2, 3, 10));
  CpuManager manager(2);
  OpReport report{};
  EXPECT_EQ(manager.run(*state, PageOp::open({nullptr, 1}, &report)).code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv::testing
