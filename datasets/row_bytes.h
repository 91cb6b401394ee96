// Memory for rows. It is not cleared when it grows, and asks for large pages where it is large: a
// fresh small page costs the kernel about as much as encoding what is written into it.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace tierkv::datasets {

template <class T>
struct RowAllocator {
  using value_type = T;
  static constexpr size_t kLargePage = size_t{2} << 20;

  RowAllocator() = default;
  template <class U>
  RowAllocator(const RowAllocator<U>&) {}

  T* allocate(size_t n) {
    if (n > SIZE_MAX / sizeof(T) - kLargePage) throw std::bad_alloc();
    const size_t bytes = n * sizeof(T);
    if (bytes < kLargePage) return static_cast<T*>(::operator new(bytes));
    const size_t rounded = (bytes + kLargePage - 1) / kLargePage * kLargePage;
    void* memory = std::aligned_alloc(kLargePage, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, rounded, MADV_HUGEPAGE);  // where it is refused, small pages do
    return static_cast<T*>(memory);
  }
  void deallocate(T* p, size_t n) {
    if (n * sizeof(T) < kLargePage) {
      ::operator delete(p);
    } else {
      std::free(p);
    }
  }
  // resize() leaves new elements unset.
  template <class U, class... Args>
  void construct(U* p, Args&&... args) {
    if constexpr (sizeof...(Args) == 0) {
      ::new (static_cast<void*>(p)) U;
    } else {
      ::new (static_cast<void*>(p)) U(std::forward<Args>(args)...);
    }
  }
  friend bool operator==(const RowAllocator&, const RowAllocator&) { return true; }
  friend bool operator!=(const RowAllocator&, const RowAllocator&) { return false; }
};

template <class T>
using RowVector = std::vector<T, RowAllocator<T>>;
using RowBytes = RowVector<uint8_t>;

}  // namespace tierkv::datasets
