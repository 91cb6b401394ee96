// The kernels of calls whose rows may have fixed-rate blocks: instances of their own, so that those
// of coded blocks alone keep their registers. They take several queries and bfloat16, too.

#include "attention/coded/coded_breadth.cuh"

namespace tierkv {

CodedKernel find_fixed_kernel(const CodedAttention& call, int32_t copies_log) {
  constexpr auto kQueries = CodedBreadth::kQueries;
  if (!call.is_uniform()) return find_fixed_slices_kernel(call, copies_log);
  if (call.head_dim == 64) return BroadKernels<4, kQueries, true>::find(call, copies_log);
  if (call.head_dim == 96) return BroadKernels<6, kQueries, true>::find(call, copies_log);
  return BroadKernels<8, kQueries, true>::find(call, copies_log);
}

}  // namespace tierkv
