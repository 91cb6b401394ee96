#include "attention/shared_rows.cuh"

#include "attention/launch.cuh"

namespace tierkv {

Status launch_shared_rows(const SharedRowsParams& params, int32_t head_dim, GpuStream stream) {
  const SharedRowsKernel kernel = shared_rows_kernel_of(head_dim);
  if (kernel == nullptr) {
    return Status(StatusCode::kUnsupported,
                  "no kernel joins rows of head_dim " + std::to_string(head_dim));
  }
  const int32_t ctas = params.num_ctas * shared_rows_depth(head_dim, params.columns.of_row);
  return launch_after_previous(kernel, ctas, kSharedRowsThreads, 0, stream, params);
}

}  // namespace tierkv
