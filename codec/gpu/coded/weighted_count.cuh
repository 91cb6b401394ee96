// SPDX-License-Identifier: Apache-2.0
// The warps that count the pairs of codes of weighted blocks. Bound: instructions, about 15 a code.
#pragma once

#include "codec/gpu/coded/code_counter.cuh"
#include "codec/gpu/coded/weighted_encode.cuh"

namespace tierkv {

// Pairs of a tile's fragment into histograms.
struct CountSink {
  const CodeCounter& counter;
  const EncodeWarp* warp;
  int32_t slice;
  WeightedFaults& faults;

  __device__ __forceinline__ void take(int32_t tile, int32_t f, const QuickFragment& codes) const {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      int32_t code[2];
      settled_codes(warp, slice, tile, f, r, codes[r], faults, code);
      if (code[0] < kPaddingCodes && code[1] < kPaddingCodes) counter.count(code[0], code[1]);
    }
  }
};

template <int32_t kDims, bool kKey>
__device__ __forceinline__ void count_block(const CodeCounter& counter, const TileMemory& memory,
                                            WeightedFaults& faults) {
#pragma unroll 1
  for (int32_t slice = 0; slice < SlicesOf<kDims>::kCount; ++slice) {
    const CountSink sink{counter, memory.warp, slice, faults};
    take_slice<kDims, kKey>(
        memory, slice, slice == 0, faults,
        [&](int32_t tile, int32_t f, const QuickFragment& codes) { sink.take(tile, f, codes); });
  }
}

// By a CTA of whole warps, for the component blockIdx.y. shared: kCounterBytes and
// tile_warp_bytes() of each warp.
template <int32_t kPer>
__device__ __forceinline__ void count_weighted_items(const WeightedEncode& call,
                                                     const WeightedCounts& counts,
                                                     uint8_t* shared) {
  constexpr int32_t kDims = kPer * kWarpLanes;
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  const auto c = static_cast<int32_t>(blockIdx.y);
  const CodeCounter counter{reinterpret_cast<uint32_t*>(shared), counts.pairs[c], counts.wide[c]};
  const TileMemory memory(shared + kCounterBytes + warp * tile_warp_bytes(kDims), kDims);
  counter.clear();
  const int64_t groups = int64_t{call.num_ranges} * call.most_blocks;
  for (int64_t i = int64_t{blockIdx.x} * warps + warp; i < groups;
       i += int64_t{gridDim.x} * warps) {
    const WeightedItem item = weighted_item(call, 2 * i + c);
    WeightedFaults faults;
    StatusCode code;
    if (begin_block(call, call.ranges[item.range], item, memory.warp, &faults, &code)) {
      if (c == 0) {
        count_block<kDims, true>(counter, memory, faults);
      } else {
        count_block<kDims, false>(counter, memory, faults);
      }
      code = faults.worst();
    }
    if (lane_index() == 0) call.status[2 * i + c] = code;
    __syncwarp();
  }
  counter.flush();
}

}  // namespace tierkv
