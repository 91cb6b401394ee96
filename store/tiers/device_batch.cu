#include <algorithm>

#include "store/tiers/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

// One CTA. Pads the whole batch unless every sequence of it may go on.
__device__ void admit(const DeviceState& d, const BatchCall& call) {
  __shared__ int32_t refused;  // entry + 1
  if (threadIdx.x == 0) refused = has_failed(d) ? call.count + 1 : 0;
  __syncthreads();
  for (int32_t e = threadIdx.x; e < call.count; e += kThreads) {
    const int32_t slot = d.batch[e];
    if (call.tokens > d.max_tokens - d.s.infos[slot].num_tokens) atomicCAS(&refused, 0, e + 1);
  }
  __syncthreads();
  if (refused == 0) return;
  if (threadIdx.x == 0 && refused <= call.count) {
    report_failure(d, {StatusCode::kOutOfRange, call.call, -1, d.batch[refused - 1]});
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < call.count; e += kThreads) d.batch[e] = kPaddingSequence;
}

__global__ void __launch_bounds__(kThreads)
    batch_kernel(const __grid_constant__ DeviceState d, const __grid_constant__ BatchCall call,
                 const __grid_constant__ IdChunk ids, int32_t first) {
  const int32_t count = min(kIdChunk, call.count - first);
  for (int32_t i = threadIdx.x; i < count; i += kThreads) d.batch[first + i] = ids.slots[i];
  const bool last = first + count == call.count;
  if (!last || call.call == DeviceCall::kNone) return;
  __syncthreads();
  admit(d, call);
}

__global__ void __launch_bounds__(kThreads)
    reset_kernel(const __grid_constant__ DeviceState d, int32_t count) {
  const int32_t i = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
  if (i >= count * d.s.rows_per_sequence()) return;
  const DeviceRow r = batch_row(d, i);
  d.appended[r.row] = 0;
  if (r.within == 0) d.s.infos[r.sequence] = {0, 0, kInPrompt, 0};
}

__global__ void __launch_bounds__(kThreads)
    newest_kernel(const __grid_constant__ DeviceState d, int32_t* newest, int32_t count) {
  const int32_t e = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
  if (e >= count) return;
  const int32_t sequence = d.batch[e];
  newest[e] = sequence == kPaddingSequence ? 0 : newest_index(d.s.policy, d.s.infos[sequence]);
}

}  // namespace

Status begin_batch(const DeviceState& d, const BatchCall& call, const int32_t* slots,
                   GpuStream stream) {
  for (int32_t first = 0; first < call.count; first += kIdChunk) {
    IdChunk ids = {};
    std::copy_n(slots + first, std::min(kIdChunk, call.count - first), ids.slots);
    batch_kernel<<<1, kThreads, 0, stream>>>(d, call, ids, first);
  }
  return launch_status("begin_batch");
}

Status find_newest(const DeviceState& d, int32_t* newest, int32_t count, GpuStream stream) {
  newest_kernel<<<ctas_for(count, kThreads), kThreads, 0, stream>>>(d, newest, count);
  return launch_status("attend");
}

Status reset_sequences(const DeviceState& d, int32_t count, GpuStream stream) {
  const int64_t rows = int64_t{count} * d.s.rows_per_sequence();
  reset_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, count);
  return launch_status("reset_sequences");
}

}  // namespace tierkv
