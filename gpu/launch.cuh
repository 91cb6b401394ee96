// Kernel launches of this module: on the caller's stream, overlapping the end of the previous
// kernel where the hardware can (programmatic dependent launch), failures as Status.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "gpu/cuda_device.cuh"
#include "gpu/ptx.cuh"
#include "tierkv/status.h"

namespace tierkv {

// The kernel must call wait_for_previous_kernel() before it touches memory that earlier work may
// write.
template <class... Parameters, class... Arguments>
Status launch_after_previous(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                             size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  int device = 0, major = 0;
  if (Status s = cuda_status(cudaGetDevice(&device), "cudaGetDevice"); !s) return s;
  if (Status s =
          cuda_status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                      "cudaDeviceGetAttribute");
      !s) {
    return s;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
                     "kernel launch");
}

}  // namespace tierkv
