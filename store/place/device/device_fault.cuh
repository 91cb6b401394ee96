// SPDX-License-Identifier: Apache-2.0
// How a kernel tells a failure: the first one stays until the host takes it.
#pragma once

#include "gpu/math.cuh"
#include "store/rows/device_row_format.h"

namespace tierkv::store {

__device__ __forceinline__ void report_fault(DeviceFault* fault, const DeviceFault& what) {
  auto* status = reinterpret_cast<int32_t*>(&fault->status);
  if (atomicCAS(status, 0, static_cast<int32_t>(what.status)) != 0) return;
  fault->slot = what.slot;
  fault->layer = what.layer;
  fault->kv_head = what.kv_head;
}

}  // namespace tierkv::store
