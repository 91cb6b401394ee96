#include "attention/decode.h"

#include "attention/decode_kernel.cuh"
#include "attention/launch.cuh"

namespace tierkv {
namespace {

using DecodeKernel = void (*)(DecodeParams);

// A wide kernel has two blocks of columns.
DecodeKernel kernel_of(int32_t head_dim, int32_t of_row) {
  const bool is_wide = column_blocks(of_row) == 2;
  switch (head_dim) {
    case 64:
      return is_wide ? decode_kernel<64, 2> : decode_kernel<64, 1>;
    case 96:
      return is_wide ? decode_kernel<96, 2> : decode_kernel<96, 1>;
    case 128:
      return is_wide ? decode_kernel<128, 2> : decode_kernel<128, 1>;
    case 256:
      return is_wide ? nullptr : decode_kernel<256, 1>;
    default:
      return nullptr;
  }
}

Status no_kernel(int32_t head_dim) {
  return Status(StatusCode::kUnsupported,
                "no decode kernel for head_dim " + std::to_string(head_dim));
}

}  // namespace

Status prepare_decode(int32_t head_dim, int32_t of_row, int32_t shared_bytes) {
  const DecodeKernel kernel = kernel_of(head_dim, of_row);
  if (kernel == nullptr) return no_kernel(head_dim);
  return cuda_status(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "shared memory of the decode kernel");
}

Status launch_decode(const DecodeParams& params, int32_t head_dim, int32_t num_ctas,
                     GpuStream stream) {
  const DecodeKernel kernel = kernel_of(head_dim, params.columns.of_row);
  if (kernel == nullptr) return no_kernel(head_dim);
  const int32_t bytes =
      decode_shared(head_dim, params.columns.of_row, params.slot_bytes, params.slots).bytes;
  return launch_after_previous(kernel, num_ctas, kDecodeThreads, bytes, stream, params);
}

}  // namespace tierkv
