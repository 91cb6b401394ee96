// The kernels of calls that walk trees.

#include "attention/coded/coded_kernel.cuh"

namespace tierkv {

CodedKernel find_tree_kernel(const CodedAttention& call, int32_t copies_log) {
  constexpr auto kPlain = CodedBreadth::kPlain;
  if (copies_log != 0) return nullptr;
  return call.head_dim == 64   ? coded_attention_kernel<4, TreeCode, kPlain>
         : call.head_dim == 96 ? coded_attention_kernel<6, TreeCode, kPlain>
                               : coded_attention_kernel<8, TreeCode, kPlain>;
}

}  // namespace tierkv
