// SPDX-License-Identifier: Apache-2.0
// The kernel of both coded products, and the list of those there are. A warp owns a run of items
// and one ring of slots; no warp waits for another but at the beginning, when the CTA copies its
// table or tree.
//
// Bound: shared-memory wavefronts of the lookups, as in coded attention.
#pragma once

#include "attention/coded/coded_kernel.cuh"
#include "bench/baselines/matvec/coded_matvec_warp.cuh"
#include "gpu/barrier.cuh"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// Fills what the decoder looks into. A code of kSingle becomes what a pair's digit is in its place,
// digit * 2^-18, so that more than 32 levels are fp16 numbers, too.
template <class Code>
__device__ __forceinline__ typename Decoding<Code>::Table fill_decoder(const MatvecParams& params,
                                                                       uint32_t address,
                                                                       bool fits) {
  if (fits) TableFill(params.call.codebook).template store<Code::kCopiesLog>(address);
  return SharedTable<Code::kCopiesLog>(address, params.mask);
}
template <>
__device__ __forceinline__ TreeWalk fill_decoder<TreeCode>(const MatvecParams& params,
                                                           uint32_t address, bool fits) {
  const DeviceTree& tree = params.call.tree;
  for (auto i = static_cast<int32_t>(threadIdx.x); fits && i < tree.entries;
       i += static_cast<int32_t>(blockDim.x)) {
    store_shared_u16(address + 2 * static_cast<uint32_t>(i), tree.nodes[i]);
  }
  return {address, static_cast<uint32_t>(tree.entries - 1), params.call.codebook.max_length};
}

// Blocks from .. to - 1 of a row, which are the items from `item` on.
template <class Warp>
__device__ __forceinline__ void multiply_row(Warp& worker, const WarpItems<CodedMatvec>& items,
                                             bool fits, int32_t warp) {
  const CodedMatvec& call = items.call;
  const CodedMatvecRow row = call.rows[items.row];
  const int32_t blocks = (row.tokens + kBlockTokens - 1) / kBlockTokens;
  const int32_t from = items.first - row.first_item, count = items.end - items.first;
  const bool named = fits && from >= 0 && row.tokens >= 0 && row.tokens <= call.token_stride &&
                     from + count <= blocks && row.first_block >= 0 &&
                     int64_t{row.first_block} + blocks <= call.num_blocks;
  if (!named) {
    worker.refuse(items.first, count, items.row, warp);
    return;
  }
  worker.begin(row.first_block + from, count);
  worker.begin_row(items.row);
#pragma unroll 1
  for (int32_t i = 0; i < count; ++i) {
    const int32_t first = (from + i) * kBlockTokens;
    worker.block(i, min(row.tokens - first, kBlockTokens), items.first + i, items.row, first);
  }
  worker.end_row(items.row, warp);
}

template <class Warp>
__global__ void __launch_bounds__(kCodedWarps * 32, 1)
    coded_matvec_kernel(const __grid_constant__ MatvecParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const CodedMatvec& call = params.call;
  const CodedMatvecGrid& grid = params.grid;
  const int32_t copies_log = Warp::Code::kCopiesLog;
  const auto region = static_cast<uint32_t>(decoder_region_bytes(call, copies_log));
  const auto slot_bytes = static_cast<uint32_t>(grid.slot_bytes);
  const auto unit_bytes = static_cast<uint32_t>(block_unit_bytes(Warp::kComponent, Warp::kHeadDim));
  const uint32_t start = shared_address(shared);
  const auto slots = static_cast<uint32_t>(kCodedWarps * grid.slots_per_warp);
  const CodedSharedLayout layout = coded_shared_layout(start, region, slot_bytes, slots, 1);
  const bool fits = layout.end - start <= static_cast<uint32_t>(grid.shared_bytes);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  auto* barriers = reinterpret_cast<uint64_t*>(shared) + warp * grid.slots_per_warp;
  if (is_first_lane()) {
    for (int32_t i = 0; i < grid.slots_per_warp; ++i) init_barrier(barriers + i);
  }
  publish_barriers();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto decoder = fill_decoder<typename Warp::Code>(params, layout.tables, fits);

  BlockRing ring =
      warp_ring(layout, barriers, slot_bytes, slot_bytes - unit_bytes, grid.slots_per_warp);
  Warp worker{{params, ring, decoder, unit_bytes}};
  __syncthreads();
  const int32_t global_warp = warp * static_cast<int32_t>(gridDim.x) + blockIdx.x;
  WarpItems<CodedMatvec> items{call};
  const int64_t begin = int64_t{global_warp} * grid.items_per_warp;
  const int64_t end = min(begin + grid.items_per_warp, int64_t{call.num_items});
  if (begin >= end || !items.begin(static_cast<int32_t>(begin), static_cast<int32_t>(end))) return;
  do {
    multiply_row(worker, items, fits, global_warp);
  } while (items.next_row());
}

using MatvecKernel = void (*)(MatvecParams);
// The kernel of a call; null where there is none with so many copies. One file instantiates each.
MatvecKernel find_score_kernel(const CodedMatvec& call, int32_t copies_log);
MatvecKernel find_output_kernel(const CodedMatvec& call, int32_t copies_log);

// Numbers of copies there are kernels for, most first.
inline constexpr int32_t kMatvecCopies[] = {4, 0};

template <template <int, class> class Warp, int kDimBlocks>
struct MatvecKernels {
  template <class Code>
  static constexpr MatvecKernel kOf = coded_matvec_kernel<Warp<kDimBlocks, Code>>;

  template <BlockMode kMode>
  static MatvecKernel of_mode(int32_t streams, int32_t copies_log) {
    if (copies_log == 0) {
      return streams == 1 ? kOf<BlockCode<kMode, 1, 0>> : kOf<BlockCode<kMode, 2, 0>>;
    }
    return streams == 2 && copies_log == 4 ? kOf<BlockCode<kMode, 2, 4>> : nullptr;
  }
  static MatvecKernel find(const CodedMatvec& call, int32_t copies_log) {
    const int32_t streams = call.codebook.streams_per_lane;
    if (call.tree.entries > 0) return copies_log == 0 ? kOf<TreeCode> : nullptr;
    return call.codebook.mode == BlockMode::kPair
               ? of_mode<BlockMode::kPair>(streams, copies_log)
               : of_mode<BlockMode::kSingle>(streams, copies_log);
  }
};
template <template <int, class> class Warp>
MatvecKernel find_matvec_kernel(const CodedMatvec& call, int32_t copies_log) {
  if (call.head_dim == 64) return MatvecKernels<Warp, 4>::find(call, copies_log);
  if (call.head_dim == 96) return MatvecKernels<Warp, 6>::find(call, copies_log);
  return MatvecKernels<Warp, 8>::find(call, copies_log);
}

}  // namespace tierkv
