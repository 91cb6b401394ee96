// The kernels of calls without coded blocks. They take several queries and bfloat16, too.

#include "attention/coded/coded_kernel.cuh"

namespace tierkv {

CodedKernel find_raw_kernel(const CodedAttention& call, int32_t copies_log) {
  using Raw = BlockCode<BlockMode::kRaw16, 1, 0>;
  constexpr auto kQueries = CodedBreadth::kQueries, kSlices = CodedBreadth::kSlices;
  if (copies_log != 0) return nullptr;
  return call.head_dim == 64    ? coded_attention_kernel<4, Raw, kQueries>
         : call.head_dim == 96  ? coded_attention_kernel<6, Raw, kQueries>
         : call.head_dim == 128 ? coded_attention_kernel<8, Raw, kQueries>
                                : coded_attention_kernel<16, Raw, kSlices>;
}

}  // namespace tierkv
