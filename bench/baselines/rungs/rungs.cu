// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/rungs/rungs.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "attention/core/workspace.h"
#include "bench/baselines/rungs/diffkv.h"
#include "bench/baselines/rungs/merge_splits.cuh"
#include "bench/baselines/rungs/rung_kernel.h"
#include "gpu/launch.cuh"

namespace tierkv {
RungKernel rung_kernel(Rung rung, const RungShape& shape) {
  switch (rung) {
    case Rung::kDiffkv:
      return diffkv_rung(shape);
    case Rung::kQueryAsA:
      return query_as_a_rung(shape);
    default:
      return kv_as_a_rung(rung, shape);
  }
}

Result<RungGrid> rung_grid(Rung rung, const AttentionConfig& config, int32_t count) {
  if (Status s = validate_rung_config(rung, config, count); !s) return s;
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const RungKernel k = rung_kernel(rung, rung_shape(config, limits->shared_bytes));
  cudaError_t error =
      cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, k.shared_bytes);
  if (Status s = cuda_status(error, "cudaFuncSetAttribute"); !s) return s;
  int per_sm = 0;
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, k.kernel, k.threads,
                                                        static_cast<size_t>(k.shared_bytes));
  if (Status s = cuda_status(error, "cudaOccupancyMaxActiveBlocksPerMultiprocessor"); !s) return s;
  if (per_sm < 1) {
    return Status(StatusCode::kUnsupported, "the device has too little shared memory");
  }
  RungGrid grid;
  grid.device_shared_bytes = limits->shared_bytes;
  grid.splits = choose_splits(count * config.num_kv_heads, k.row_ctas, per_sm * limits->sms);
  return grid;
}

Status run_rung(Rung rung, const AttentionConfig& config, const RungGrid& grid,
                const AttendCall& call, const AttentionWorkspace& workspace, GpuStream stream) {
  if (Status s = validate_rung_config(rung, config, call.batch.count); !s) return s;
  if (Status s = validate_rung_call(config, grid, call, workspace); !s) return s;
  const RungKernel k = rung_kernel(rung, rung_shape(config, grid.device_shared_bytes));
  const RungParams p = rung_params(config, grid, call, workspace.memory, k);
  const auto ctas = static_cast<unsigned>(p.rows.num_rows * p.splits * k.row_ctas);
  const auto shared_bytes = static_cast<size_t>(k.shared_bytes);
  if (Status s = launch_after_previous(k.kernel, ctas, k.threads, shared_bytes, stream, p); !s) {
    return s;
  }
  if (k.merges || p.splits == 1) return Status::ok();
  const auto warps = static_cast<unsigned>(p.rows.num_rows * p.group);
  return launch_after_previous(merge_splits_kernel,
                               (warps + kMergeSplitsWarps - 1) / kMergeSplitsWarps,
                               kMergeSplitsWarps * 32, 0, stream, p);
}

Status transcode_pages(const AttentionConfig& config, const AttendCall& call, uint8_t* to,
                       GpuStream stream) {
  if (Status s = validate_rung_config(Rung::kDiffkv, config, call.batch.count); !s) return s;
  const RungKernel k = rung_kernel(Rung::kDiffkv, rung_shape(config, 0));
  const RungParams p = rung_params(config, {}, call, nullptr, k);
  TranscodeParams pages;
  pages.to = to;
  int32_t shared_bytes = 0;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    pages.layouts[t] = *tier_layout(config, t);
    shared_bytes = std::max(shared_bytes, pages.layouts[t].scores);
  }
  return launch_transcode(p, pages, shared_bytes, stream);
}

}  // namespace tierkv
