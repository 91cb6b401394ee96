// The kernels of calls with head_dim 256, or with families of codebooks.

#include "attention/coded/coded_breadth.cuh"

namespace tierkv {

CodedKernel find_slices_kernel(const CodedAttention& call, int32_t copies_log) {
  constexpr auto kSlices = CodedBreadth::kSlices;
  if (call.head_dim == 64) return BroadKernels<4, kSlices>::find(call, copies_log);
  if (call.head_dim == 96) return BroadKernels<6, kSlices>::find(call, copies_log);
  if (call.head_dim == 128) return BroadKernels<8, kSlices>::find(call, copies_log);
  return BroadKernels<16, kSlices>::find(call, copies_log);
}

}  // namespace tierkv
