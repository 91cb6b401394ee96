#include "store/shared/host_pages.h"

#include <algorithm>
#include <string>

namespace tierkv {
namespace {

Status out_of_pages(int64_t needed, int64_t free) {
  return Status(StatusCode::kOutOfPages,
                std::to_string(needed) + " pages needed, " + std::to_string(free) + " are free");
}

}  // namespace

Status run_page_op(const PageAllocator& a, const PageOp& op) {
  if (Status s = run_page_op_host(a, op); !s) return s;
  const OpReport& report = *op.report;
  if (report.status == StatusCode::kOk) return Status::ok();
  if (report.status == StatusCode::kOutOfPages) {
    return out_of_pages(report.pages_needed, report.pages_needed - report.pages_missing);
  }
  return Status(report.status, "row " + std::to_string(report.batch_row));
}

int64_t free_pages(const PageAllocator& a) {
  return a.ring.cursors->end - a.ring.cursors->start;
}

Status require_pages(const PageAllocator& a, int64_t needed) {
  const int64_t free = free_pages(a);
  return needed > free ? out_of_pages(needed, free) : Status::ok();
}

void grow_sides(const PageAllocator& a, int32_t slot, const std::vector<SideCounts>& target) {
  const PageTableShape& shape = a.shape.table;
  std::vector<SideCounts> added(target.size());
  for (bool more = true; more;) {
    more = false;
    for (size_t r = 0; r < target.size(); ++r) {
      const int32_t row = slot * shape.rows_per_sequence + static_cast<int32_t>(r);
      for (int32_t side = 0; side < shape.num_sides; ++side) {
        const int64_t pages = int64_t{a.pages[row].of[side]} + 1;
        const int64_t most = pages * shape.tokens_per_page[side];  // one new page an operation
        const int64_t now = std::min<int64_t>(target[r].of[side], most);
        added[r].of[side] = static_cast<int32_t>(now - a.tokens[row].of[side]);
        more |= added[r].of[side] > 0;
      }
    }
    OpReport report;
    if (more) (void)run_page_op(a, PageOp::append({&slot, 1}, added.data(), &report));
  }
}

std::vector<PageCopy> shrink_sides(const PageAllocator& a, int32_t slot,
                                   const std::vector<SideCounts>& target) {
  std::vector<PageCopy> copies(target.size() * kMaxSides);
  OpReport report;
  (void)run_page_op(a, PageOp::truncate({&slot, 1}, target.data(), copies.data(), &report));
  return copies;
}

}  // namespace tierkv
