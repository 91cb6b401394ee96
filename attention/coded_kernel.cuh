// The kernel of coded attention. A warp owns a run of items and one ring of slots; no warp waits
// for another but at the beginning, when the CTA copies its tables.
//
// Bound: shared-memory wavefronts of the lookups; copies of the tables make them fewer.
#pragma once

#include "attention/coded_warp.cuh"

namespace tierkv {

struct CodedKernelParams {
  CodedAttention call;
  CodedAttentionGrid grid;
  CodedHeaders headers;
  uint32_t key_mask, value_mask;  // of the tables in shared memory
};

// By the whole warp: the last row whose first item is at most `item`.
__device__ __forceinline__ int32_t find_row(const CodedAttention& call, int32_t item) {
  int32_t low = 0, count = call.num_rows;
  while (count > 1) {
    const int32_t stride = (count + 31) / 32, i = static_cast<int32_t>(threadIdx.x % 32) * stride;
    const bool before = i < count && call.rows[low + i].first_item <= item;
    const int32_t found = max(1, __popc(__ballot_sync(kFullWarp, before)));
    low += (found - 1) * stride;
    count = min(stride, count - (found - 1) * stride);
  }
  return low;
}

template <int kCopiesLog>
__device__ __forceinline__ void fill_table(uint32_t address, const DeviceCodebook& c) {
  constexpr uint32_t kCopies = 1u << kCopiesLog;
  const uint32_t entries = 1u << c.max_length;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < entries; i += blockDim.x) {
    const uint32_t x = c.table[i], to = address + 4 * kCopies * i;
    if constexpr (kCopies == 1) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x));
    } else {
      // Eight lanes write at a time: each begins at another copy, so that they fill all banks.
      const uint32_t turn = threadIdx.x * kCopies / 32;
#pragma unroll
      for (uint32_t i4 = 0; i4 < kCopies / 4; ++i4) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         to + 16 * ((i4 + turn) % (kCopies / 4))),
                     "r"(x));
      }
    }
  }
}

inline constexpr int32_t kCodedWarps = 16;

template <int kDimBlocks, int kStreams, int kCopiesLog>
__global__ void __launch_bounds__(kCodedWarps * 32, 1)
    coded_attention_kernel(const __grid_constant__ CodedKernelParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  const DeviceCodebook &key_book = call.keys.codebook, &value_book = call.values.codebook;
  const auto region = static_cast<uint32_t>(
      table_region_bytes(max(key_book.max_length, value_book.max_length), kCopiesLog));
  const uint32_t start = shared_address(shared);
  const auto slots = static_cast<uint32_t>(kCodedWarps * grid.slots_per_warp);
  const CodedSharedLayout layout =
      coded_shared_layout(start, region, static_cast<uint32_t>(grid.slot_bytes), slots);
  const bool fits = layout.end - start <= static_cast<uint32_t>(grid.shared_bytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* barriers = reinterpret_cast<uint64_t*>(shared) + warp * grid.slots_per_warp;
  if (is_first_lane()) {
    for (int32_t i = 0; i < grid.slots_per_warp; ++i) init_barrier(barriers + i);
  }
  publish_barriers();
  wait_for_previous_kernel();
  const int32_t global_warp = warp * static_cast<int32_t>(gridDim.x) + blockIdx.x;
  int64_t item = int64_t{global_warp} * grid.items_per_warp;
  const int64_t last = min(item + grid.items_per_warp, int64_t{call.num_items});
  int32_t row = item < last ? find_row(call, static_cast<int32_t>(item)) : 0;
  if (fits) {
    fill_table<kCopiesLog>(layout.tables, key_book);
    fill_table<kCopiesLog>(layout.tables + region, value_book);
  }
  __syncthreads();

  const auto first_slot = static_cast<uint32_t>(warp * grid.slots_per_warp);
  const auto slot_bytes = static_cast<uint32_t>(grid.slot_bytes);
  const bool two = grid.slots_per_warp == 2;
  const uint32_t slot = layout.slot(first_slot, slot_bytes);
  BlockRing ring{slot,
                 shared_address(barriers),
                 two ? slot ^ layout.slot(first_slot + 1, slot_bytes) : 0,
                 two ? static_cast<uint32_t>(sizeof(uint64_t)) : 0,
                 slot_bytes,
                 grid.slots_per_warp};
  CodedWarp<kDimBlocks, kStreams, kCopiesLog> worker{
      call,
      ring,
      params.headers,
      SharedTable<kCopiesLog>(layout.tables, params.key_mask),
      SharedTable<kCopiesLog>(layout.tables + region, params.value_mask),
      {},
      {},
      0};
  while (item < last) {
    int64_t end = last;
    // Rows without items are passed over.
    int32_t next = row + 1;
    while (next < call.num_rows && call.rows[next].first_item <= item) row = next++;
    if (next < call.num_rows) end = min(end, int64_t{call.rows[next].first_item});
    float* partial = static_cast<float*>(call.workspace) +
                     (int64_t{global_warp} + row) * coded_partial_floats(call);
    worker.row_index = row;
    worker.attend_row(static_cast<int32_t>(item), static_cast<int32_t>(end), fits, partial);
    item = end;
    row = next;
  }
}

}  // namespace tierkv
