// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "allocator/free_ring.h"
#include "gpu/launch.cuh"
#include "tierkv/allocator.h"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    initialize_kernel(const __grid_constant__ PageAllocator a) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t rows = a.shape.table.num_rows();
  for (int64_t i = first; i < rows * a.shape.table.row_stride(); i += step) a.slots[i] = kNoPage;
  for (int64_t i = first; i < rows; i += step) a.tokens[i] = a.pages[i] = SideCounts{};
  for (int64_t i = first; i < a.shape.table.num_sequences; i += step) {
    a.sequences[i] = {0, SequenceState::kFree, 0, {}};
  }
  for (int64_t i = first; i < a.shape.num_pages; i += step) {
    a.ring.ids[i] = static_cast<int32_t>(i);
    a.references[i] = 1;
    a.drop_marks[i] = {0, 0};
  }
  if (first != 0) return;
  *a.ring.cursors = {0, a.shape.num_pages};
  *a.state = {kNoError, 1, 0, 0};
}

}  // namespace

Status initialize_device(const PageAllocator& a, GpuStream stream) {
  if (a.slots == nullptr || a.state == nullptr) {
    return {StatusCode::kInvalidArgument, "allocator has no memory"};
  }
  return launch_kernel(initialize_kernel, 1024, kThreads, 0, stream, a);
}

}  // namespace tierkv
