// SPDX-License-Identifier: Apache-2.0
#include "tierkv/significance.h"

#include <cuda_runtime.h>

#include "codec/format/head_dim.h"
#include "codec/gpu/score_mma.cuh"
#include "codec/gpu/score_wgmma.cuh"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

constexpr uint32_t kMostGridLines = 65535;  // in z

using ScoreKernel = void (*)(ScoreTask);

struct ScoreLaunch {
  ScoreKernel kernel;
  int32_t threads, shared_bytes, rows;
};

template <class Taker, DType kDtype>
ScoreLaunch wgmma_launch() {
  constexpr int32_t kHeadDim = Taker::kDims;
  return {wgmma_scores<Taker, kDtype>, kScoreThreads, ScoreShape<kHeadDim>::kSharedBytes,
          StationaryRows<kHeadDim>::kRows};
}
template <class Taker, DType kDtype>
ScoreLaunch mma_launch() {
  using Shape = MmaShape<Taker::kDims>;
  return {mma_scores<Taker, kDtype>, kMathThreads, Shape::kSharedBytes, Shape::kRows};
}

Status check_image(cudaError_t error) {
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) {
    return cuda_status(error, "attributes of the prompt score kernels");
  }
  cudaGetLastError();
  return Status(StatusCode::kUnsupported, "prompt scores: this build has no code for the device");
}

// Whether the code that runs on the current device has the body of a wgmma kernel: the bound of its
// threads says so, which is that of the very image that a launch would run.
Result<bool> has_body(ScoreKernel kernel) {
  cudaFuncAttributes attributes{};
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (Status s = check_image(error); !s) return s;
  return attributes.maxThreadsPerBlock >= kScoreThreads;
}

template <class Taker, DType kDtype>
Result<ScoreLaunch> choose(ScoreProducts asked) {
  const ScoreLaunch mma = mma_launch<Taker, kDtype>();
  if (asked == ScoreProducts::kMma) return mma;
  const ScoreLaunch wgmma = wgmma_launch<Taker, kDtype>();
  const Result<bool> has_wgmma = has_body(wgmma.kernel);
  if (!has_wgmma) return has_wgmma.status();
  if (*has_wgmma) return wgmma;
  if (asked == ScoreProducts::kAny) return mma;
  return Status(StatusCode::kUnsupported, "prompt scores: this build has no wgmma for the device");
}

template <class Taker, DType kDtype>
Status launch(ScoreTask task, GpuStream stream) {
  const Result<ScoreLaunch> chosen = choose<Taker, kDtype>(task.p.products);
  if (!chosen) return chosen.status();
  const SignificanceCall& p = task.p;
  dim3 grid(p.num_kv_heads, p.num_sequences, (p.max_tokens - 1) / chosen->rows + 1);
  if (Taker::kRowsAreQueries) {
    const Result<DeviceLimits> limits = device_limits();
    if (!limits) return limits.status();
    task.line = share_out(p, chosen->rows, limits->sms);
    if (task.line.share > 0) grid.x = 1;
    grid.z = task.line.ctas;
  }
  if (grid.z > kMostGridLines) {
    return Status(StatusCode::kUnsupported, "prompt scores: max_tokens with this query_stride");
  }
  if (Status s = check_image(cudaFuncSetAttribute(reinterpret_cast<const void*>(chosen->kernel),
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  chosen->shared_bytes));
      !s) {
    return s;
  }
  Status s = launch_after_previous(chosen->kernel, grid, chosen->threads, chosen->shared_bytes,
                                   stream, task);
  if (!s || task.line.share == 0) return s;
  const int32_t queries = sample_tokens(p.max_tokens, p.query_stride).count;
  const dim3 join_grid((queries - 1) / kJoinThreads + 1, p.num_sequences, p.num_q_heads);
  return launch_after_previous(join_lse, join_grid, kJoinThreads, 0, stream, task);
}

template <template <int32_t> class Taker>
Status run(const ScoreTask& task, GpuStream stream) {
  if (Status s = task.p.validate(); !s) return s;
  if (task.p.total_tokens == 0 || task.p.num_sequences == 0) return Status::ok();
  return with_head_dim(task.p.head_dim, [&](auto dim) {
    if (task.out == nullptr || (!Taker<dim>::kRowsAreQueries && task.lse == nullptr)) {
      return Status(StatusCode::kInvalidArgument, "lse or significance is null");
    }
    return task.p.dtype == DType::kFloat16 ? launch<Taker<dim>, DType::kFloat16>(task, stream)
                                           : launch<Taker<dim>, DType::kBFloat16>(task, stream);
  });
}

}  // namespace

Status prompt_significance(const SignificanceCall& p, const float* lse, float* significance,
                           GpuStream stream) {
  return run<SignificanceTaker>({p, lse, significance, {}}, stream);
}
Status prompt_lse(const SignificanceCall& p, float* lse, GpuStream stream) {
  return run<LseTaker>({p, nullptr, lse, {}}, stream);
}

}  // namespace tierkv
