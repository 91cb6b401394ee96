// Page operations of a live sequence, as the host back ends use them: a report's failure becomes a
// status, and sides grow or shrink by any number of pages.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/allocator.h"

namespace tierkv {

Status run_page_op(const PageAllocator& a, const PageOp& op);

int64_t free_pages(const PageAllocator& a);
// kOutOfPages when fewer are free.
Status require_pages(const PageAllocator& a, int64_t needed);

// Brings the sides of every row of a live sequence to `target` [rows_per_sequence], none smaller
// than now. The pages must be there: require_pages().
void grow_sides(const PageAllocator& a, int32_t slot, const std::vector<SideCounts>& target);
// Takes from the end of the sides. Shared pages that are left partly filled are exchanged: the
// copies to carry out are returned.
std::vector<PageCopy> shrink_sides(const PageAllocator& a, int32_t slot,
                                   const std::vector<SideCounts>& target);

}  // namespace tierkv
