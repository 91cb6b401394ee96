// SPDX-License-Identifier: Apache-2.0
#include "attention/tiers/decode.h"

#include "attention/tiers/shared_rows.cuh"
#include "codec/format/head_dim.h"
#include "gpu/launch.cuh"

namespace tierkv {
namespace {

template <int32_t kClasses>
DecodeKernelOf<kClasses> kernel_of(int32_t head_dim, const DecodeChoice& choice) {
  if (!is_known_head_dim(head_dim)) return nullptr;
  return with_head_dim(head_dim, [&](auto dim) { return decode_kernel_of<dim, kClasses>(choice); });
}

Status no_kernel(int32_t head_dim) {
  return Status(StatusCode::kUnsupported,
                "no attention kernel for head_dim " + std::to_string(head_dim));
}

}  // namespace

template <int32_t kClasses>
Status prepare_decode(int32_t head_dim, int32_t blocks, int32_t shared_bytes) {
  using enum DecodeMode;
  for (const DecodeMode mode : {kPlain, kNarrow, kFull, kBFloat16}) {
    for (const bool few_warps : {false, true}) {
      const DecodeKernelOf<kClasses> kernel =
          kernel_of<kClasses>(head_dim, {blocks, of_classes<kClasses>(mode), few_warps});
      if (kernel == nullptr && !is_plain(mode)) return no_kernel(head_dim);
      if (kernel == nullptr) continue;
      const cudaError_t error =
          cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
      if (error != cudaSuccess) return cuda_status(error, "shared memory of the decode kernel");
    }
  }
  return Status::ok();
}

template <int32_t kClasses>
Status launch_decode(const DecodeParamsOf<kClasses>& params, int32_t head_dim, int32_t num_ctas,
                     GpuStream stream) {
  const DecodeKernelOf<kClasses> kernel = kernel_of<kClasses>(head_dim, decode_choice(params));
  if (kernel == nullptr) return no_kernel(head_dim);
  const int32_t warps = params.warps;
  const int32_t bytes =
      decode_shared(head_dim, params.columns.of_row, params.slot_bytes, params.slots, warps).bytes;
  return launch_after_previous(kernel, num_ctas, warps * 32, bytes, stream, params);
}

Status launch_shared_rows(const SharedRowsParams& params, int32_t head_dim, GpuStream stream) {
  const SharedRowsLaunch launch = shared_rows_launch(params, head_dim);
  if (launch.kernel == nullptr) return no_kernel(head_dim);
  return launch_after_previous(launch.kernel, launch.ctas, kSharedRowsThreads, 0, stream, params);
}

template Status prepare_decode<1>(int32_t, int32_t, int32_t);
template Status prepare_decode<kMaxAttentionClasses>(int32_t, int32_t, int32_t);
template Status launch_decode(const DecodeParamsOf<1>&, int32_t, int32_t, GpuStream);
template Status launch_decode(const DecodeParamsOf<kMaxAttentionClasses>&, int32_t, int32_t,
                              GpuStream);

}  // namespace tierkv
