// The kernels of calls whose rows may have fixed-rate blocks: instances of their own, so that those
// of coded blocks alone keep their registers. They take several queries and bfloat16, too.

#include "attention/coded_kernel.cuh"

namespace tierkv {
namespace {

template <int kDimBlocks, int kCopiesLog>
CodedKernel kernel_of_streams(int32_t streams) {
  using One = WithFixedBlocks<BlockCode<BlockMode::kPair, 1, kCopiesLog>>;
  using Two = WithFixedBlocks<BlockCode<BlockMode::kPair, 2, kCopiesLog>>;
  return streams == 1 ? coded_attention_kernel<kDimBlocks, One, CodedBreadth::kQueries>
                      : coded_attention_kernel<kDimBlocks, Two, CodedBreadth::kQueries>;
}

}  // namespace

CodedKernel find_fixed_kernel(const CodedAttention& call, int32_t copies_log) {
  const int32_t streams = call.keys.codebook.streams_per_lane;
  if (copies_log == 0) {
    return call.head_dim == 64   ? kernel_of_streams<4, 0>(streams)
           : call.head_dim == 96 ? kernel_of_streams<6, 0>(streams)
                                 : kernel_of_streams<8, 0>(streams);
  }
  // As many as words of 10 and of 11 bits have room for.
  if (call.head_dim != 128) return nullptr;
  if (copies_log == 4) return kernel_of_streams<8, 4>(streams);
  return copies_log == 3 ? kernel_of_streams<8, 3>(streams) : nullptr;
}

}  // namespace tierkv
