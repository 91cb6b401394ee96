// SPDX-License-Identifier: Apache-2.0
#include "attention/tiers/shared_rows.cuh"

#include "gpu/launch.cuh"

namespace tierkv {

Status launch_shared_rows(const SharedRowsParams& params, int32_t head_dim, GpuStream stream) {
  const SharedRowsLaunch launch = shared_rows_launch(params, head_dim);
  if (launch.kernel == nullptr) {
    return Status(StatusCode::kUnsupported,
                  "no kernel joins rows of head_dim " + std::to_string(head_dim));
  }
  return launch_after_previous(launch.kernel, launch.ctas, kSharedRowsThreads, 0, stream, params);
}

}  // namespace tierkv
