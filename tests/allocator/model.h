// SPDX-License-Identifier: Apache-2.0
// The allocator as one would explain it: a queue of free pages, a list of pages per row and side, a
// reference count per page. Works on a copy of itself and throws the copy away when an operation
// fails. Shares no code with allocator/.
#pragma once

#include <deque>
#include <set>
#include <string>
#include <vector>

#include "tierkv/allocator.h"

namespace tierkv::testing {

class Model {
 public:
  explicit Model(const AllocatorShape& shape);

  // Runs the operation and returns the report it should give; op.report and op.copies are not
  // touched.
  OpReport run(const PageOp& op);
  // Copies of the last successful fork or truncate, [batch rows][kMaxSides].
  const std::vector<PageCopy>& copies() const { return copies_; }
  // Empty when `a` (host memory) says the same.
  std::string difference(const PageAllocator& a) const;

 private:
  struct Row {
    std::vector<int32_t> pages[kMaxSides];
    int32_t tokens[kMaxSides] = {0, 0, 0, 0};
  };
  struct Fault {
    StatusCode status;
    int32_t batch_row;
  };

  StatusCode admit(const PageOp& op, int32_t entry) const;
  StatusCode run_row(const PageOp& op, int32_t entry, int32_t batch_row, Row* row);
  StatusCode append(const SideCounts& added, Row* row);
  StatusCode grow(const SideCounts& tokens, Row* row);
  StatusCode reserve(const SideCounts& more, Row* row);
  StatusCode keep(const SideCounts& tokens, Row* row);
  StatusCode truncate(const SideCounts& tokens, int32_t batch_row, Row* row);
  StatusCode fork(const Row& source, int32_t batch_row, Row* row);
  StatusCode check_tokens(const SideCounts& tokens) const;
  bool tables_fit(const Row& row) const;
  bool is_shared(int32_t page) const { return references_[page] > 1; }
  int32_t take();
  void drop_later(int32_t batch_row, int32_t side, int32_t index, int32_t page);
  void drop_all();

  struct Drop {
    int32_t batch_row, slot, page;
  };

  AllocatorShape shape_;
  std::deque<int32_t> free_;
  std::vector<int32_t> references_;
  std::set<int32_t> reserved_;  // pages that the allocator does not count yet
  std::vector<SequenceState> states_;
  std::vector<Row> rows_;
  std::vector<PageCopy> copies_;
  std::vector<Drop> drops_;
  int64_t needed_ = 0;
  int64_t returned_ = 0;
};

}  // namespace tierkv::testing
