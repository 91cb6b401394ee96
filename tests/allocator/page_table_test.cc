// SPDX-License-Identifier: Apache-2.0
#include "tierkv/page_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/support/host_state.h"

namespace tierkv::testing {
namespace {

TEST(PageTable, SidesOfARowMeetWithoutOverlap) {
  const PageTableShape shape = with_sides(4, 1, 1, 1).table;
  ASSERT_TRUE(shape.validate().is_ok());
  for (int32_t left = 0; left <= shape.table_slots[0]; ++left) {
    for (int32_t raw = 0; raw <= shape.table_slots[1]; ++raw) {
      const int32_t counts[] = {left, shape.table_slots[0] - left, raw, shape.table_slots[1] - raw};
      std::set<int32_t> slots;
      for (int32_t s = 0; s < kMaxSides; ++s) {
        for (int32_t i = 0; i < counts[s]; ++i) slots.insert(shape.slot_of(s, i));
      }
      EXPECT_EQ(slots.size(), 12u);
      EXPECT_EQ(*slots.begin(), 0);
      EXPECT_EQ(*slots.rbegin(), 11);
    }
  }
  EXPECT_EQ(shape.row_stride(), 12);
}

TEST(PageTable, SideViewWalksTheSlots) {
  const HostState state(with_sides(4, 2, 3, 9));
  const PageTableView table = state->table();
  for (int32_t s = 0; s < kMaxSides; ++s) {
    const SideView side = table.side(s);
    for (int32_t row = 0; row < table.shape.num_rows(); ++row) {
      EXPECT_EQ(side.tokens + row * side.token_stride, &state->tokens[row].of[s]);
      for (int32_t i = 0; i < side.max_pages; ++i) {
        EXPECT_EQ(side.slots + row * side.row_stride + i * side.direction,
                  state->slots + row * table.shape.row_stride() + table.shape.slot_of(s, i));
      }
    }
  }
}

// Against every way to deal the tokens: the bound is reached and never exceeded.
TEST(PageTable, WorstCaseIsTheWorstDeal) {
  for (int32_t left : {1, 2, 3, 16}) {
    for (int32_t right : {1, 2, 5, 16, 28}) {
      for (int32_t tokens = 0; tokens <= 70; ++tokens) {
        int32_t worst = 0;
        for (int32_t l = 0; l <= tokens; ++l) {
          worst = std::max(worst, pages_for(l, left) + pages_for(tokens - l, right));
        }
        EXPECT_EQ(worst_case_pages(tokens, left, right), worst)
            << left << " " << right << " " << tokens;
      }
    }
  }
  EXPECT_EQ(worst_case_pages(64, 64, 112), 2);  // 63 high and 1 low
}

TEST(PageTable, ValidateNamesTheField) {
  const PageTableShape good = with_sides(3, 2, 2, 1).table;
  ASSERT_TRUE(good.validate().is_ok());
  const auto refused = [&good](auto change, const char* field) {
    PageTableShape shape = good;
    change(shape);
    const Status s = shape.validate();
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument) << field;
    EXPECT_NE(s.message().find(field), std::string::npos) << s.message();
  };
  refused([](auto& s) { s.num_sequences = 0; }, "num_sequences");
  refused([](auto& s) { s.num_sequences = kMaxSequences + 1; }, "num_sequences");
  refused([](auto& s) { s.rows_per_sequence = 0; }, "rows_per_sequence");
  refused([](auto& s) { s.rows_per_sequence = INT32_MAX; }, "rows_per_sequence");
  refused([](auto& s) { s.num_sides = 0; }, "num_sides");
  refused([](auto& s) { s.num_sides = 5; }, "num_sides");
  refused([](auto& s) { s.table_slots[0] = 0; }, "table_slots[0]");
  refused([](auto& s) { s.table_slots[1] = kMaxTableSlots + 1; }, "table_slots[1]");
  refused([](auto& s) { s.num_sides = 2; }, "table_slots[1]");
  refused([](auto& s) { s.tokens_per_page[2] = 0; }, "tokens_per_page[2]");
  refused([](auto& s) { s.tokens_per_page[0] = INT32_MAX; }, "tokens_per_page[0]");
  refused([](auto& s) { s.tokens_per_page[3] = 1; }, "num_sides");
}

// Issue's bound: batch 128, 32 layers, 8 kv heads, 8192 tokens, 64 high or 112 low tokens a page.
TEST(PageTable, Llama3At8kTokensFits32MegaBytes) {
  AllocatorShape shape = two_sides(128, 32 * 8, worst_case_pages(8192, 64, 112), 1);
  shape.table.tokens_per_page[0] = 64;
  shape.table.tokens_per_page[1] = 112;
  ASSERT_TRUE(shape.validate().is_ok());
  EXPECT_EQ(shape.table.table_slots[0], 129);
  EXPECT_EQ(allocator_bytes(shape).slots, 32768u * 132 * 4);
  EXPECT_LE(allocator_bytes(shape).slots + allocator_bytes(shape).counts, 32u << 20);
}

}  // namespace
}  // namespace tierkv::testing
