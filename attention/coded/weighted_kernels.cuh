// SPDX-License-Identifier: Apache-2.0
// The kernels of weighted blocks, an object for each pairing and head_dim. All take several
// queries.
#pragma once

#include "attention/coded/coded_kernel.cuh"

namespace tierkv {

template <int kDimBlocks, RopePairing kPairing>
struct WeightedKernels {
  // Null: there is none for so many copies.
  static CodedKernel find(const CodedAttention& call, int32_t copies_log) {
    return call.keys.codebook.mode == BlockMode::kPair
               ? of_mode<BlockMode::kPair>(call, copies_log)
               : of_mode<BlockMode::kSingle>(call, copies_log);
  }

 private:
  // Copies of pairs: most of the time goes into lookups.
  template <BlockMode kMode>
  static CodedKernel of_mode(const CodedAttention& call, int32_t copies_log) {
    const int32_t streams = call.keys.codebook.streams_per_lane;
    if (copies_log == 0) return of_streams<kMode, 0>(streams);
    if constexpr (kMode == BlockMode::kPair && kDimBlocks <= 8) {
      if (copies_log == 3) return of_streams<kMode, 3>(streams);
      if (copies_log == 4) return of_streams<kMode, 4>(streams);
    }
    return nullptr;
  }
  template <BlockMode kMode, int kCopiesLog>
  static CodedKernel of_streams(int32_t streams) {
    return streams == 1 ? of_code<WeightedCode<kMode, 1, kCopiesLog, kPairing>>()
                        : of_code<WeightedCode<kMode, 2, kCopiesLog, kPairing>>();
  }
  template <class Code>
  static CodedKernel of_code() {
    constexpr CodedBreadth kBreadth =
        kDimBlocks == 16 ? CodedBreadth::kSlices : CodedBreadth::kQueries;
    return coded_attention_kernel<kDimBlocks, Code, kBreadth>;
  }
};

template <RopePairing kPairing, int32_t kHeadDim>
CodedKernel find_weighted_kernel(const CodedAttention& call, int32_t copies_log) {
  return WeightedKernels<kHeadDim / kDimBlock, kPairing>::find(call, copies_log);
}

}  // namespace tierkv
