// SPDX-License-Identifier: Apache-2.0
// Counts of tokens on the device, and what plans ask of the page tables. Bound: launches; all of it
// is a few bytes a (sequence, layer).
#pragma once

#include "gpu/math.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_kernels.h"
#include "store/place/device/device_reports.cuh"

namespace tierkv::store {

inline constexpr int32_t kCountThreads = 256;

__device__ __forceinline__ int32_t grid_thread() {
  return static_cast<int32_t>(blockIdx.x) * kCountThreads + static_cast<int32_t>(threadIdx.x);
}

// A thread per entry of the chunk and per table row of its sequences.
inline __global__ void __launch_bounds__(kCountThreads)
    count_kernel(const __grid_constant__ CountCall c, const __grid_constant__ IdChunk ids) {
  wait_for_previous_kernel();
  const int32_t i = grid_thread(), threads = c.threads_of_sequence();
  if (i >= c.count * threads) return;
  const int32_t within = i / threads, l = i - within * threads, sequence = c.first + within;
  const int32_t layer = c.first_layer + l;
  const bool is_named = c.replayed != nullptr && c.replayed[0] >= c.capture;
  const bool is_other = is_named && c.replayed[1] == c.total;
  const int32_t slot = is_other ? c.replayed[2 + sequence] : ids.slots[within];
  if (is_named && !is_other) report_fault(c.fault, {StatusCode::kInvalidArgument, slot, -1, -1});
  if (l < c.rows) {
    const SideCounts now = c.held[static_cast<int64_t>(slot) * c.rows + l];
    const int64_t row = static_cast<int64_t>(sequence) * c.rows + l;
    c.row_counts.kept[row] = now;
    c.row_counts.target[row] = now;
  }
  if (l == 0) c.batch.slots[sequence] = slot;
  if (l >= c.layers) return;
  const LayerTokens from = c.counts[static_cast<int64_t>(slot) * c.num_layers + layer];
  const LayerTokens to = after(c.law, c.laws, from, c.tokens);
  const int64_t entry = static_cast<int64_t>(sequence) * c.layers + l;
  c.batch.from[entry] = from;
  c.batch.to[entry] = to;
  const bool begins = c.law == CountLaw::kBegin;
  c.batch.at[static_cast<int64_t>(layer) * c.max_sequences + sequence] = {
      to.tokens + (begins ? c.tokens : 0), to.body_end};
}

inline __global__ void __launch_bounds__(kCountThreads)
    commit_kernel(const __grid_constant__ DeviceWorks works) {
  wait_for_previous_kernel();
  commit(works);
}

// A CTA per table row.
inline __global__ void __launch_bounds__(kCountThreads)
    page_copy_kernel(const __grid_constant__ PagesView pages, const PageCopy* copies) {
  wait_for_previous_kernel();
  for (int32_t side = 0; side < kMaxSides; ++side) {
    const PageCopy copy = copies[static_cast<int64_t>(blockIdx.x) * kMaxSides + side];
    if (copy.source == kNoPage) continue;
    const auto* from = reinterpret_cast<const uint4*>(pages.base + copy.source * pages.page_bytes);
    auto* to = reinterpret_cast<uint4*>(pages.base + copy.target * pages.page_bytes);
    const auto words = static_cast<int32_t>(pages.page_bytes / 16);
    for (int32_t i = threadIdx.x; i < words; i += kCountThreads) to[i] = from[i];
  }
}

// to[first + i] = values[i].
inline __global__ void __launch_bounds__(kIdChunk)
    put_ids_kernel(const __grid_constant__ IdChunk values, int32_t first, int32_t* to) {
  wait_for_previous_kernel();
  to[first + static_cast<int32_t>(threadIdx.x)] = values.slots[threadIdx.x];
}

// A thread per table row of a batch, about what a plan has made of its counts; `needs` begins with
// zeros.
inline __global__ void __launch_bounds__(kCountThreads)
    needs_kernel(const __grid_constant__ PageAllocator a,
                 const __grid_constant__ SequenceBatch batch,
                 const __grid_constant__ DeviceRowCounts counts, PageNeeds* needs) {
  wait_for_previous_kernel();
  const int32_t i = grid_thread(), rows = a.shape.table.rows_per_sequence;
  if (i >= batch.count * rows) return;
  const int32_t row = batch.sequences[i / rows] * rows + i % rows;
  const PageDemand demand = page_demand(a, row, counts.kept[i], counts.target[i]);
  if (demand.is_beyond) atomicAdd(&needs->beyond, 1);
  if (demand.fresh != 0) {
    atomicAdd(&needs->fresh, static_cast<unsigned long long>(demand.fresh));
  }
  if (demand.exchanged != 0) {
    atomicAdd(&needs->exchanged, static_cast<unsigned long long>(demand.exchanged));
  }
}

}  // namespace tierkv::store
