// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "bench/baselines/tree/tree_decode.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

template <class Decoder>
__global__ void __launch_bounds__(kTreeDecodeWarps * 32, 1)
    tree_decode_kernel(const __grid_constant__ TreeDecode call) {
  extern __shared__ __align__(1024) uint8_t shared[];
  decode_tree_blocks<Decoder>(call, shared);
}

template <class Decoder>
Status launch(const TreeDecode& call, GpuStream stream) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // The region's own alignment may cost its size once more.
  const int32_t base = 2 * Decoder::region_bytes(call);
  const int32_t each = tree_decode_warp_bytes<Decoder>(call);
  const int32_t warps = std::min(kTreeDecodeWarps, (limits->shared_bytes - base) / each);
  if (warps < 1) return Status(StatusCode::kUnsupported, "tree decode: too little shared memory");
  const int32_t bytes = base + warps * each;
  if (Status s =
          cuda_status(cudaFuncSetAttribute(tree_decode_kernel<Decoder>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                      "shared memory");
      !s) {
    return s;
  }
  const int32_t ctas = std::min(limits->sms, (call.num_blocks + warps - 1) / warps);
  tree_decode_kernel<Decoder><<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                                static_cast<size_t>(bytes), stream>>>(call);
  return cuda_status(cudaGetLastError(), "decode_by_form");
}

}  // namespace

Status decode_by_form(const TreeDecode& call, DecodeForm form, GpuStream stream) {
  const bool pairs = call.codebook.mode == BlockMode::kPair;
  if (form == DecodeForm::kTable) {
    return pairs ? launch<TableLookup<true>>(call, stream)
                 : launch<TableLookup<false>>(call, stream);
  }
  if (pairs) return Status(StatusCode::kUnsupported, "tree decode: pairs by a tree");
  return form == DecodeForm::kArrayTree ? launch<ArrayTree>(call, stream)
                                        : launch<TreeLoop>(call, stream);
}

}  // namespace tierkv
