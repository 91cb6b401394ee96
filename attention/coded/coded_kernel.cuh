// SPDX-License-Identifier: Apache-2.0
// The kernel of coded attention. A warp owns a run of items and one ring of slots; no warp waits
// for another but at the beginning, when the CTA copies its tables.
//
// Bound: shared-memory wavefronts of the lookups; copies of the tables make them fewer.
#pragma once

#include <type_traits>

#include "attention/coded/coded_items.cuh"
#include "attention/coded/coded_warp.cuh"
#include "attention/coded/weighted_warp.cuh"
#include "gpu/barrier.cuh"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

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
      store_shared(to, x);
    } else {
      // Eight lanes write at a time: each begins at another copy, so that they fill all banks.
      const uint32_t turn = threadIdx.x * kCopies / 32;
#pragma unroll
      for (uint32_t i4 = 0; i4 < kCopies / 4; ++i4) {
        store_shared_16(to + 16 * ((i4 + turn) % (kCopies / 4)), uint4{x, x, x, x});
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
__global__ void __launch_bounds__(32 * coded_warps(kDimBlocks * kDimBlock), 1)
    coded_attention_kernel(const __grid_constant__ CodedKernelParams params) {
  constexpr int kCopiesLog = Code::kCopiesLog;
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  const DeviceCodebook &key_book = call.keys.codebook, &value_book = call.values.codebook;
  using Table = SharedTable<kCopiesLog>;
  constexpr bool kFamilies = kBreadth == CodedBreadth::kSlices;
  const auto region = kFamilies ? params.table_bytes
                                : static_cast<uint32_t>(table_region_bytes(
                                      max(key_book.max_length, value_book.max_length), kCopiesLog));
  const uint32_t key_tables = kFamilies ? 1 + params.key_family.count : 1;
  const uint32_t tables = kFamilies ? key_tables + 1 + params.value_family.count : 2;
  const uint32_t start = shared_address(shared);
  // Two blocks share the slot of a warp of weighted blocks.
  constexpr bool kShares = Code::kWeighted;
  const auto slots = static_cast<uint32_t>(kShares ? grid.warps : grid.warps * grid.slots_per_warp);
  constexpr bool kTurns = Code::kPairing != RopePairing::kNone;
  const uint32_t tail =
      Code::kWeighted ? weighted_tail_bytes(kDimBlocks * kDimBlock, kTurns, grid.warps) : 0;
  const CodedSharedLayout layout = coded_shared_layout(
      start, region, static_cast<uint32_t>(grid.slot_bytes), slots, tables, tail);
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
  BlockRing ring =
      warp_ring(layout, barriers, slot_bytes, slot_bytes, kShares ? 1 : grid.slots_per_warp);
  if constexpr (kShares) ring.slots = 2, ring.other_barrier = sizeof(uint64_t);
  using Worker = std::conditional_t<Code::kWeighted, WeightedWarp<kDimBlocks, Code, kBreadth>,
                                    CodedWarp<kDimBlocks, Code, kBreadth>>;
  Worker worker{call,
                ring,
                params,
                Table(layout.tables, params.key_mask),
                Table(layout.tables + key_tables * region, params.value_mask),
                fits};
  if constexpr (Code::kWeighted) worker.set_tail(layout.tail, warp);
  const auto cta = static_cast<int32_t>(blockIdx.x);
  const TableFill key_fill(key_book), value_fill(value_book);
  WarpItems<CodedAttention> items{call};
  const ItemShares shares = item_shares(params, grid.warps);
  int32_t number = shares.number(cta, warp);
  const bool any = items.begin(shares.begin(cta, warp), shares.begin(cta, warp + 1));
  // The first blocks are on their way while the tables are filled.
  if (any) worker.begin_row(items.row, items.first, items.end);
  if (fits) {
    if constexpr (kTurns) worker.fill_turns();
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
    if constexpr (Code::kWeighted) worker.attend_row(items, number);
    worker.finish_row(static_cast<float*>(call.workspace) +
                      (int64_t{number} + items.row) * coded_partial_floats(call));
    if (!items.next_row()) return;
    worker.begin_row(items.row, items.first, items.end);
  }
}

}  // namespace tierkv
