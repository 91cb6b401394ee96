// SPDX-License-Identifier: Apache-2.0
// Page tables: which pages a row holds, by precision.
//
//   row    one (sequence, layer, kv_head):
//          sequence * rows_per_sequence + layer * num_kv_heads + kv_head
//   side   the pages of one precision of a row. Sides 0 and 1 share a bidirectional table: side 0
//          grows from its left end, side 1 from its right end. Sides 2 and 3 share a second table
//   slot   one int32 of a row's table: a page id, or kNoPage
//
// A row's line of slots is table 0 followed by table 1. Readers take a PageTableView and, from it,
// one SideView per precision; only the allocator writes.
//
// Source: DiffKV section 5.2 ("Bidirectional Page Table") and 5.3 ("Supporting Additional Precision
// Levels").
#pragma once

#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/half.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kNoPage = -1;
inline constexpr int32_t kMaxSides = 4;
inline constexpr int32_t kMaxTables = 2;
inline constexpr int32_t kMaxTableSlots = 1 << 16;
inline constexpr int32_t kMaxSequences = 1 << 20;

// A number for each side of one row: of pages or of tokens. Sides that a shape does not have count
// 0.
struct alignas(16) SideCounts {
  int32_t of[kMaxSides] = {0, 0, 0, 0};

  friend bool operator==(const SideCounts& a, const SideCounts& b) {
    return a.of[0] == b.of[0] && a.of[1] == b.of[1] && a.of[2] == b.of[2] && a.of[3] == b.of[3];
  }
  friend bool operator!=(const SideCounts& a, const SideCounts& b) { return !(a == b); }
};

struct TKV_API PageTableShape {
  int32_t num_sequences = 0;      // at once
  int32_t rows_per_sequence = 0;  // num_layers * num_kv_heads
  int32_t num_sides = 2;          // 1 to kMaxSides
  int32_t table_slots[kMaxTables] = {
      0, 0};  // of a row; the second is 0 when there are no sides 2 and 3
  int32_t tokens_per_page[kMaxSides] = {0, 0, 0, 0};

  TKV_HD int32_t num_rows() const { return num_sequences * rows_per_sequence; }
  // Slots from one row's line to the next: both tables, rounded up to 16 bytes.
  TKV_HD int32_t row_stride() const { return (table_slots[0] + table_slots[1] + 3) & ~3; }
  // Offset of page `index` of `side` in the row's line.
  TKV_HD int32_t slot_of(int32_t side, int32_t index) const {
    const int32_t left_end = side < 2 ? 0 : table_slots[0];
    return (side & 1) == 0 ? left_end + index : left_end + table_slots[side >> 1] - 1 - index;
  }
  // kInvalidArgument naming the field, also when the rows or the tokens of a full table exceed 2^31
  // - 1.
  Status validate() const;
};

// One precision of every row. Page i of row r is slots[r * row_stride + i * direction]; its tokens
// are tokens[r * token_stride], all pages but the last full.
struct SideView {
  const int32_t* slots = nullptr;   // slot of page 0 of row 0
  const int32_t* tokens = nullptr;  // of row 0
  int64_t row_stride = 0;
  int64_t token_stride = 0;
  int32_t direction = 1;  // 1 from the left, -1 from the right
  int32_t max_pages = 0;
  int32_t tokens_per_page = 0;
};

// All pointers in one memory, host or device.
struct PageTableView {
  PageTableShape shape;
  const int32_t* slots = nullptr;      // [num_rows][row_stride]
  const SideCounts* tokens = nullptr;  // [num_rows]
  const SideCounts* pages = nullptr;   // [num_rows]

  TKV_HD SideView side(int32_t s) const {
    return {slots + shape.slot_of(s, 0), &tokens->of[s],
            shape.row_stride(),          kMaxSides,
            (s & 1) == 0 ? 1 : -1,       shape.table_slots[s >> 1],
            shape.tokens_per_page[s]};
  }
};

TKV_HD int32_t pages_for(int32_t tokens, int32_t tokens_per_page) {
  return tokens / tokens_per_page + (tokens % tokens_per_page != 0);
}

// The most pages that `tokens` tokens fill however they are dealt to the two sides of a table: all
// on the side with the smaller pages but one, which opens a page of its own. Also the slots a table
// needs for sequences of that length.
TKV_HD int32_t worst_case_pages(int32_t tokens, int32_t left_per_page, int32_t right_per_page) {
  if (tokens <= 0) return 0;
  const int32_t smaller = left_per_page < right_per_page ? left_per_page : right_per_page;
  return pages_for(tokens - 1, smaller) + 1;
}

}  // namespace tierkv
