// SPDX-License-Identifier: Apache-2.0
// The id of the capture under way on a stream; 0 where calls run at once.
#pragma once

#include "gpu/cuda_device.cuh"

namespace tierkv {

inline Result<uint64_t> capture_id(GpuStream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  if (error != cudaSuccess) return cuda_status(error, "capture");
  return status == cudaStreamCaptureStatusNone ? uint64_t{0} : uint64_t{id};
}

}  // namespace tierkv
