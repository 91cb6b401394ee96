// SPDX-License-Identifier: Apache-2.0
// What kernels tell: the first failure, which stays until the host takes it; and, at the end of a
// page operation, counts that become valid and the free pages.
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

// By all threads of a grid of one dimension, whose kernel has waited for the one before.
__device__ __forceinline__ void commit(const DeviceWorks& works) {
  const DeviceCommit& c = works.commit;
  if (c.published == nullptr) return;
  const auto thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto threads = static_cast<int32_t>(gridDim.x * blockDim.x);
  for (int32_t e = thread; c.counts != nullptr && e < works.entries(); e += threads) {
    const DeviceEntry at = works.entry(e);
    c.counts[int64_t{at.slot} * c.num_layers + at.layer] = works.to[e];
  }
  if (thread != 0) return;
  if (!works.has_pages()) report_fault(c.fault, {works.report->status, -1, -1, -1});
  const int64_t free = c.cursors->end - c.cursors->start;
  if (free < *c.least_free) *c.least_free = free;
  const auto number = static_cast<uint32_t>(c.state->op_number);
  *static_cast<volatile uint64_t*>(c.published) = static_cast<uint64_t>(free) << 32 | number;
}

}  // namespace tierkv::store
