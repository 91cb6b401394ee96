#include "store/shared/host_pool.h"

#include <string>

#include "store/shared/host_pages.h"

namespace tierkv {
namespace {

// std::aligned_alloc wants a multiple of the alignment.
void* allocate_aligned(size_t alignment, size_t bytes) {
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

}  // namespace

Result<HostPool> HostPool::make(const AllocatorShape& shape, int64_t page_bytes) {
  const size_t pool_bytes = static_cast<size_t>(page_bytes) * shape.num_pages;
  const size_t bytes = allocator_bytes(shape).total;
  HostPool pool;
  pool.page_bytes_ = page_bytes;
  pool.pages_.reset(allocate_aligned(kPageAlignment, pool_bytes));
  pool.allocator_memory_.reset(allocate_aligned(kAllocatorAlignment, bytes));
  if (pool.pages_ == nullptr || pool.allocator_memory_ == nullptr) {
    return Status(StatusCode::kOutOfMemory,
                  "no memory for a pool of " + std::to_string(pool_bytes + bytes) + " bytes");
  }
  const Result<PageAllocator> a = make_page_allocator(shape, pool.allocator_memory_.get(), bytes);
  if (!a) return a.status();
  pool.allocator_ = *a;
  if (Status s = initialize_host(*a); !s) return s;
  return Result<HostPool>(std::move(pool));
}

PageView HostPool::pages() const {
  return {static_cast<uint8_t*>(pages_.get()), allocator_.records, page_bytes_,
          allocator_.shape.num_pages};
}

void HostPool::count_pages(StoreStats* stats) const {
  stats->pages = allocator_.shape.num_pages;
  stats->pages_free = static_cast<int32_t>(free_pages(allocator_));
  stats->page_bytes = page_bytes_;
  for (int32_t page = 0; page < stats->pages; ++page) {
    stats->pages_shared += is_frozen(allocator_, page);
  }
}

}  // namespace tierkv
