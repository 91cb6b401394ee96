// What device stores know of the memory that calls leave for later ones, without a device.
#include "store/call_memory.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/store/random_input.h"

namespace tierkv::testing {
namespace {

const Slots kA = {3, 1}, kB = {1, 3};

// A kernel that is launched programmatically begins when the one ahead lets it, and knows to have
// ended what that one has waited for when it does.
class Launches {
 public:
  // As a kernel that writes: it may let the next one start at once, and waits for all before it.
  void write() {
    writes_.insert(next_);
    add(false);
  }
  // As attend() and append(): they wait first, unless they were told that all is settled.
  void launch(bool is_settled) {
    if (is_settled) {
      EXPECT_EQ(unfinished_writes(), std::set<int32_t>()) << "kernel " << next_;
    }
    add(!is_settled);
  }

 private:
  std::set<int32_t> unfinished_writes() const {
    std::set<int32_t> left;
    for (const int32_t w : writes_) {
      if (w >= ended_) left.insert(w);
    }
    return left;
  }
  // To the next kernel, all before `ended_` have ended when it begins.
  void add(bool waits_first) {
    if (waits_first) ended_ = next_;
    ++next_;
  }

  std::set<int32_t> writes_;
  int32_t next_ = 0, ended_ = 0;
};

TEST(SettledWrites, AreEndedWhereverTheyAreCalledSettled) {
  RandomInput input;
  int32_t settled = 0;
  for (int32_t run = 0; run < 200; ++run) {
    CallMemory calls;
    Launches launches;
    for (int32_t i = 0; i < 40; ++i) {
      const Slots slots = {input.uniform(0, 1)};
      if (!calls.has_batch(slots)) {
        calls.wrote_batch(slots);
        launches.write();
      }
      const bool plans = input.chance(0.5) && !calls.has_plan(slots, 1);
      if (plans) {
        calls.begin_plan();
        launches.write();
        calls.wrote_plan(slots, 1);
      }
      launches.launch(calls.settled().is_settled());
      settled += calls.settled().is_settled();
      calls.settled().note_wait();
      if (input.chance(0.1)) calls.forget_plans();
    }
  }
  EXPECT_GT(settled, 0);
}

TEST(CallMemory, APlanIsOfItsSequencesInOrderAndItsQueries) {
  CallMemory calls;
  EXPECT_FALSE(calls.has_plan(kA, 1));
  calls.begin_plan();
  EXPECT_FALSE(calls.has_plan(kA, 1));  // its kernels may fail
  calls.wrote_plan(kA, 2);
  EXPECT_TRUE(calls.has_plan(kA, 2));
  EXPECT_FALSE(calls.has_plan(kA, 1));
  EXPECT_FALSE(calls.has_plan(kB, 2));
  calls.forget_plans();
  EXPECT_FALSE(calls.has_plan(kA, 2));
}

// attend() alone is captured while an eager plan and batch of the same sequences are in use: the
// graph writes both itself, and leaves the eager ones alone however often it is replayed.
TEST(CallMemory, ACaptureUsesNothingThatWasWrittenOutsideOfIt) {
  CallMemory calls;
  calls.enter(0);
  const int32_t eager = calls.index();
  calls.wrote_batch(kA);
  calls.begin_plan();
  calls.wrote_plan(kA, 1);
  calls.set_layout(2, 1);
  calls.settled().note_wait();
  for (const uint64_t capture : {uint64_t{7}, uint64_t{8}}) {
    calls.enter(capture);
    EXPECT_NE(calls.index(), eager);
    EXPECT_FALSE(calls.has_batch(kA));
    EXPECT_FALSE(calls.has_plan(kA, 1));
    EXPECT_FALSE(calls.has_layout(2, 1));
    EXPECT_FALSE(calls.settled().is_settled());
    calls.wrote_batch(kA);
    calls.begin_plan();
    calls.wrote_plan(kA, 1);
    calls.set_layout(2, 1);
    // The same capture goes on.
    calls.enter(capture);
    EXPECT_TRUE(calls.has_batch(kA));
    EXPECT_TRUE(calls.has_plan(kA, 1));
    EXPECT_TRUE(calls.has_layout(2, 1));
  }
  calls.enter(0);
  EXPECT_EQ(calls.index(), eager);
  EXPECT_TRUE(calls.has_batch(kA));
  EXPECT_TRUE(calls.has_plan(kA, 1));
  EXPECT_TRUE(calls.settled().is_settled());
  // What changes counts changes them for both.
  calls.enter(8);
  calls.forget_plans();
  calls.forget_batches();
  EXPECT_FALSE(calls.has_plan(kA, 1));
  calls.enter(0);
  EXPECT_FALSE(calls.has_plan(kA, 1));
  EXPECT_FALSE(calls.has_batch(kA));
}

}  // namespace
}  // namespace tierkv::testing
