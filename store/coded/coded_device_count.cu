// The histograms of the codes that a prompt will have, from its raw pages: what the store's first
// codebooks are made of (KVComp section 3.1.2).

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/gpu/coded/code_counter.cuh"
#include "codec/gpu/coded/code_histograms.h"
#include "store/coded/coded_device_prompt.cuh"

namespace tierkv {
namespace {

constexpr int32_t kWarps = kCounterThreads / kWarpLanes;
constexpr int32_t kCountBytes = kCounterBytes + kWarps * kEncodeMeansBytes;

// blockIdx.y: a layer and a component, whose blocks the warps of its CTAs share.
template <bool kSliced>
__global__ void __launch_bounds__(kCounterThreads, 1)
    count_kernel(const __grid_constant__ CodedDeviceState d,
                 const __grid_constant__ PromptHistograms to) {
  extern __shared__ __align__(16) uint32_t shared[];
  const auto warp = static_cast<int32_t>(threadIdx.x / kWarpLanes);
  const int32_t layer = static_cast<int32_t>(blockIdx.y) / 2, heads = d.s.num_kv_heads;
  const int32_t layers = d.s.rows_per_sequence() / heads;
  const Component c = component_of(blockIdx.y);
  const int64_t histogram = int64_t{static_cast<int32_t>(c)} * layers + layer;
  const CodeCounter counter{shared, to.pairs + histogram * kHistogramCounts,
                            to.wide + histogram * kHistogramCounts};
  uint32_t* const means = shared + (kCounterBytes + warp * kEncodeMeansBytes) / 4;
  counter.clear();
  LaneEncoder whole{};  // of which only the shape counts
  whole.dims = kSliced ? kSliceDims : d.s.head_dim;
  const int64_t items = int64_t{to.entries} * heads * to.most_blocks;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < items;
       i += int64_t{gridDim.x} * kWarps) {
    const auto row = static_cast<int32_t>(i / to.most_blocks);
    const auto block = static_cast<int32_t>(i % to.most_blocks);
    const int32_t within = layer * heads + row % heads;
    const CodedRowOf r = coded_row_of(d, row / heads * d.s.rows_per_sequence() + within);
    if (r.sequence == kPaddingSequence || block >= coded_blocks(d, d.s.infos[r.sequence])) continue;
    RawBlock from = prompt_block(d, r, c, block);
#pragma unroll 1
    for (from.slice = 0; from.slice < (kSliced ? slice_count(d.s.head_dim) : 1); ++from.slice) {
      auto source = raw_tile_source<kSliced>(d, from, means);
      for_each_fragment(whole, source, [&](int32_t, int32_t, const FragmentCodes& codes) {
#pragma unroll
        for (int32_t p = 0; p < kPairsPerFragment; ++p) counter.count(codes[p][0], codes[p][1]);
      });
      if (source.status != StatusCode::kOk) report_code(d, r);
    }
  }
  counter.flush();
}

}  // namespace

Status count_prompt_codes(const CodedDeviceState& d, const PromptHistograms& to, GpuStream stream) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const auto kernel = slice_count(d.s.head_dim) > 1 ? count_kernel<true> : count_kernel<false>;
  if (Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kCountBytes),
          "shared memory");
      !s) {
    return s;
  }
  const int32_t histograms = 2 * d.s.rows_per_sequence() / d.s.num_kv_heads;
  const uint32_t wanted = ctas_for(int64_t{to.entries} * d.s.num_kv_heads * to.most_blocks, kWarps);
  const auto room = static_cast<uint32_t>((limits->sms + histograms - 1) / histograms);
  const dim3 ctas(std::min(wanted, room), static_cast<uint32_t>(histograms));
  kernel<<<ctas, kCounterThreads, kCountBytes, stream>>>(d, to);
  return launch_status("end_prompt");
}

}  // namespace tierkv
