// SPDX-License-Identifier: Apache-2.0
// Device memory of tests that is filled again and again.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace tierkv::testing {

// Device memory that grows with what is put into it.
class Buffer {
 public:
  ~Buffer() { cudaFree(memory_); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  template <class T>
  T* put(const std::vector<T>& x) {
    const size_t bytes = x.size() * sizeof(T);
    if (bytes > bytes_) {
      cudaFree(memory_);
      EXPECT_EQ(cudaMalloc(&memory_, bytes), cudaSuccess);
      bytes_ = bytes;
    }
    EXPECT_EQ(cudaMemcpy(memory_, x.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return static_cast<T*>(memory_);
  }
  template <class T>
  std::vector<T> read(size_t count) const {
    std::vector<T> x(count);
    EXPECT_EQ(cudaMemcpy(x.data(), memory_, count * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return x;
  }
  template <class T>
  T* get() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tierkv::testing
