#include "codec/gpu/coded/code_histograms.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/format/fragment_order.h"
#include "codec/gpu/coded/code_counter.cuh"
#include "gpu/cuda_device.cuh"
#include "gpu/warp.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = kCounterThreads;
constexpr int32_t kCodesPerAccess = 8;

__device__ __forceinline__ int32_t low_code(uint32_t word) {
  return static_cast<int16_t>(word & 0xffffu);
}
__device__ __forceinline__ int32_t high_code(uint32_t word) {
  return static_cast<int16_t>(word >> 16);
}

// Accesses of `count` blocks of a row, kAhead of a thread at a time in flight.
template <int kAhead, class Load, class Count>
__device__ __forceinline__ void for_each_access(int32_t accesses, const Load& load,
                                                const Count& count) {
  for (int32_t first = threadIdx.x; first < accesses; first += kAhead * kThreads) {
    decltype(load(0)) x[kAhead];
#pragma unroll
    for (int32_t n = 0; n < kAhead; ++n) {
      if (first + n * kThreads < accesses) x[n] = load(first + n * kThreads);
    }
#pragma unroll
    for (int32_t n = 0; n < kAhead; ++n) {
      if (first + n * kThreads < accesses) count(x[n]);
    }
  }
}

__device__ __forceinline__ uint4 load_codes(const int16_t* at) {
  return __ldcs(reinterpret_cast<const uint4*>(at));
}

// Keys: pairs are neighbours in a token.
__device__ __forceinline__ void count_keys(const CodeHistograms& call, const int16_t* codes,
                                           int32_t blocks, const CodeCounter& counter) {
  const int32_t per_token = call.head_dim / kCodesPerAccess;
  for_each_access<4>(
      blocks * kBlockTokens * per_token,
      [&](int32_t i) {
        return load_codes(codes + int64_t{i / per_token} * call.token_stride +
                          i % per_token * kCodesPerAccess);
      },
      [&](const uint4& x) {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (const uint32_t word : words) counter.count(low_code(word), high_code(word));
      });
}
// Values: pairs are neighbouring tokens of a channel.
struct TwoTokens {
  uint4 first, second;
};
__device__ __forceinline__ void count_values(const CodeHistograms& call, const int16_t* codes,
                                             int32_t blocks, const CodeCounter& counter) {
  const int32_t per_token = call.head_dim / kCodesPerAccess;
  for_each_access<2>(
      blocks * kBlockTokens / 2 * per_token,
      [&](int32_t i) {
        const int16_t* at = codes + int64_t{i / per_token} * 2 * call.token_stride +
                            i % per_token * kCodesPerAccess;
        return TwoTokens{load_codes(at), load_codes(at + call.token_stride)};
      },
      [&](const TwoTokens& x) {
        const uint32_t a[4] = {x.first.x, x.first.y, x.first.z, x.first.w};
        const uint32_t b[4] = {x.second.x, x.second.y, x.second.z, x.second.w};
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) {
          counter.count(low_code(a[j]), low_code(b[j]));
          counter.count(high_code(a[j]), high_code(b[j]));
        }
      });
}

// The last row whose first block is at most `block`.
__device__ int32_t find_row(const CodeHistograms& call, int32_t block) {
  int32_t low = 0, high = call.num_rows - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (call.rows[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads, 1)
    count_kernel(const __grid_constant__ CodeHistograms call, int32_t blocks_per_cta) {
  extern __shared__ __align__(16) uint32_t bins[];
  int32_t block = static_cast<int32_t>(blockIdx.x) * blocks_per_cta;
  const int32_t end = min(block + blocks_per_cta, call.num_blocks);
  if (block >= end) return;
  int32_t row_index = find_row(call, block);
  HistogramRow row = call.rows[row_index];
  int32_t histogram = row.histogram;
  CodeCounter counter{bins, call.pairs + int64_t{histogram} * kHistogramCounts,
                      call.wide + int64_t{histogram} * kHistogramCounts};
  counter.clear();
  while (block < end) {
    while (row_index + 1 < call.num_rows && call.rows[row_index + 1].first_block <= block) {
      row = call.rows[++row_index];
    }
    const int32_t stop =
        row_index + 1 < call.num_rows ? min(end, call.rows[row_index + 1].first_block) : end;
    if (row.histogram != histogram) {
      counter.flush();
      histogram = row.histogram;
      counter.pairs = call.pairs + int64_t{histogram} * kHistogramCounts;
      counter.wide = call.wide + int64_t{histogram} * kHistogramCounts;
    }
    const int16_t* codes = call.codes + row.codes +
                           int64_t{block - row.first_block} * kBlockTokens * call.token_stride;
    if (call.component == Component::kKey) {
      count_keys(call, codes, stop - block, counter);
    } else {
      count_values(call, codes, stop - block, counter);
    }
    block = stop;
  }
  counter.flush();
}

}  // namespace

Status count_codes(const CodeHistograms& call, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_blocks == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  if (limits->shared_bytes < kCounterBytes) {
    return Status(StatusCode::kUnsupported, "code histograms: too little shared memory");
  }
  if (Status s =
          cuda_status(cudaFuncSetAttribute(
                          count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCounterBytes),
                      "shared memory");
      !s) {
    return s;
  }
  const int32_t per_cta = (call.num_blocks + limits->sms - 1) / limits->sms;
  const int32_t ctas = (call.num_blocks + per_cta - 1) / per_cta;
  count_kernel<<<static_cast<uint32_t>(ctas), kThreads, kCounterBytes, stream>>>(call, per_cta);
  return cuda_status(cudaGetLastError(), "count_codes");
}

}  // namespace tierkv
