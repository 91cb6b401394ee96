// SPDX-License-Identifier: Apache-2.0
// Tiers rows in device memory, their source run on the host. What this cannot show is warps that
// run at one time. Attention over their pages is the reference, between the kernels that turn
// queries and outputs.
#include <cuda_runtime.h>

#include <algorithm>

#include "attention/engine/engine_kernels.cuh"
#include "store/rows/tiers/device_tiers_rows.cu"
#include "tests/support/attention_reference.h"

namespace tierkv {

Result<AttentionGrid> attention_grid(const AttentionConfig&) {
  return AttentionGrid{1};
}
Status plan_attention(const AttentionConfig&, const AttentionGrid&, const PageTableView&,
                      const AttentionBatch&, const AttentionWorkspace&, GpuStream) {
  return Status::ok();
}
Status attend_parts(const AttentionConfig& config, const AttentionGrid&, const AttendCall& call,
                    const AttentionWorkspace&, GpuStream, SharedRowsParams*) {
  const Result<ReferenceOutput> answers = attend_reference(config, call);
  if (!answers) return answers.status();
  for (size_t i = 0; i < answers->out.size(); ++i) {
    static_cast<uint16_t*>(call.out)[i] =
        output_to_raw(config.dtype, static_cast<float>(answers->out[i]));
  }
  std::transform(answers->lse.begin(), answers->lse.end(), call.lse,
                 [](double x) { return static_cast<float>(x); });
  return Status::ok();
}
Status pack_queries(const EngineQueries& q, GpuStream stream) {
  return with_head_dim(q.head_dim, [&](auto dim) {
    return launch_after_previous(pack_queries_kernel<dim>,
                                 ctas_for(q.vectors(), kEngineWarps * kWarpTokens<dim>),
                                 kEngineThreads, 0, stream, q);
  });
}
Status unpack_outputs(const EngineQueries& q, GpuStream stream) {
  return with_head_dim(q.head_dim, [&](auto dim) {
    return launch_after_previous(unpack_outputs_kernel<dim>,
                                 ctas_for(q.vectors(), kEngineWarps * kWarpTokens<dim>),
                                 kEngineThreads, 0, stream, q);
  });
}

}  // namespace tierkv
