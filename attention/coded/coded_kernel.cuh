// SPDX-License-Identifier: Apache-2.0
// The kernel of coded attention. A warp owns a run of items and one slot for blocks; no warp waits
// for another but at the beginning, when the CTA copies its tables.
//
// Bound: shared-memory wavefronts of the lookups; copies of the tables make them fewer.
#pragma once

#include "attention/coded/coded_items.cuh"
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
      : table(book.table), count(1u << book.max_length) {
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

template <int kDimBlocks, class Code>
__global__ void __launch_bounds__(32 * coded_warps(kDimBlocks * kDimBlock), 1)
    coded_attention_kernel(const __grid_constant__ CodedKernelParams params) {
  constexpr int kCopiesLog = Code::kCopiesLog;
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedAttention& call = params.call;
  const CodedAttentionGrid& grid = params.grid;
  using Table = SharedTable<kCopiesLog>;
  constexpr int32_t kHeadDim = kDimBlocks * kDimBlock;
  const uint32_t start = shared_address(shared);
  constexpr bool kTurns = Code::kTurning != KeyTurning::kNone;
  const auto slot_bytes = static_cast<uint32_t>(grid.slot_bytes);
  const CodedSharedLayout layout =
      coded_shared_layout(start, params.table_bytes, slot_bytes, static_cast<uint32_t>(grid.warps),
                          weighted_tail_bytes(kHeadDim, kTurns, grid.warps));
  const bool fits = layout.end - start <= static_cast<uint32_t>(grid.shared_bytes);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* barriers = reinterpret_cast<uint64_t*>(shared) + 2 * warp;
  if (is_first_lane()) {
    for (int32_t i = 0; i < 2; ++i) init_barrier(barriers + i);
  }
  publish_barriers();
  BlockSlot slot{layout.slot(static_cast<uint32_t>(warp), slot_bytes), shared_address(barriers),
                 slot_bytes};
  LocalMemory<kDimBlocks / 2> queries;
  WeightedWarp<kDimBlocks, Code> worker{
      {{call, slot, params, Table(layout.tables, params.key_mask), fits, {}, {}, 0, 0, queries}}};
  worker.set_tail(layout.tail, warp);
  const auto cta = static_cast<int32_t>(blockIdx.x);
  if (!params.tables_are_settled) wait_for_previous_kernel();
  const TableFill key_fill(call.keys.codebook), value_fill(call.values.codebook);
  const auto fill_tables = [&] {
    if (!fits) return;
    if constexpr (kTurns) worker.fill_turns();
    key_fill.store<kCopiesLog>(layout.tables);
    value_fill.store<kCopiesLog>(layout.tables + params.table_bytes);
  };
  if (params.tables_are_settled) {
    fill_tables();
    wait_for_previous_kernel();
  }
  let_next_kernel_start();
  WarpItems items{call};
  const ItemShares shares = item_shares(params);
  int32_t number = shares.number(cta, warp);
  const bool any = items.begin(shares.begin(cta, warp), shares.begin(cta, warp + 1));
  // The first blocks are on their way while the tables are filled.
  if (any) worker.begin_row(items.row, items.first, items.end);
  if (!params.tables_are_settled) fill_tables();
  __syncthreads();
  if (!any) return;
  while (true) {
    worker.attend_row(items, number);
    worker.state.leave(call, static_cast<float*>(call.workspace) +
                                 (int64_t{number} + items.row) * coded_partial_floats(call));
    if (!items.next_row()) return;
    worker.begin_row(items.row, items.first, items.end);
  }
}

}  // namespace tierkv
