// SPDX-License-Identifier: Apache-2.0
// The queries of a call of coded attention as its kernels take them: fp16 times a power of two of
// the row, the queries of a row one after another.

#include <cuda_runtime.h>

#include "attention/coded/coded_params.h"
#include "attention/core/query_unit.h"
#include "codec/format/element.h"
#include "gpu/lanes.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kLargestExponent = 14;  // of a row's queries in fp16

__device__ float largest_of_cta(float x) {
  __shared__ float of_warps[kThreads / 32];
  for (int32_t i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, i));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (const float other : of_warps) x = fmaxf(x, other);
  return x;
}

// A CTA for a row.
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ CodedAttention call, QueryColumns columns,
                   ConvertedQueries to) {
  if (!call.q_is_settled) wait_for_previous_kernel();
  let_next_kernel_start();
  const auto row = static_cast<int32_t>(blockIdx.x);
  const int32_t count = columns.of_row * call.head_dim;
  const auto* q = static_cast<const uint16_t*>(call.q);
  const auto bits_of = [&](int32_t i) {
    return q[columns.place(row, i / call.head_dim) * call.head_dim + i % call.head_dim];
  };
  const auto first = static_cast<int32_t>(threadIdx.x);
  uint16_t* halves = to.halves + int64_t{row} * count;
  if (call.dtype == DType::kFloat16) {
    for (int32_t i = first; i < count; i += kThreads) halves[i] = bits_of(i);
    if (first == 0) to.units[row] = 1.0f;
    wait_for_previous_kernel();
    return;
  }
  float largest = 0.0f;
  for (int32_t i = first; i < count; i += kThreads) {
    largest = fmaxf(largest, fabsf(bfloat16_to_float(bits_of(i))));
  }
  const float unit = query_unit(largest_of_cta(largest), kLargestExponent, kLargestExponent);
  const float inverse = 1.0f / unit;
  for (int32_t i = first; i < count; i += kThreads) {
    halves[i] = float_to_half(bfloat16_to_float(bits_of(i)) * inverse);
  }
  if (first == 0) to.units[row] = unit;
  wait_for_previous_kernel();  // whoever waits for this kernel waits for that one
}

}  // namespace

Status convert_queries(const CodedAttention& call, const ConvertedQueries& to, GpuStream stream) {
  return launch_after_previous(convert_kernel, static_cast<unsigned>(call.num_rows), kThreads, 0,
                               stream, call, coded_columns(call), to);
}

}  // namespace tierkv
