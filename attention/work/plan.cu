// SPDX-License-Identifier: Apache-2.0
#include "attention/work/plan_kernel.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

template <class Cost, int32_t kClasses>
Status prepare() {
  return cuda_status(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(plan_kernel<Cost, kClasses>),
                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(plan_shared_bytes<Cost>(kKeptRows))),
      "shared memory of the plan kernel");
}

template <class Cost, int32_t kClasses>
Status launch_with(const PlanLaunchOf<kClasses>& launch, GpuStream stream) {
  const PlanParamsOf<kClasses>& p = launch.plan;
  const dim3 grid(p.num_layers, ceil_div(p.max_ctas * p.warps + 1, kPlanItems));
  return launch_after_previous(plan_kernel<Cost, kClasses>, grid, kPlanThreads,
                               plan_shared_bytes<Cost>(p.rows.num_rows), stream, launch);
}

}  // namespace

Status prepare_plan() {
  if (Status s = prepare<uint32_t, 1>(); !s) return s;
  if (Status s = prepare<uint64_t, 1>(); !s) return s;
  if (Status s = prepare<uint32_t, kMaxAttentionClasses>(); !s) return s;
  return prepare<uint64_t, kMaxAttentionClasses>();
}

template <int32_t kClasses>
Status launch_plan(const PlanParamsOf<kClasses>& params, GpuStream stream) {
  const PlanLaunchOf<kClasses> launch = plan_launch(params);
  if (most_cost(params.rows) < 1ull << 32) return launch_with<uint32_t>(launch, stream);
  return launch_with<uint64_t>(launch, stream);
}

template Status launch_plan(const PlanParamsOf<1>&, GpuStream);
template Status launch_plan(const PlanParamsOf<kMaxAttentionClasses>&, GpuStream);

}  // namespace tierkv
