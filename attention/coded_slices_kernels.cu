// The kernels of calls that are not plain: several queries, bfloat16, head_dim 256. Fewer numbers
// of copies than plain calls have.

#include "attention/coded_kernel.cuh"

namespace tierkv {
namespace {

template <int kDimBlocks, BlockMode kMode, int kCopiesLog>
CodedKernel kernel_of_streams(int32_t streams) {
  constexpr auto kSlices = CodedBreadth::kSlices;
  return streams == 1
             ? coded_attention_kernel<kDimBlocks, BlockCode<kMode, 1, kCopiesLog>, kSlices>
             : coded_attention_kernel<kDimBlocks, BlockCode<kMode, 2, kCopiesLog>, kSlices>;
}

// Copies: of pairs from 128 channels on, in which most of the time goes into lookups.
template <int kDimBlocks, BlockMode kMode>
CodedKernel kernel_of_copies(const CodedAttention& call, int32_t copies_log) {
  const int32_t streams = call.keys.codebook.streams_per_lane;
  if (copies_log == 0) return kernel_of_streams<kDimBlocks, kMode, 0>(streams);
  if constexpr (kMode == BlockMode::kPair && kDimBlocks >= 8) {
    if (copies_log == 3) return kernel_of_streams<kDimBlocks, kMode, 3>(streams);
    if (copies_log == 4) return kernel_of_streams<kDimBlocks, kMode, 4>(streams);
  }
  return nullptr;
}

template <int kDimBlocks>
CodedKernel kernel_of_mode(const CodedAttention& call, int32_t copies_log) {
  return call.keys.codebook.mode == BlockMode::kPair
             ? kernel_of_copies<kDimBlocks, BlockMode::kPair>(call, copies_log)
             : kernel_of_copies<kDimBlocks, BlockMode::kSingle>(call, copies_log);
}

}  // namespace

CodedKernel find_slices_kernel(const CodedAttention& call, int32_t copies_log) {
  if (call.head_dim == 64) return kernel_of_mode<4>(call, copies_log);
  if (call.head_dim == 96) return kernel_of_mode<6>(call, copies_log);
  if (call.head_dim == 128) return kernel_of_mode<8>(call, copies_log);
  return kernel_of_mode<16>(call, copies_log);
}

}  // namespace tierkv
