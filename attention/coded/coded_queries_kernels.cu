// The kernels of calls of several queries, or in bfloat16.

#include "attention/coded/coded_breadth.cuh"

namespace tierkv {

CodedKernel find_queries_kernel(const CodedAttention& call, int32_t copies_log) {
  constexpr auto kQueries = CodedBreadth::kQueries;
  if (call.head_dim == 64) return BroadKernels<4, kQueries>::find(call, copies_log);
  if (call.head_dim == 96) return BroadKernels<6, kQueries>::find(call, copies_log);
  return BroadKernels<8, kQueries>::find(call, copies_log);
}

}  // namespace tierkv
