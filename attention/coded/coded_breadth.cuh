// SPDX-License-Identifier: Apache-2.0
// The kernels of a CodedBreadth that is not plain. They have fewer numbers of copies than plain
// ones: copies of pairs from 128 channels on, in which most of the time goes into lookups.
#pragma once

#include "attention/coded/coded_kernel.cuh"

namespace tierkv {

template <int kDimBlocks, CodedBreadth kBreadth>
struct BroadKernels {
  // Null: there is none for so many copies.
  static CodedKernel find(const CodedAttention& call, int32_t copies_log) {
    return call.keys.codebook.mode == BlockMode::kPair
               ? of_mode<BlockMode::kPair>(call, copies_log)
               : of_mode<BlockMode::kSingle>(call, copies_log);
  }

 private:
  template <BlockMode kMode>
  static CodedKernel of_mode(const CodedAttention& call, int32_t copies_log) {
    const int32_t streams = call.keys.codebook.streams_per_lane;
    if (copies_log == 0) return of_streams<kMode, 0>(streams);
    if constexpr (kMode == BlockMode::kPair && kDimBlocks >= 8) {
      if (copies_log == 3) return of_streams<kMode, 3>(streams);
      if (copies_log == 4) return of_streams<kMode, 4>(streams);
    }
    return nullptr;
  }
  template <BlockMode kMode, int kCopiesLog>
  static CodedKernel of_streams(int32_t streams) {
    return streams == 1 ? of_code<BlockCode<kMode, 1, kCopiesLog>>()
                        : of_code<BlockCode<kMode, 2, kCopiesLog>>();
  }
  template <class Code>
  static CodedKernel of_code() {
    return coded_attention_kernel<kDimBlocks, Code, kBreadth>;
  }
};

template <CodedBreadth kBreadth>
CodedKernel find_broad_kernel(const CodedAttention& call, int32_t copies_log) {
  if (call.head_dim == 64) return BroadKernels<4, kBreadth>::find(call, copies_log);
  if (call.head_dim == 96) return BroadKernels<6, kBreadth>::find(call, copies_log);
  if constexpr (kBreadth == CodedBreadth::kSlices) {
    if (call.head_dim == 256) return BroadKernels<16, kBreadth>::find(call, copies_log);
  }
  return BroadKernels<8, kBreadth>::find(call, copies_log);
}

}  // namespace tierkv
