// The kernels of calls that are not plain: several queries or bfloat16.

#include "attention/coded_kernel.cuh"

namespace tierkv {
namespace {

template <int kDimBlocks, BlockMode kMode, int kCopiesLog>
CodedKernel kernel_of_streams(int32_t streams) {
  return streams == 1 ? coded_attention_kernel<kDimBlocks, BlockCode<kMode, 1, kCopiesLog>, true>
                      : coded_attention_kernel<kDimBlocks, BlockCode<kMode, 2, kCopiesLog>, true>;
}

// Fewer numbers of copies than plain calls have.
template <BlockMode kMode>
CodedKernel kernel_of_copies(const CodedAttention& call, int32_t copies_log) {
  const int32_t streams = call.keys.codebook.streams_per_lane;
  if (copies_log == 0) {
    if (call.head_dim == 64) return kernel_of_streams<4, kMode, 0>(streams);
    if (call.head_dim == 96) return kernel_of_streams<6, kMode, 0>(streams);
    return kernel_of_streams<8, kMode, 0>(streams);
  }
  if constexpr (kMode == BlockMode::kPair) {
    if (call.head_dim == 128 && copies_log == 3) return kernel_of_streams<8, kMode, 3>(streams);
    if (call.head_dim == 128 && copies_log == 4) return kernel_of_streams<8, kMode, 4>(streams);
  }
  return nullptr;
}

}  // namespace

CodedKernel find_wide_kernel(const CodedAttention& call, int32_t copies_log) {
  return call.keys.codebook.mode == BlockMode::kPair
             ? kernel_of_copies<BlockMode::kPair>(call, copies_log)
             : kernel_of_copies<BlockMode::kSingle>(call, copies_log);
}

}  // namespace tierkv
