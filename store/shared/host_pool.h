// The memory of a host back end: its pages, and the allocator's state.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "tierkv/allocator.h"
#include "tierkv/page.h"
#include "tierkv/store.h"

namespace tierkv {

class HostPool {
 public:
  // Empty. kOutOfMemory when there is no memory for it.
  static Result<HostPool> make(const AllocatorShape& shape, int64_t page_bytes);

  const PageAllocator& allocator() const { return allocator_; }
  PageView pages() const;
  void* allocator_memory() const { return allocator_memory_.get(); }
  // The fields of StoreStats that are of pages.
  void count_pages(StoreStats* stats) const;

 private:
  struct FreeMemory {
    void operator()(void* p) const { std::free(p); }
  };
  using Memory = std::unique_ptr<void, FreeMemory>;

  Memory pages_, allocator_memory_;
  PageAllocator allocator_;
  int64_t page_bytes_ = 0;
};

}  // namespace tierkv
