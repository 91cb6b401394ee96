// SPDX-License-Identifier: Apache-2.0
#include "store/place/device/count_kernels.cuh"

#include <algorithm>

#include "gpu/launch.cuh"
#include "store/place/device/device_kernels.h"

namespace tierkv::store {
namespace {

constexpr int32_t kCopyThreads = 256;

// A CTA per table row.
__global__ void __launch_bounds__(kCopyThreads)
    page_copy_kernel(const __grid_constant__ DevicePagesView pages, const PageCopy* copies) {
  wait_for_previous_kernel();
  for (int32_t side = 0; side < kMaxSides; ++side) {
    const PageCopy copy = copies[static_cast<int64_t>(blockIdx.x) * kMaxSides + side];
    if (copy.source == kNoPage) continue;
    const auto* from = reinterpret_cast<const uint4*>(pages.base + copy.source * pages.page_bytes);
    auto* to = reinterpret_cast<uint4*>(pages.base + copy.target * pages.page_bytes);
    const auto words = static_cast<int32_t>(pages.page_bytes / 16);
    for (int32_t i = threadIdx.x; i < words; i += kCopyThreads) to[i] = from[i];
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    ids_kernel(const __grid_constant__ IdChunk ids, int32_t* to, int32_t count) {
  wait_for_previous_kernel();
  for (int32_t i = threadIdx.x; i < count; i += kCopyThreads) to[i] = ids.slots[i];
}

dim3 ctas_for(int64_t threads) {
  return dim3(
      static_cast<uint32_t>(std::max<int64_t>(1, (threads + kCountThreads - 1) / kCountThreads)));
}

template <class Launch>
Status for_each_chunk(const std::vector<int32_t>& slots, Launch launch) {
  const auto total = static_cast<int32_t>(slots.size());
  for (int32_t first = 0; first < total; first += kIdChunk) {
    const int32_t count = std::min(kIdChunk, total - first);
    IdChunk ids = {};
    std::copy_n(slots.begin() + first, count, ids.slots);
    if (Status s = launch(ids, first, count); !s) return s;
  }
  return Status::ok();
}

}  // namespace

Status launch_counts(CountCall call, const std::vector<int32_t>& slots, GpuStream stream) {
  return for_each_chunk(slots, [&](const IdChunk& ids, int32_t first, int32_t count) {
    call.first = first;
    call.count = count;
    return launch_after_previous(count_kernel, ctas_for(int64_t{count} * call.layers),
                                 kCountThreads, 0, stream, call, ids);
  });
}

Status launch_commit(const CommitCall& call, GpuStream stream) {
  return launch_after_previous(commit_kernel, ctas_for(call.entries), kCountThreads, 0, stream,
                               call);
}

Status launch_row_counts(const RowCountsCall& call, GpuStream stream) {
  const int64_t rows = int64_t{call.count} * call.allocator.shape.table.rows_per_sequence;
  return launch_after_previous(row_counts_kernel, ctas_for(rows), kCountThreads, 0, stream, call);
}

Status launch_needs(const RowCountsCall& call, PageNeeds* needs, GpuStream stream) {
  const int64_t rows = int64_t{call.count} * call.allocator.shape.table.rows_per_sequence;
  return launch_after_previous(needs_kernel, ctas_for(rows), kCountThreads, 0, stream, call, needs);
}

Status launch_ids(const std::vector<int32_t>& slots, int32_t* to, GpuStream stream) {
  return for_each_chunk(slots, [&](const IdChunk& ids, int32_t first, int32_t count) {
    return launch_after_previous(ids_kernel, 1, kCopyThreads, 0, stream, ids, to + first, count);
  });
}

Status launch_page_copies(const DevicePagesView& pages, const PageCopy* copies, int32_t rows,
                          GpuStream stream) {
  return launch_after_previous(page_copy_kernel, static_cast<uint32_t>(rows), kCopyThreads, 0,
                               stream, pages, copies);
}

Status launch_staged_layer(const DevicePagesView& pages, const StagedLayer& call,
                           GpuStream stream) {
  constexpr int32_t kLeastCtas = 64, kMostCtas = 1024;
  const int32_t ctas = std::clamp(call.count, kLeastCtas, kMostCtas);
  return launch_after_previous(staged_layer_kernel, static_cast<uint32_t>(ctas), kStagedThreads, 0,
                               stream, pages, call);
}

}  // namespace tierkv::store
