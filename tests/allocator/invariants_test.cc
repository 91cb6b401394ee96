// SPDX-License-Identifier: Apache-2.0
// Each law notices the state that breaks it.
#include "allocator/invariants.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/support/host_state.h"

namespace tierkv::testing {
namespace {

class InvariantsTest : public ::testing::Test {
 protected:
  // Sequence 0 live with 2 high (one open) and 1 low page, sequence 1 a fork of it, sequence 2
  // free.
  InvariantsTest() : state_(two_sides(3, 1, 6, 12)) {
    OpReport report{};
    const int32_t ids[] = {0, 1};
    const SideCounts reserved{{3, 0, 0, 0}}, tokens{{3, 4, 0, 0}};
    PageCopy copies[kMaxSides];
    const SequenceBatch first = {ids, 1};
    for (const PageOp& op :
         {PageOp::open(first, &report), PageOp::reserve(first, &reserved, &report),
          PageOp::keep(first, &tokens, &report),
          PageOp::fork({ids + 1, 1}, ids, copies, &report)}) {
      EXPECT_TRUE(run_page_op_host(*state_, op).is_ok());
      EXPECT_EQ(report.status, StatusCode::kOk);
    }
    EXPECT_TRUE(InvariantChecker().check(*state_).is_ok());
  }

  void expect_broken(const char* law, const std::function<void(const PageAllocator&)>& harm) {
    const HostState harmed = state_;
    HostState copy(harmed->shape);
    copy.copy(state_);
    harm(*copy);
    const Status s = InvariantChecker().check(*copy);
    EXPECT_EQ(s.code(), StatusCode::kCorrupt) << law;
    EXPECT_NE(s.message().find(law), std::string::npos) << s.message();
  }

  HostState state_;
};

TEST_F(InvariantsTest, EveryLawCanFail) {
  using A = const PageAllocator&;
  expect_broken("end - start", [](A a) { a.ring.cursors->end += 20; });
  expect_broken("end - start", [](A a) { a.ring.cursors->start = -1; });
  expect_broken("end - start", [](A a) { a.ring.cursors->start = a.ring.cursors->end + 1; });
  expect_broken("holds page ids", [](A a) { a.ring.ids[8] = 12; });
  expect_broken("in the ring once", [](A a) { a.ring.ids[8] = a.ring.ids[9]; });
  expect_broken("in the ring, reserved, or in tables", [](A a) { a.ring.cursors->start += 1; });
  expect_broken("not free", [](A a) { a.ring.ids[8] = 0; });
  expect_broken("three states", [](A a) { a.sequences[1].state = static_cast<SequenceState>(9); });
  expect_broken("free sequence", [](A a) { a.sequences[1].state = SequenceState::kFree; });
  expect_broken("holds what it reserved", [](A a) { a.sequences[0].reserved.of[0] = 1; });
  expect_broken("holds what it reserved", [](A a) {
    a.sequences[0].state = SequenceState::kReserved;
    a.sequences[0].reserved.of[0] = 3;
  });
  expect_broken("hold its tokens", [](A a) {
    a.sequences[0].state = SequenceState::kReserved;
    a.sequences[0].reserved.of[0] = 1;
  });
  expect_broken("not negative", [](A a) { a.pages[2].of[0] = -1; });
  expect_broken("shape lacks", [](A a) { a.tokens[0].of[2] = 1; });
  expect_broken("hold its tokens", [](A a) { a.tokens[0].of[0] = 5; });
  expect_broken("left + right", [](A a) { a.pages[0].of[1] = 5; });
  expect_broken("slots hold page ids", [](A a) { a.pages[0].of[0] = 3; });
  expect_broken("beyond the counts", [](A a) { a.slots[3] = 5; });
  expect_broken("only full pages", [](A a) { a.tokens[0].of[1] = 3; });
  expect_broken("reference count", [](A a) { a.references[0] = 0; });
  expect_broken("reference count", [](A a) { a.references[9] = 2; });
  expect_broken("forked", [](A a) { a.sequences[0].shares = a.sequences[1].shares = 0; });
  expect_broken("left over", [](A a) { a.drop_marks[3].count = 1; });
  expect_broken("left over", [](A a) { a.state->arrived = 1; });
  expect_broken("left over", [](A a) { a.state->first_error = 0; });
}

}  // namespace
}  // namespace tierkv::testing
