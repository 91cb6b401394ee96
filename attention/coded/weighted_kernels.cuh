// SPDX-License-Identifier: Apache-2.0
// The kernels of attention over weighted blocks, an object for each pairing and head_dim.
#pragma once

#include <type_traits>

#include "attention/coded/coded_kernel.cuh"

namespace tierkv {

template <RopePairing kPairing, int32_t kHeadDim>
CodedKernel find_weighted_kernel(const CodedAttention& call, int32_t copies_log) {
  const auto of_copies = [&](auto copies) -> CodedKernel {
    constexpr int kLog = decltype(copies)::value, kBlocks = kHeadDim / kDimBlock;
    return call.keys.codebook.streams_per_lane == 1
               ? coded_attention_kernel<kBlocks, WeightedCode<1, kLog, kPairing>>
               : coded_attention_kernel<kBlocks, WeightedCode<2, kLog, kPairing>>;
  };
  if (copies_log == 0) return of_copies(std::integral_constant<int, 0>());
  // Most of the time goes into lookups.
  if constexpr (kHeadDim <= kSliceDims) {
    if (copies_log == 3) return of_copies(std::integral_constant<int, 3>());
    if (copies_log == 4) return of_copies(std::integral_constant<int, 4>());
  }
  return nullptr;
}

}  // namespace tierkv
