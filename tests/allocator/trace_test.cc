// SPDX-License-Identifier: Apache-2.0
// Random traces against a model that shares no code with the allocator, the laws checked after
// every operation.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "allocator/invariants.h"
#include "tests/allocator/model.h"
#include "tests/support/host_state.h"
#include "tests/support/page_trace.h"

namespace tierkv::testing {
namespace {

// Operations per shape; TIERKV_TRACE_STEPS asks for more.
int64_t trace_steps() {
  const char* text = std::getenv("TIERKV_TRACE_STEPS");
  return text == nullptr ? 250000 : std::atoll(text);
}

bool same_report(const OpReport& a, const OpReport& b) {
  return a.status == b.status && a.batch_row == b.batch_row && a.pages_needed == b.pages_needed &&
         a.pages_missing == b.pages_missing && a.pages_returned == b.pages_returned &&
         a.pages_free == b.pages_free;
}

bool same_copies(const std::vector<PageCopy>& a, const std::vector<PageCopy>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(PageCopy)) == 0;
}

// Who was named last in which operation is bookkeeping, not state.
void forget_names(const HostState& state) {
  state->state->op_number = 0;
  for (int32_t q = 0; q < state->shape.table.num_sequences; ++q) state->sequences[q].last_named = 0;
}

class TraceTest : public ::testing::TestWithParam<AllocatorShape> {};

TEST_P(TraceTest, FollowsTheModelAndKeepsTheLaws) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  HostState state(GetParam());
  // A ring that has turned many times, about to turn again.
  const int64_t turns = (int64_t{1} << 40) / GetParam().num_pages;
  state->ring.cursors->start += turns * GetParam().num_pages;
  state->ring.cursors->end += turns * GetParam().num_pages;
  Model model(GetParam());
  InvariantChecker laws;
  TraceMaker maker(seed, {});
  std::map<StatusCode, int64_t> seen;
  std::map<PageOpKind, int64_t> done;
  int64_t copies = 0;
  HostState before(GetParam()), after(GetParam());
  for (int64_t step = 0; step < trace_steps(); ++step) {
    OwnedOp op = maker.next(*state);
    before.copy(state);
    const OpReport expected = model.run(op.view());
    ASSERT_TRUE(run_page_op_host(*state, op.view()).is_ok());
    ASSERT_TRUE(same_report(op.report, expected))
        << "step " << step << " kind " << static_cast<int>(op.kind) << " status "
        << static_cast<int>(op.report.status) << " row " << op.report.batch_row << ", model "
        << static_cast<int>(expected.status) << " row " << expected.batch_row;
    ASSERT_EQ(model.difference(*state), "") << "step " << step;
    const Status law = laws.check(*state);
    ASSERT_TRUE(law.is_ok()) << "step " << step << ": " << law.message();
    ++seen[expected.status];
    if (expected.status != StatusCode::kOk) {
      after.copy(state);
      forget_names(before);
      forget_names(after);
      ASSERT_TRUE(after == before) << "step " << step << " failed and changed something";
      continue;
    }
    ++done[op.kind];
    if (op.copies.empty()) continue;
    ASSERT_TRUE(same_copies(op.copies, model.copies())) << "step " << step;
    for (const PageCopy& c : op.copies) copies += c.source != kNoPage;
  }
  // A trace that never gets anywhere proves nothing.
  EXPECT_EQ(done.size(), 8u);
  EXPECT_GT(copies, 0);
  EXPECT_GT(seen[StatusCode::kOutOfPages], 0);
  EXPECT_GT(seen[StatusCode::kOutOfRange], 0);
  EXPECT_GT(seen[StatusCode::kStaleSequence], 0);
  EXPECT_GT(seen[StatusCode::kInvalidArgument], 0);
}

INSTANTIATE_TEST_SUITE_P(Sides, TraceTest,
                         ::testing::Values(with_sides(1, 5, 2, 40), with_sides(2, 6, 2, 60),
                                           with_sides(3, 5, 3, 90), with_sides(4, 7, 1, 47)));

}  // namespace
}  // namespace tierkv::testing
