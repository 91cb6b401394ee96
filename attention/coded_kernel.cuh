// The kernel of coded attention. A warp owns a run of items and one ring of slots; no warp waits
// for another but at the beginning, when the CTA copies its tables.
//
// Bound: shared-memory wavefronts of the lookups; copies of the tables make them fewer.
#pragma once

#include "attention/coded_warp.cuh"

namespace tierkv {

// By the whole warp: the last row whose first item is at most `item`.
template <class Call>
__device__ __forceinline__ int32_t find_row(const Call& call, int32_t item) {
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

inline constexpr int32_t kCodedWarps = coded_warps(kSliceDims);

// How the items are dealt out; after wait_for_previous_kernel().
struct ItemShares {
  int32_t items, per_warp;
};
__device__ __forceinline__ ItemShares item_shares(const CodedKernelParams& params,
                                                  int32_t warps_of_cta = kCodedWarps) {
  if (params.call.item_count == nullptr) {
    return {params.call.num_items, params.grid.items_per_warp};
  }
  const int32_t items = min(*params.call.item_count, params.call.num_items);
  const int32_t warps = params.grid.num_ctas * warps_of_cta;
  return {items, max(1, (items + warps - 1) / warps)};
}

// The items of a warp, row by row.
template <class Call>
struct WarpItems {
  const Call& call;
  int32_t row, first, end;  // the items of a row in turn
  int32_t last;

  // False where there are none.
  __device__ __forceinline__ bool begin(int32_t warp, const ItemShares& shares) {
    const int64_t begin = int64_t{warp} * shares.per_warp;
    last = static_cast<int32_t>(min(begin + shares.per_warp, int64_t{shares.items}));
    if (begin >= last) return false;
    first = static_cast<int32_t>(begin);
    row = find_row(call, first);
    find_end();
    return true;
  }
  __device__ __forceinline__ bool next_row() {
    if (end >= last) return false;
    first = end;
    ++row;
    find_end();
    return true;
  }

 private:
  // Rows without items are passed over.
  __device__ __forceinline__ void find_end() {
    end = last;
    int32_t next = row + 1;
    while (next < call.num_rows && call.rows[next].first_item <= first) row = next++;
    if (next < call.num_rows) end = min(last, call.rows[next].first_item);
  }
};

// A table on its way into shared memory: the first entries of a thread wait in registers while it
// does other things.
struct TableFill {
  static constexpr int32_t kHeld = 4;
  const uint32_t* table;
  uint32_t count;  // entries
  uint32_t held[kHeld];

  __device__ __forceinline__ explicit TableFill(const DeviceCodebook& book)
      : TableFill(book.table, 1u << book.max_length) {}
  __device__ __forceinline__ TableFill(const uint32_t* table, uint32_t count)
      : table(table), count(count) {
#pragma unroll
    for (int32_t k = 0; k < kHeld; ++k) {
      const uint32_t i = threadIdx.x + k * blockDim.x;
      held[k] = i < count ? table[i] : 0;
    }
  }
  // Every entry with its copies.
  template <int kCopiesLog>
  __device__ __forceinline__ void store(uint32_t address) const {
#pragma unroll
    for (int32_t k = 0; k < kHeld; ++k) {
      const uint32_t i = threadIdx.x + k * blockDim.x;
      if (i < count) store_entry<kCopiesLog>(address, i, held[k]);
    }
#pragma unroll 1
    for (uint32_t i = threadIdx.x + kHeld * blockDim.x; i < count; i += blockDim.x) {
      store_entry<kCopiesLog>(address, i, table[i]);
    }
  }

 private:
  template <int kCopiesLog>
  __device__ __forceinline__ static void store_entry(uint32_t address, uint32_t i, uint32_t x) {
    constexpr uint32_t kCopies = 1u << kCopiesLog;
    const uint32_t to = address + 4 * kCopies * i;
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
};

// The tables of the others of a family, from `address` on.
template <int kCopiesLog>
__device__ inline void fill_family(const CodedFamily& family, uint32_t address, uint32_t region) {
#pragma unroll 1
  for (int32_t i = 0; i < family.count; ++i) {
    TableFill(family.tables[i], family.entries[i]).store<kCopiesLog>(address + i * region);
  }
}

template <int kDimBlocks, class Code, CodedBreadth kBreadth>
__global__ void __launch_bounds__(coded_warps(kDimBlocks* kDimBlock) * 32, 1)
    coded_attention_kernel(const __grid_constant__ CodedKernelParams params) {
  constexpr int kCopiesLog = Code::kCopiesLog, kWarps = coded_warps(kDimBlocks * kDimBlock);
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  const DeviceCodebook &key_book = call.keys.codebook, &value_book = call.values.codebook;
  constexpr bool kFamilies = kBreadth == CodedBreadth::kSlices;
  const auto region = kFamilies ? params.table_bytes
                                : static_cast<uint32_t>(table_region_bytes(
                                      max(key_book.max_length, value_book.max_length), kCopiesLog));
  const uint32_t key_tables = kFamilies ? 1 + params.key_family.count : 1;
  const uint32_t tables = kFamilies ? key_tables + 1 + params.value_family.count : 2;
  const uint32_t start = shared_address(shared);
  const auto slots = static_cast<uint32_t>(kWarps * grid.slots_per_warp);
  const CodedSharedLayout layout =
      coded_shared_layout(start, region, static_cast<uint32_t>(grid.slot_bytes), slots, tables);
  const bool fits = layout.end - start <= static_cast<uint32_t>(grid.shared_bytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* barriers = reinterpret_cast<uint64_t*>(shared) + warp * grid.slots_per_warp;
  if (is_first_lane()) {
    for (int32_t i = 0; i < grid.slots_per_warp; ++i) init_barrier(barriers + i);
  }
  publish_barriers();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const auto slot_bytes = static_cast<uint32_t>(grid.slot_bytes);
  BlockRing ring = warp_ring(layout, barriers, slot_bytes, slot_bytes, grid.slots_per_warp);
  CodedWarp<kDimBlocks, Code, kBreadth> worker{
      call,
      ring,
      params,
      SharedTable<kCopiesLog>(layout.tables, params.key_mask),
      SharedTable<kCopiesLog>(layout.tables + key_tables * region, params.value_mask),
      fits};
  const int32_t global_warp = warp * static_cast<int32_t>(gridDim.x) + blockIdx.x;
  const TableFill key_fill(key_book), value_fill(value_book);
  WarpItems<CodedAttention> items{call};
  const bool any = items.begin(global_warp, item_shares(params, kWarps));
  // The first blocks are on their way while the tables are filled.
  if (any) worker.begin_row(items.row, items.first, items.end);
  if (fits) {
    key_fill.store<kCopiesLog>(layout.tables);
    value_fill.store<kCopiesLog>(layout.tables + key_tables * region);
    if constexpr (kFamilies) {
      fill_family<kCopiesLog>(params.key_family, layout.tables + region, region);
      fill_family<kCopiesLog>(params.value_family, layout.tables + (key_tables + 1) * region,
                              region);
    }
  }
  __syncthreads();
  if (!any) return;
  while (true) {
    worker.finish_row(static_cast<float*>(call.workspace) +
                      (int64_t{global_warp} + items.row) * coded_partial_floats(call));
    if (!items.next_row()) return;
    worker.begin_row(items.row, items.first, items.end);
  }
}

}  // namespace tierkv
