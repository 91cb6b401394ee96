// SPDX-License-Identifier: Apache-2.0
// Kernels that find probabilities of a call of coded attention, and clear them first.

#include <cuda_runtime.h>

#include "attention/coded/coded_probabilities.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {
namespace {

constexpr int32_t kClearThreads = 256;

// A CTA for a row and a query: tokens that no item is found to hold have probability 0.
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(const __grid_constant__ CodedAttention call) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto row = static_cast<int32_t>(blockIdx.x), query = static_cast<int32_t>(blockIdx.y);
  const int64_t tokens = int64_t{call.rows[row].coded_tokens} + call.rows[row].window_tokens;
  float* line =
      call.probabilities + (int64_t{query} * call.num_rows + row) * call.probability_stride;
  for (int64_t i = threadIdx.x; i < min(tokens, call.probability_stride); i += kClearThreads) {
    line[i] = 0.0f;
  }
}

template <int kDimBlocks>
CodedKernel kernel_of(const CodedAttention& call) {
  using OnePair = WithFixedBlocks<BlockCode<BlockMode::kPair, 1, 0>>;
  using TwoPairs = WithFixedBlocks<BlockCode<BlockMode::kPair, 2, 0>>;
  using OneSingle = BlockCode<BlockMode::kSingle, 1, 0>;
  using TwoSingles = BlockCode<BlockMode::kSingle, 2, 0>;
  const bool one = call.keys.codebook.streams_per_lane == 1;
  if (call.keys.codebook.mode == BlockMode::kPair) {
    return one ? coded_probability_kernel<kDimBlocks, OnePair>
               : coded_probability_kernel<kDimBlocks, TwoPairs>;
  }
  return one ? coded_probability_kernel<kDimBlocks, OneSingle>
             : coded_probability_kernel<kDimBlocks, TwoSingles>;
}

}  // namespace

CodedKernel find_probability_kernel(const CodedAttention& call) {
  if (call.head_dim == 64) return kernel_of<4>(call);
  if (call.head_dim == 96) return kernel_of<6>(call);
  return call.head_dim == 128 ? kernel_of<8>(call) : kernel_of<16>(call);
}

Status clear_probabilities(const CodedAttention& call, GpuStream stream) {
  const dim3 ctas(static_cast<unsigned>(call.num_rows), static_cast<unsigned>(call.q_len));
  return launch_after_previous(clear_kernel, ctas, kClearThreads, 0, stream, call);
}

}  // namespace tierkv
