// SPDX-License-Identifier: Apache-2.0
// An allocator in host memory that a test owns, and shapes to try.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "allocator/free_ring.h"
#include "tierkv/allocator.h"

namespace tierkv::testing {

struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};

class HostState {
 public:
  explicit HostState(const AllocatorShape& shape) : bytes_(allocator_bytes(shape).total) {
    memory_.reset(std::aligned_alloc(kAllocatorAlignment, bytes_));
    std::memset(memory_.get(), 0xa5, bytes_);
    auto made = make_page_allocator(shape, memory_.get(), bytes_);
    EXPECT_TRUE(made.is_ok()) << made.status().message();
    view_ = *made;
    EXPECT_TRUE(initialize_host(view_).is_ok());
  }
  HostState(const HostState& other) : HostState(other.view_.shape) { copy(other); }
  HostState& operator=(const HostState&) = delete;
  void copy(const HostState& other) { std::memcpy(memory_.get(), other.memory_.get(), bytes_); }

  const PageAllocator& operator*() const { return view_; }
  const PageAllocator* operator->() const { return &view_; }
  void* memory() const { return memory_.get(); }
  size_t bytes() const { return bytes_; }
  // Every byte, padding too: states are made from the same pattern.
  bool operator==(const HostState& other) const {
    return bytes_ == other.bytes_ && std::memcmp(memory(), other.memory(), bytes_) == 0;
  }

 private:
  size_t bytes_;
  std::unique_ptr<void, FreeMemory> memory_;
  PageAllocator view_;
};

// Bidirectional high (2 tokens a page) and low (4): the paper's Figure 6.
inline AllocatorShape two_sides(int32_t sequences, int32_t rows, int32_t slots, int32_t pages) {
  AllocatorShape shape;
  shape.table.num_sequences = sequences;
  shape.table.rows_per_sequence = rows;
  shape.table.num_sides = 2;
  shape.table.table_slots[0] = slots;
  shape.table.tokens_per_page[0] = 2;
  shape.table.tokens_per_page[1] = 4;
  shape.num_pages = pages;
  return shape;
}

// With 1, 2, 3 or 4 precisions.
inline AllocatorShape with_sides(int32_t sides, int32_t sequences, int32_t rows, int32_t pages) {
  AllocatorShape shape = two_sides(sequences, rows, 7, pages);
  shape.table.num_sides = sides;
  shape.table.tokens_per_page[1] = sides > 1 ? 4 : 0;
  shape.table.table_slots[1] = sides > 2 ? 5 : 0;
  shape.table.tokens_per_page[2] = sides > 2 ? 1 : 0;
  shape.table.tokens_per_page[3] = sides > 3 ? 3 : 0;
  return shape;
}

inline std::vector<int32_t> free_ids(const PageAllocator& a) {
  std::vector<int32_t> ids;
  for (int64_t p = a.ring.cursors->start; p < a.ring.cursors->end; ++p) {
    ids.push_back(a.ring.ids[ring_index(p, a.ring.num_pages)]);
  }
  return ids;
}

inline std::vector<int32_t> side_ids(const PageAllocator& a, int32_t row, int32_t side) {
  std::vector<int32_t> ids;
  const SideView view = a.table().side(side);
  for (int32_t i = 0; i < a.pages[row].of[side]; ++i) {
    ids.push_back(view.slots[row * view.row_stride + i * view.direction]);
  }
  return ids;
}

}  // namespace tierkv::testing
