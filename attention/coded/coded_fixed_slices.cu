// The kernels of calls whose rows may have fixed-rate blocks, with head_dim 256 or with families of
// codebooks.

#include "attention/coded/coded_breadth.cuh"

namespace tierkv {

CodedKernel find_fixed_slices_kernel(const CodedAttention& call, int32_t copies_log) {
  constexpr auto kSlices = CodedBreadth::kSlices;
  if (call.head_dim == 64) return BroadKernels<4, kSlices, true>::find(call, copies_log);
  if (call.head_dim == 96) return BroadKernels<6, kSlices, true>::find(call, copies_log);
  if (call.head_dim == 128) return BroadKernels<8, kSlices, true>::find(call, copies_log);
  return BroadKernels<16, kSlices, true>::find(call, copies_log);
}

}  // namespace tierkv
