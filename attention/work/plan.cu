#include "attention/work/plan_kernel.cuh"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

template <class Cost>
Status prepare() {
  return cuda_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(plan_kernel<Cost>),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(plan_shared_bytes<Cost>(kKeptRows))),
                     "shared memory of the plan kernel");
}

template <class Cost>
Status launch_with(const PlanLaunch& launch, GpuStream stream) {
  const PlanParams& p = launch.plan;
  const dim3 grid(p.num_layers, ceil_div(p.max_ctas * p.warps + 1, kPlanItems));
  return launch_after_previous(plan_kernel<Cost>, grid, kPlanThreads,
                               plan_shared_bytes<Cost>(p.rows.num_rows), stream, launch);
}

}  // namespace

Status prepare_plan() {
  if (Status s = prepare<uint32_t>(); !s) return s;
  return prepare<uint64_t>();
}

Status launch_plan(const PlanParams& params, GpuStream stream) {
  const PlanLaunch launch = plan_launch(params);
  if (most_cost(params.rows) < 1ull << 32) return launch_with<uint32_t>(launch, stream);
  return launch_with<uint64_t>(launch, stream);
}

}  // namespace tierkv
