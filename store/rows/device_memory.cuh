// SPDX-License-Identifier: Apache-2.0
// Device memory that a row format takes once and gives back when it goes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "gpu/cuda_device.cuh"
#include "tierkv/status.h"

namespace tierkv::store {

class DeviceMemory {
 public:
  // `what` names the memory in errors; a literal.
  explicit DeviceMemory(const char* what) : what_(what) {}
  ~DeviceMemory() {
    for (void* p : taken_) (void)cudaFree(p);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  int64_t bytes() const { return bytes_; }

  // Aligned to 256 bytes; what it holds is not defined. kOutOfMemory, kCuda.
  template <class T>
  Status take(int64_t count, T** memory) {
    void* p = nullptr;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (Status s = device_allocate(static_cast<size_t>(bytes), what_, &p); !s) return s;
    taken_.push_back(p);
    bytes_ += bytes;
    *memory = static_cast<T*>(p);
    return Status::ok();
  }
  // Zeros, in the stream's order.
  template <class T>
  Status take_zeros(int64_t count, T** memory, cudaStream_t stream) {
    if (Status s = take(count, memory); !s) return s;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    return cuda_status(cudaMemsetAsync(*memory, 0, bytes, stream), what_);
  }
  // A copy of host memory; null where that is empty. Waits.
  template <class T>
  Status put(const std::vector<T>& from, const T** to) {
    *to = nullptr;
    if (from.empty()) return Status::ok();
    T* memory = nullptr;
    if (Status s = take(static_cast<int64_t>(from.size()), &memory); !s) return s;
    *to = memory;
    const size_t bytes = from.size() * sizeof(T);
    cudaError_t error = cudaMemcpy(memory, from.data(), bytes, cudaMemcpyHostToDevice);
    // The copy's last leg may outlast the call, and other streams do not wait for it.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    return cuda_status(error, what_);
  }

 private:
  const char* what_;
  std::vector<void*> taken_;
  int64_t bytes_ = 0;
};

}  // namespace tierkv::store
