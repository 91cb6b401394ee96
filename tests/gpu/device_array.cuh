// SPDX-License-Identifier: Apache-2.0
// Device memory for tests: what goes up, what comes down.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace tierkv::test {

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& from) : count_(from.size()) {
    EXPECT_EQ(cudaMalloc(&memory_, count_ * sizeof(T) + 16), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(memory_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  // Every byte is `byte`.
  DeviceArray(size_t count, int byte) : count_(count) {
    EXPECT_EQ(cudaMalloc(&memory_, count_ * sizeof(T) + 16), cudaSuccess);
    fill(byte);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(memory_); }

  void fill(int byte) { EXPECT_EQ(cudaMemset(memory_, byte, count_ * sizeof(T)), cudaSuccess); }
  // As many as there are.
  void write(const std::vector<T>& from) {
    ASSERT_EQ(from.size(), count_);
    EXPECT_EQ(cudaMemcpy(memory_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  // Waits for all work of the device.
  std::vector<T> read() const {
    std::vector<T> x(count_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    EXPECT_EQ(cudaMemcpy(x.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return x;
  }
  T* get() const { return memory_; }
  size_t size() const { return count_; }

 private:
  T* memory_ = nullptr;
  size_t count_;
};

}  // namespace tierkv::test
