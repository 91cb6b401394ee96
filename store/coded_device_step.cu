// Steps of a coded store: a warp codes the oldest raw block of a row where it is due.

#include <cuda_runtime.h>

#include "store/coded_device_encode.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

__device__ RawBlock oldest_block(const CodedDeviceState& d, const CodedRowOf& r, Component c) {
  return {d.s.page_bytes(d.s.page_id(r.row, kRawSide, 0)), nullptr, r.within, c};
}

__global__ void __launch_bounds__(kEncodeWarps * 32)
    plan_kernel(const __grid_constant__ CodedDeviceState d, int32_t rows, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int32_t counters[kEncodeWarps];
  const auto i = static_cast<int32_t>(encode_item(rows));
  if (i < 0) return;
  const CodedRowOf r = coded_row_of(d, i);
  SideCounts added;
  if (r.sequence != kPaddingSequence) {
    added.of[kRawSide] = tokens;
    if (coded_step_fills_block(d.s.infos[r.sequence], tokens, d.s.window_tokens)) {
      const BlockMemory memory = warp_encode_memory(shared);
      const int32_t held = d.s.allocator.tokens[r.row].of[kCodedSide];
      int32_t end = held;
      auto status = StatusCode::kOk;  // values were checked when they came in
      for (const Component c : {Component::kKey, Component::kValue}) {
        const int32_t units = encode_raw_block(d, oldest_block(d, r, c), memory,
                                               counters + threadIdx.x / 32, &status);
        end = block_begin(end, units, d.s.page_units()) + units;
      }
      added.of[kRawSide] -= kBlockTokens;
      added.of[kCodedSide] = end - held;
    }
  }
  if (lane_index() == 0) d.common.row_counts[i] = added;
}

__global__ void __launch_bounds__(kEncodeWarps * 32)
    apply_kernel(const __grid_constant__ CodedDeviceState d, int32_t rows, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int32_t counters[kEncodeWarps];
  const auto i = static_cast<int32_t>(encode_item(rows));
  if (i < 0 || d.common.report->status != StatusCode::kOk) return;
  const CodedRowOf r = coded_row_of(d, i);
  if (r.sequence == kPaddingSequence) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  if (!coded_step_fills_block(info, tokens, d.s.window_tokens)) return;
  const BlockMemory memory = warp_encode_memory(shared);
  int32_t end = d.s.allocator.tokens[r.row].of[kCodedSide] - d.common.row_counts[i].of[kCodedSide];
  auto status = StatusCode::kOk;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const int32_t units =
        encode_raw_block(d, oldest_block(d, r, c), memory, counters + threadIdx.x / 32, &status);
    const int32_t begin = block_begin(end, units, d.s.page_units());
    const CodedBlockRef ref = write_encoded(d, r.row, begin, units, memory);
    if (lane_index() == 0) d.s.blocks(c, r.row)[info.window_first / kBlockTokens] = ref;
    end = begin + units;
  }
  if (lane_index() == 0) {
    rotate_raw_pages(d.s.page_ids(r.row, kRawSide), d.s.allocator.pages[r.row].of[kRawSide]);
  }
}

// One CTA, behind all rows. A step that was refused pads the batch.
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ CodedDeviceState d, int32_t count, int32_t tokens) {
  const StatusCode status = d.common.report->status;
  if (status != StatusCode::kOk && threadIdx.x == 0) {
    report_failure(d.common, {status, DeviceCall::kBeginStep, -1, -1});
  }
  for (int32_t e = threadIdx.x; e < count; e += kThreads) {
    const int32_t sequence = d.common.batch[e];
    if (sequence == kPaddingSequence) continue;
    if (status == StatusCode::kOk) {
      SequenceInfo& info = d.s.infos[sequence];
      info = coded_info_after_step(info, tokens, d.s.window_tokens);
    } else {
      d.common.batch[e] = kPaddingSequence;
    }
  }
}

}  // namespace

Status plan_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  const int32_t rows = count * d.s.rows_per_sequence();
  return launch_encoder(plan_kernel, rows, stream, d, rows, tokens);
}

Status apply_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens,
                        GpuStream stream) {
  const int32_t rows = count * d.s.rows_per_sequence();
  if (Status s = launch_encoder(apply_kernel, rows, stream, d, rows, tokens); !s) return s;
  finish_kernel<<<1, kThreads, 0, stream>>>(d, count, tokens);
  return launch_status("begin_step");
}

}  // namespace tierkv
