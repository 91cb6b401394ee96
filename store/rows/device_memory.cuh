// SPDX-License-Identifier: Apache-2.0
// Device memory of a store: what it takes once and gives back when it goes, and what calls need
// for a while.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
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
  // The first failure of the calls below, kOutOfMemory or kCuda; after it they do nothing.
  const Status& status() const { return status_; }

  // `count` of each, aligned to 256 bytes; what they hold is not defined.
  template <class... T>
  void take(int64_t count, T**... memory) {
    (take_one(count, memory), ...);
  }
  // Zeros, in the stream's order.
  template <class... T>
  void take_zeros(cudaStream_t stream, int64_t count, T**... memory) {
    const auto fill = [&](auto** one) {
      take_one(count, one);
      if (!status_) return;
      const size_t bytes = static_cast<size_t>(count) * sizeof(**one);
      keep(cuda_status(cudaMemsetAsync(*one, 0, bytes, stream), what_));
    };
    (fill(memory), ...);
  }
  // A copy of host memory; null where that is empty. Waits.
  template <class T>
  void put(const std::vector<T>& from, const T** to) {
    *to = nullptr;
    if (from.empty()) return;
    T* memory = nullptr;
    take_one(static_cast<int64_t>(from.size()), &memory);
    if (!status_) return;
    *to = memory;
    const size_t bytes = from.size() * sizeof(T);
    cudaError_t error = cudaMemcpy(memory, from.data(), bytes, cudaMemcpyHostToDevice);
    // The copy's last leg may outlast the call, and other streams do not wait for it.
    if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
    keep(cuda_status(error, what_));
  }

 private:
  void keep(Status s) { (void)(status_ = std::move(s)); }
  template <class T>
  void take_one(int64_t count, T** memory) {
    if (!status_) return;
    void* p = nullptr;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    keep(device_allocate(static_cast<size_t>(bytes), what_, &p));
    if (!status_) return;
    taken_.push_back(p);
    bytes_ += bytes;
    *memory = static_cast<T*>(p);
  }

  const char* what_;
  std::vector<void*> taken_;
  int64_t bytes_ = 0;
  Status status_;
};

// Memory out of a stream's pool. It is kept from call to call, because a pool gives memory back to
// the device whenever somebody waits.
class PoolMemory {
 public:
  // What it holds is not defined. Earlier calls of the stream may still use what was reserved
  // before. kOutOfMemory for `what`, kCuda.
  Status reserve(int64_t bytes, cudaStream_t stream, const char* what) {
    if (bytes <= bytes_) return Status::ok();
    memory_.reset();
    bytes_ = 0;
    void* memory = nullptr;
    const cudaError_t error = cudaMallocAsync(&memory, static_cast<size_t>(bytes), stream);
    if (error == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return Status(StatusCode::kOutOfMemory, std::string(what) + ": no device memory");
    }
    if (Status s = cuda_status(error, what); !s) return s;
    memory_.reset(memory, [stream](void* p) { cudaFreeAsync(p, stream); });
    bytes_ = bytes;
    return Status::ok();
  }
  // Aligned to 256 bytes.
  uint8_t* get() const { return static_cast<uint8_t*>(memory_.get()); }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0;
};

}  // namespace tierkv::store
