#include "attention/tiers/decode.h"

#include "gpu/launch.cuh"

namespace tierkv {
namespace {

DecodeKernel kernel_of(int32_t head_dim, const DecodeChoice& choice) {
  switch (head_dim) {
    case 64:
      return decode_kernel_of<64>(choice);
    case 96:
      return decode_kernel_of<96>(choice);
    case 128:
      return decode_kernel_of<128>(choice);
    case 256:
      return decode_kernel_of<256>(choice);
    default:
      return nullptr;
  }
}

Status no_kernel(int32_t head_dim) {
  return Status(StatusCode::kUnsupported,
                "no decode kernel for head_dim " + std::to_string(head_dim));
}

}  // namespace

Status prepare_decode(int32_t head_dim, int32_t of_row, int32_t warps, int32_t shared_bytes) {
  const int32_t blocks = column_blocks(of_row);
  for (const DecodeMode mode : {DecodeMode::kPlain, DecodeMode::kNarrow, DecodeMode::kScored,
                                DecodeMode::kFull, DecodeMode::kBFloat16}) {
    const DecodeKernel kernel = kernel_of(head_dim, {blocks, mode, warps < kDecodeWarps});
    if (kernel == nullptr && !is_plain(mode)) return no_kernel(head_dim);
    if (kernel == nullptr) continue;
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return cuda_status(error, "shared memory of the decode kernel");
  }
  return Status::ok();
}

Status launch_decode(const DecodeParams& params, int32_t head_dim, int32_t num_ctas,
                     GpuStream stream) {
  const DecodeKernel kernel = kernel_of(head_dim, decode_choice(params));
  if (kernel == nullptr) return no_kernel(head_dim);
  const int32_t warps = params.warps;
  const int32_t bytes =
      decode_shared(head_dim, params.columns.of_row, params.slot_bytes, params.slots, warps).bytes;
  return launch_after_previous(kernel, num_ctas, warps * 32, bytes, stream, params);
}

}  // namespace tierkv
