// How many blocks of a coded store's device back end are at a fixed rate.

#include <cuda_runtime.h>

#include "gpu/cuda_device.cuh"
#include "store/coded/coded_device_state.h"
#include "store/tiers/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

// A warp for a row.
__global__ void __launch_bounds__(kThreads)
    count_kernel(const __grid_constant__ CodedView s, unsigned long long* count) {
  const auto row = static_cast<int32_t>((blockIdx.x * kThreads + threadIdx.x) / kWarpLanes);
  if (row >= s.allocator.shape.table.num_rows()) return;
  const int32_t sequence = row / s.rows_per_sequence();
  if (s.allocator.sequences[sequence].state == SequenceState::kFree) return;
  const int32_t blocks = s.infos[sequence].window_first / kBlockTokens;
  int32_t found = 0;
  for (int32_t b = lane_index(); b < blocks; b += kWarpLanes) {
    const uint32_t offset = s.blocks(Component::kKey, row)[b].offset;
    const uint8_t* bytes = s.pages.base + int64_t{offset} * kBlockAlignment;
    found += static_cast<int32_t>(is_fixed_mode(load_header(bytes).mode));
  }
  if (found > 0) atomicAdd(count, static_cast<unsigned long long>(found));
}

}  // namespace

Status count_fixed_blocks(const CodedDeviceState& d, unsigned long long* count, GpuStream stream) {
  const int64_t rows = d.s.allocator.shape.table.num_rows();
  count_kernel<<<ctas_for(rows, kThreads / kWarpLanes), kThreads, 0, stream>>>(d.s, count);
  return launch_status("stats");
}

}  // namespace tierkv
