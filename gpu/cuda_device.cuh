// SPDX-License-Identifier: Apache-2.0
// CUDA's errors as statuses, and what a launch must know of the current device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tierkv/status.h"

namespace tierkv {

// "WHAT: CUDA's text"; kCuda.
inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::ok();
  return Status(StatusCode::kCuda, std::string(what) + ": " + cudaGetErrorString(error));
}

// cudaMalloc() of at least one byte. kOutOfMemory, which leaves no error behind; kCuda.
inline Status device_allocate(size_t bytes, const char* what, void** memory) {
  const cudaError_t error = cudaMalloc(memory, bytes > 0 ? bytes : 1);
  if (error != cudaErrorMemoryAllocation) return cuda_status(error, what);
  (void)cudaGetLastError();
  return Status(StatusCode::kOutOfMemory,
                std::string(what) + ": no device memory for " + std::to_string(bytes) + " bytes");
}

struct DeviceLimits {
  int32_t sms = 0;
  int32_t shared_bytes = 0;    // the most dynamic shared memory that a CTA may opt in to
  int32_t reserved_bytes = 0;  // of each CTA's shared memory, taken by the driver
};

// The limits of the current device.
inline Result<DeviceLimits> device_limits() {
  int device = 0;
  if (Status s = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !s) return s;
  DeviceLimits limits;
  const std::pair<cudaDeviceAttr, int32_t*> asked[] = {
      {cudaDevAttrMultiProcessorCount, &limits.sms},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, &limits.shared_bytes},
      {cudaDevAttrReservedSharedMemoryPerBlock, &limits.reserved_bytes}};
  for (const auto& [attribute, to] : asked) {
    const cudaError_t error = cudaDeviceGetAttribute(to, attribute, device);
    if (Status s = cuda_status(error, "cudaDeviceGetAttribute"); !s) return s;
  }
  return limits;
}

// CTAs for so many items, per_cta each.
inline uint32_t ctas_for(int64_t items, int64_t per_cta) {
  return static_cast<uint32_t>((items + per_cta - 1) / per_cta);
}

}  // namespace tierkv
