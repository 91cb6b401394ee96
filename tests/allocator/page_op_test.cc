// SPDX-License-Identifier: Apache-2.0
// Cases one can follow by hand, and calls that must be refused.
#include <gtest/gtest.h>

#include <vector>

#include "allocator/invariants.h"
#include "tests/support/host_state.h"

namespace tierkv::testing {
namespace {

using Ids = std::vector<int32_t>;

class PageOpTest : public ::testing::Test {
 protected:
  explicit PageOpTest(const AllocatorShape& shape) : state_(shape) {}
  PageOpTest() : PageOpTest(two_sides(4, 1, 6, 16)) {}

  static SequenceBatch batch(const Ids& ids) {
    return {ids.data(), static_cast<int32_t>(ids.size())};
  }
  StatusCode run(const PageOp& op) {
    EXPECT_TRUE(run_page_op_host(*state_, op).is_ok());
    const Status law = InvariantChecker().check(*state_);
    EXPECT_TRUE(law.is_ok()) << law.message();
    return report_.status;
  }
  StatusCode open(const Ids& ids) { return run(PageOp::open(batch(ids), &report_)); }
  StatusCode release(const Ids& ids) { return run(PageOp::release(batch(ids), &report_)); }
  StatusCode reserve(const Ids& ids, const std::vector<SideCounts>& pages) {
    return run(PageOp::reserve(batch(ids), pages.data(), &report_));
  }
  StatusCode keep(const Ids& ids, const std::vector<SideCounts>& tokens) {
    return run(PageOp::keep(batch(ids), tokens.data(), &report_));
  }
  StatusCode grow(const Ids& ids, const std::vector<SideCounts>& tokens) {
    return run(PageOp::grow(batch(ids), tokens.data(), &report_));
  }
  StatusCode append(const Ids& ids, const std::vector<SideCounts>& added) {
    return run(PageOp::append(batch(ids), added.data(), &report_));
  }
  StatusCode truncate(const Ids& ids, const std::vector<SideCounts>& tokens) {
    copies_.assign(tokens.size() * kMaxSides, {-77, -77});
    return run(PageOp::truncate(batch(ids), tokens.data(), copies_.data(), &report_));
  }
  StatusCode fork(const Ids& ids, const Ids& sources) {
    copies_.assign(ids.size() * state_->shape.table.rows_per_sequence * kMaxSides, {-77, -77});
    return run(PageOp::fork(batch(ids), sources.data(), copies_.data(), &report_));
  }
  int32_t references(int32_t page) const { return state_->references[page]; }

