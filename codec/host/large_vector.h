// SPDX-License-Identifier: Apache-2.0
// Vectors for rows and whole layers. Their memory is not cleared when it grows, and asks for large
// pages where it is large: a fresh small page costs the kernel about as much as encoding what is
// written into it.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace tierkv {

template <class T>
struct LargeAllocator {
  using value_type = T;
  static constexpr size_t kLargePage = size_t{2} << 20;
  static constexpr size_t kLeast = kLargePage / 2;  // bytes that take a large page

  LargeAllocator() = default;
  template <class U>
  LargeAllocator(const LargeAllocator<U>&) {}

  T* allocate(size_t n) {
    if (n > SIZE_MAX / sizeof(T) - kLargePage) throw std::bad_alloc();
    const size_t bytes = n * sizeof(T);
    if (bytes < kLeast) return static_cast<T*>(::operator new(bytes));
    const size_t rounded = (bytes + kLargePage - 1) / kLargePage * kLargePage;
    void* memory = std::aligned_alloc(kLargePage, rounded);
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, rounded, MADV_HUGEPAGE);  // where it is refused, small pages do
    return static_cast<T*>(memory);
  }
  void deallocate(T* p, size_t n) {
    if (n * sizeof(T) < kLeast) {
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
  friend bool operator==(const LargeAllocator&, const LargeAllocator&) { return true; }
  friend bool operator!=(const LargeAllocator&, const LargeAllocator&) { return false; }
};

template <class T>
using LargeVector = std::vector<T, LargeAllocator<T>>;
using LargeBytes = LargeVector<uint8_t>;

}  // namespace tierkv
