// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/kernels/step_codes.h"

#include <cuda_runtime.h>

#include "bench/baselines/kernels/step_codes_check.h"
#include "codec/format/element.h"
#include "codec/format/quantize.h"
#include "gpu/cuda_device.cuh"
#include "gpu/warp.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kAccessesPerThread = 4;  // in flight
constexpr int32_t kChunkCodes = kThreads * kAccessesPerThread * kCodesPerAccess;

template <DType kDtype>
struct Eight {
  float x[kCodesPerAccess];

  __device__ __forceinline__ void load(const void* from, int64_t element) {
    if constexpr (kDtype == DType::kFloat32) {
      const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(from) + element);
      const float4 a = __ldcs(p), b = __ldcs(p + 1);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
      x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
      const uint4 a =
          __ldcs(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + element));
      const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float2 y = pair_floats(Pair<kDtype>{words[i]});
        x[2 * i] = y.x, x[2 * i + 1] = y.y;
      }
    }
  }
};

// quantize_absolute() of one value; bits of a code that failed are not defined.
__device__ __forceinline__ uint32_t step_code(float x, float step, StatusCode* code) {
  const float c = round_half_even(div_rn(x, step));
  if (!is_finite(x)) {
    *code = greater(*code, StatusCode::kNonFinite);
  } else if (!(c >= -32768.0f && c <= 32767.0f)) {
    *code = greater(*code, StatusCode::kOutOfRange);
  }
  return static_cast<uint32_t>(static_cast<int32_t>(c)) & 0xffffu;
}

// A CTA works on kChunkCodes codes of a row.
template <DType kDtype>
__global__ void __launch_bounds__(kThreads)
    step_kernel(const __grid_constant__ StepCodes s, const int32_t chunks_per_row) {
  const auto row_index = static_cast<int32_t>(blockIdx.x / chunks_per_row);
  const auto chunk = static_cast<int32_t>(blockIdx.x % chunks_per_row);
  const StepRow row = s.rows[row_index];
  auto code = check_step_row(s, row);
  if (code == StatusCode::kOk) {
    const float step = s.steps[row.step];
    const uint32_t per_token = s.head_dim / kCodesPerAccess;
    const uint32_t end = row.num_tokens * per_token;
    const uint32_t first = chunk * kThreads * kAccessesPerThread + threadIdx.x;
    Eight<kDtype> values[kAccessesPerThread];
#pragma unroll
    for (int32_t n = 0; n < kAccessesPerThread; ++n) {
      const uint32_t access = first + n * kThreads, token = access / per_token;
      if (access < end) {
        values[n].load(s.x,
                       row.input + token * s.x_token_stride + access % per_token * kCodesPerAccess);
      }
    }
#pragma unroll
    for (int32_t n = 0; n < kAccessesPerThread; ++n) {
      const uint32_t access = first + n * kThreads, token = access / per_token;
      if (access >= end) continue;
      const auto dim = static_cast<int32_t>(access % per_token) * kCodesPerAccess;
      uint32_t codes[kCodesPerAccess];
#pragma unroll
      for (int32_t i = 0; i < kCodesPerAccess; ++i) {
        float x = values[n].x[i];
        if (s.means != nullptr) {
          x = add_rn(x, -s.means[static_cast<int64_t>(row.step) * s.head_dim + dim + i]);
        }
        codes[i] = step_code(x, step, &code);
      }
      __stcs(reinterpret_cast<uint4*>(s.codes + row.output + token * s.codes_token_stride + dim),
             make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16,
                        codes[4] | codes[5] << 16, codes[6] | codes[7] << 16));
    }
  }
  if (code != StatusCode::kOk) {
    atomicMax(reinterpret_cast<int32_t*>(s.status) + row_index, static_cast<int32_t>(code));
  }
}

}  // namespace

Status step_codes(const StepCodes& s, GpuStream stream) {
  if (Status v = s.validate(); !v) return v;
  if (s.num_rows == 0) return Status::ok();
  const int64_t codes = int64_t{s.max_tokens} * s.head_dim;
  const int64_t chunks = codes == 0 ? 1 : (codes + kChunkCodes - 1) / kChunkCodes;
  if (codes / kCodesPerAccess > INT32_MAX || chunks * s.num_rows > INT32_MAX) {
    return Status(StatusCode::kUnsupported, "rows and max_tokens are beyond a grid");
  }
  static_assert(static_cast<int32_t>(StatusCode::kOk) == 0, "cleared status");
  if (Status c = cuda_status(cudaMemsetAsync(s.status, 0, s.num_rows * sizeof(StatusCode), stream),
                             "status");
      !c) {
    return c;
  }
  const auto kernel = s.dtype == DType::kFloat16    ? step_kernel<DType::kFloat16>
                      : s.dtype == DType::kBFloat16 ? step_kernel<DType::kBFloat16>
                                                    : step_kernel<DType::kFloat32>;
  const auto ctas = static_cast<uint32_t>(chunks * s.num_rows);
  kernel<<<ctas, kThreads, 0, stream>>>(s, static_cast<int32_t>(chunks));
  return cuda_status(cudaGetLastError(), "step_codes");
}

}  // namespace tierkv
