// SPDX-License-Identifier: Apache-2.0
// Kernel launches of this module: on the caller's stream, overlapping the end of the previous
// kernel where the kernel's code can (programmatic dependent launch), failures as Status.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <utility>

#include "gpu/cuda_device.cuh"
#include "tierkv/status.h"

namespace tierkv {

// Its image tells what the kernels of this binary were compiled for.
template <int>
__global__ void image_kernel() {}

// The architecture that the code for the current device was compiled for, 10 * major + minor: what
// __CUDA_ARCH__ / 10 is in its kernels. PTX of compute_80 gives 80 on a device of 9.0, too, where
// the device's own number would promise what the kernels lack.
inline cudaError_t image_architecture(int32_t* architecture) {
  constexpr int kMostDevices = 64;
  static std::atomic<int32_t> known[kMostDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (device < kMostDevices) *architecture = known[device].load(std::memory_order_relaxed);
  if (device < kMostDevices && *architecture != 0) return cudaSuccess;
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(image_kernel<0>));
  if (error != cudaSuccess) return error;
  *architecture = attributes.ptxVersion;
  if (device < kMostDevices) known[device].store(*architecture, std::memory_order_relaxed);
  return cudaSuccess;
}

// Clears an error that it returns, so that later calls do not report the error again.
inline Status launched(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return cuda_status(error, "kernel launch");
}
inline cudaLaunchConfig_t launch_config(dim3 grid, dim3 block, size_t shared_bytes,
                                        cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

// A kernel that begins when all earlier work has ended.
template <class... Parameters, class... Arguments>
Status launch_kernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                     cudaStream_t stream, Arguments&&... arguments) {
  const cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
  return launched(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// The kernel must call wait_for_previous_kernel() before it touches memory that earlier work may
// write, unless a contract says that this work has ended when it starts. Code in which that does
// nothing is launched without overlap: a kernel before it, which may be anybody's, could otherwise
// let it start before its data is there.
template <class... Parameters, class... Arguments>
Status launch_after_previous(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                             size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  int32_t architecture = 0;
  if (Status s = cuda_status(image_architecture(&architecture), "code for the device"); !s) {
    return s;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = launch_config(grid, block, shared_bytes, stream);
  config.attrs = &overlap;
  config.numAttrs = architecture >= 90 ? 1 : 0;
  return launched(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

}  // namespace tierkv