  HostState state_;
  OpReport report_{};
  std::vector<PageCopy> copies_;
};

// DiffKV Figure 6: 2 high or 4 low tokens a page, 8 tokens, two heads, pages 5-8 and 9-12, pages 6,
// 7 and 11 come back.
class Figure6 : public PageOpTest {
 protected:
  Figure6() : PageOpTest(two_sides(3, 2, 4, 13)) {}
};

TEST_F(Figure6, PromptPhase) {
  ASSERT_EQ(open({2, 0}), StatusCode::kOk);
  ASSERT_EQ(reserve({2}, {{{2, 0, 0, 0}}}), StatusCode::kOk);  // pages 0-3 are taken by someone
  ASSERT_EQ(reserve({0}, {{{4, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_needed, 8);
  EXPECT_EQ(side_ids(*state_, 0, 0), (Ids{4, 5, 6, 7}));
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{8, 9, 10, 11}));
  EXPECT_EQ(free_ids(*state_), (Ids{12}));
  ASSERT_EQ(keep({0}, {{{2, 4, 0, 0}}, {{4, 3, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(side_ids(*state_, 0, 0), (Ids{4}));
  EXPECT_EQ(side_ids(*state_, 0, 1), (Ids{7}));
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{8, 9}));
  EXPECT_EQ(side_ids(*state_, 1, 1), (Ids{11}));
  EXPECT_EQ(report_.pages_returned, 3);
  EXPECT_EQ(free_ids(*state_), (Ids{12, 5, 6, 10}));  // wrapped around
}

TEST_F(PageOpTest, AppendTakesAPageWhenASideIsFull) {
  ASSERT_EQ(open({1, 3}), StatusCode::kOk);
  ASSERT_EQ(append({3, 1}, {{{1, 1, 0, 0}}, {{2, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_needed, 3);
  EXPECT_EQ(side_ids(*state_, 3, 0), (Ids{0}));
  EXPECT_EQ(side_ids(*state_, 3, 1), (Ids{1}));
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{2}));
  ASSERT_EQ(append({3, 1}, {{{1, 3, 0, 0}}, {{1, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_needed, 1);
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{2, 3}));
  // From 3 tokens: 2 more open one page, 4 more would open two.
  EXPECT_EQ(append({1}, {{{4, 0, 0, 0}}}), StatusCode::kOutOfRange);
  EXPECT_EQ(append({1}, {{{2, 0, 0, 0}}}), StatusCode::kOk);
}

TEST_F(PageOpTest, GrowTakesAsManyPagesAsItNeeds) {
  ASSERT_EQ(open({1, 3}), StatusCode::kOk);
  ASSERT_EQ(grow({3, 1}, {{{7, 5, 0, 0}}, {{3, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_needed, 8);
  EXPECT_EQ(side_ids(*state_, 3, 0), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(side_ids(*state_, 3, 1), (Ids{4, 5}));
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{6, 7}));
  ASSERT_EQ(grow({1}, {{{4, 0, 0, 0}}}), StatusCode::kOk);  // there is room
  EXPECT_EQ(report_.pages_needed, 0);
  ASSERT_EQ(grow({1}, {{{1, 0, 0, 0}}}), StatusCode::kOk);  // the pages stay
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{6, 7}));
  ASSERT_EQ(grow({1}, {{{4, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_needed, 0);
  EXPECT_EQ(grow({1}, {{{4, 0, 1, 0}}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(grow({1}, {{{1 << 30, 1 << 30, 0, 0}}}), StatusCode::kOutOfRange);
  EXPECT_EQ(grow({2}, {{{1, 0, 0, 0}}}), StatusCode::kStaleSequence);
}

TEST_F(PageOpTest, AllOrNothing) {
  ASSERT_EQ(open({0, 1, 2}), StatusCode::kOk);
  ASSERT_EQ(reserve({0, 1}, {{{6, 0, 0, 0}}, {{6, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_free, 4);
  ASSERT_EQ(reserve({2}, {{{4, 2, 0, 0}}}), StatusCode::kOutOfPages);
  EXPECT_EQ(report_.batch_row, -1);
  EXPECT_EQ(report_.pages_needed, 6);
  EXPECT_EQ(report_.pages_missing, 2);
  EXPECT_EQ(free_ids(*state_), (Ids{12, 13, 14, 15}));
  EXPECT_EQ(state_->sequences[2].state, SequenceState::kLive);
  ASSERT_EQ(reserve({2}, {{{3, 1, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_free, 0);
}

TEST_F(PageOpTest, LeftAndRightNeverMeet) {
  ASSERT_EQ(open({0}), StatusCode::kOk);
  ASSERT_EQ(reserve({0}, {{{4, 2, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(keep({0}, {{{8, 8, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(append({0}, {{{1, 0, 0, 0}}}), StatusCode::kOutOfRange);
  EXPECT_EQ(report_.batch_row, 0);
  EXPECT_EQ(append({0}, {{{0, 1, 0, 0}}}), StatusCode::kOutOfRange);
  EXPECT_EQ(append({0}, {{{0, 0, 1, 0}}}), StatusCode::kOutOfRange);  // a side that is not there
}

TEST_F(PageOpTest, ForkSharesFullPagesAndReplacesOpenOnes) {
  ASSERT_EQ(open({0}), StatusCode::kOk);
  ASSERT_EQ(reserve({0}, {{{4, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(keep({0}, {{{5, 4, 0, 0}}}), StatusCode::kOk);  // high 0 1 2(open), low 3(full)
  ASSERT_EQ(fork({1, 2}, {0, 0}), StatusCode::kOk);
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{0, 1, 4}));
  EXPECT_EQ(side_ids(*state_, 2, 0), (Ids{0, 1, 5}));
  EXPECT_EQ(side_ids(*state_, 2, 1), (Ids{3}));
  EXPECT_EQ(references(0), 3);
  EXPECT_EQ(references(2), 1);
  EXPECT_TRUE(is_frozen(*state_, 3));
  EXPECT_EQ(copies_[0].source, 2);
  EXPECT_EQ(copies_[0].target, 4);
  EXPECT_EQ(copies_[4].target, 5);
  EXPECT_EQ(copies_[5].source, kNoPage);
  // The pages of both come back once, at the place of their last owner in the batch.
  ASSERT_EQ(release({2, 0}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_returned, 2);
  EXPECT_EQ(references(0), 1);
  ASSERT_EQ(release({1}), StatusCode::kOk);
  const Ids free = free_ids(*state_);
  EXPECT_EQ(Ids(free.end() - 6, free.end()), (Ids{5, 2, 0, 1, 4, 3}));
}

TEST_F(PageOpTest, LastReferenceInTheBatchReturnsThePage) {
  ASSERT_EQ(open({0}), StatusCode::kOk);
  ASSERT_EQ(reserve({0}, {{{1, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(keep({0}, {{{2, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(fork({1, 2}, {0, 0}), StatusCode::kOk);
  ASSERT_EQ(append({0, 1, 2}, {{{1, 0, 0, 0}}, {{1, 0, 0, 0}}, {{1, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(release({1, 2, 0}), StatusCode::kOk);
  const Ids free = free_ids(*state_);
  EXPECT_EQ(Ids(free.end() - 4, free.end()), (Ids{2, 3, 0, 1}));
}

TEST_F(PageOpTest, TruncateExchangesASharedPageThatBecomesOpen) {
  ASSERT_EQ(open({0}), StatusCode::kOk);
  ASSERT_EQ(reserve({0}, {{{3, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(keep({0}, {{{6, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(fork({1}, {0}), StatusCode::kOk);
  ASSERT_EQ(truncate({1}, {{{3, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(side_ids(*state_, 1, 0), (Ids{0, 3}));
  EXPECT_EQ(side_ids(*state_, 0, 0), (Ids{0, 1, 2}));
  EXPECT_EQ(copies_[0].source, 1);
  EXPECT_EQ(copies_[0].target, 3);
  EXPECT_EQ(report_.pages_returned, 0);  // the source still holds 1 and 2
  ASSERT_EQ(truncate({0}, {{{3, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(copies_[0].source, kNoPage);  // its second page has one owner again
  EXPECT_EQ(report_.pages_returned, 1);
}

TEST_F(PageOpTest, NegativeAppendKeepsPagesAndRefusesSharedOnes) {
  ASSERT_EQ(open({0}), StatusCode::kOk);
  ASSERT_EQ(reserve({0}, {{{2, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(keep({0}, {{{4, 0, 0, 0}}}), StatusCode::kOk);
  ASSERT_EQ(append({0}, {{{-3, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(side_ids(*state_, 0, 0), (Ids{0, 1}));
  ASSERT_EQ(append({0}, {{{3, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(report_.pages_needed, 0);
  ASSERT_EQ(fork({1}, {0}), StatusCode::kOk);
  EXPECT_EQ(append({0}, {{{-1, 0, 0, 0}}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(append({0}, {{{-2, 0, 0, 0}}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(append({0}, {{{-5, 0, 0, 0}}}), StatusCode::kInvalidArgument);
}

TEST_F(PageOpTest, MisuseIsNamedAndChangesNothing) {
  EXPECT_EQ(release({0}), StatusCode::kStaleSequence);
  ASSERT_EQ(open({0, 1}), StatusCode::kOk);
  EXPECT_EQ(open({2, 1}), StatusCode::kInvalidArgument);
  EXPECT_EQ(report_.batch_row, 1);
  EXPECT_EQ(state_->sequences[2].state, SequenceState::kFree);
  EXPECT_EQ(open({4}), StatusCode::kOutOfRange);
  EXPECT_EQ(open({-2}), StatusCode::kOutOfRange);
  EXPECT_EQ(keep({0}, {{{0, 0, 0, 0}}}), StatusCode::kInvalidArgument);  // nothing reserved
  ASSERT_EQ(reserve({0}, {{{1, 0, 0, 0}}}), StatusCode::kOk);
  EXPECT_EQ(append({0}, {{{1, 0, 0, 0}}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(fork({2}, {0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(fork({2}, {3}), StatusCode::kStaleSequence);
  EXPECT_EQ(keep({0}, {{{3, 0, 0, 0}}}), StatusCode::kOutOfRange);
  EXPECT_EQ(release({0, kPaddingSequence, 1, 0}), StatusCode::kInvalidArgument);
  EXPECT_EQ(report_.batch_row, 3);
  ASSERT_EQ(release({0, kPaddingSequence, 1}), StatusCode::kOk);
  EXPECT_EQ(release({1}), StatusCode::kStaleSequence);
  EXPECT_EQ(append({1}, {{{1, 0, 0, 0}}}), StatusCode::kStaleSequence);
  EXPECT_EQ(free_ids(*state_).size(), 16u);
}

TEST_F(PageOpTest, MalformedCallsWriteNothing) {
  const HostState before = state_;
  const Ids ids = {0, 1, 2, 3, 4};
  const std::vector<SideCounts> counts(8);
  std::vector<PageCopy> copies(64);
  const auto refused = [&](PageOp op, const char* what) {
    const Status s = run_page_op_host(*state_, op);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << what;
    EXPECT_NE(s.message().find(what), std::string::npos) << s.message();
  };
  const auto off = [](const auto* p) {
    return reinterpret_cast<decltype(p)>(reinterpret_cast<uintptr_t>(p) + 2);
  };
  const SequenceBatch one = {ids.data(), 1};
  refused(PageOp::open(one, nullptr), "report is null");
  refused(PageOp::open(one, const_cast<OpReport*>(off(&report_))), "report is misaligned");
  refused(PageOp::open({ids.data(), 0}, &report_), "empty");
  refused(PageOp::open({ids.data(), -1}, &report_), "empty");
  refused(PageOp::open({ids.data(), 5}, &report_), "num_sequences");
  refused(PageOp::open({nullptr, 1}, &report_), "sequences is null");
  refused(PageOp::open({off(ids.data()), 1}, &report_), "sequences is misaligned");
  refused(PageOp::append(one, nullptr, &report_), "counts is null");
  refused(PageOp::keep(one, off(counts.data()), &report_), "counts is not aligned");
  refused(PageOp::fork(one, nullptr, copies.data(), &report_), "sources is null");
  refused(PageOp::fork(one, off(ids.data()), copies.data(), &report_), "sources is misaligned");
  refused(PageOp::fork(one, ids.data(), nullptr, &report_), "copies is null");
  refused(PageOp::truncate(one, counts.data(), const_cast<PageCopy*>(off(copies.data())), &report_),
          "copies is not aligned");
  EXPECT_EQ(run_page_op_host({}, PageOp::open(one, &report_)).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(before == state_);
}

TEST(PageAllocatorMemory, IsRefusedWhenUnfit) {
  const AllocatorShape shape = two_sides(2, 2, 3, 10);
  const size_t bytes = allocator_bytes(shape).total;
  alignas(kAllocatorAlignment) static char memory[1 << 16];
  ASSERT_LT(bytes, sizeof(memory));
  EXPECT_TRUE(make_page_allocator(shape, memory, bytes).is_ok());
  EXPECT_EQ(make_page_allocator(shape, memory, bytes - 1).status().code(),
            StatusCode::kBufferTooSmall);
  EXPECT_EQ(make_page_allocator(shape, nullptr, bytes).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(make_page_allocator(shape, memory + 128, bytes).status().code(),
            StatusCode::kInvalidArgument);
  AllocatorShape empty = shape;
  empty.num_pages = 0;
  EXPECT_EQ(make_page_allocator(empty, memory, bytes).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(initialize_host({}).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv::testing
