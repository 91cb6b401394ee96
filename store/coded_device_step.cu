// Steps of a coded store: a warp codes the oldest raw block of a row where it is due.

#include <cuda_runtime.h>

#include "store/coded_device_encode.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

__device__ RawBlock oldest_block(const CodedDeviceState& d, const CodedRowOf& r, Component c) {
  return {d.s.page_bytes(d.s.page_id(r.row, kRawSide, 0)), nullptr, r.within, c};
}

// A row and whether the step codes a block of it.
struct StepItem {
  CodedRowOf r;
  int32_t batch_row;  // -1: none
  bool coded;
};
__device__ StepItem step_item(const CodedDeviceState& d, const EncodeItems& items, int32_t tokens) {
  const EncodeItem item = encode_item(d, items);
  if (item.row < 0) return {{}, -1, false};
  StepItem step = {coded_row_of(d, item.row), item.row, false};
  step.coded = step.r.sequence != kPaddingSequence &&
               coded_step_fills_block(d.s.infos[step.r.sequence], tokens, d.s.window_tokens);
  return step;
}

__global__ void __launch_bounds__(kEncodeThreads)
    plan_kernel(const __grid_constant__ CodedDeviceState d, EncodeItems items, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  const StepItem step = step_item(d, items, tokens);
  SideCounts added;
  if (step.batch_row >= 0 && step.r.sequence != kPaddingSequence) added.of[kRawSide] = tokens;
  if (__syncthreads_or(step.coded) != 0) {
    const Encoder encoder = make_encoder(d, static_cast<int32_t>(blockIdx.y), shared);
    if (step.coded) {
      const int32_t held = d.s.allocator.tokens[step.r.row].of[kCodedSide];
      int32_t end = held;
      auto status = StatusCode::kOk;  // values were checked when they came in
      for (const Component c : {Component::kKey, Component::kValue}) {
        const int32_t units = encode_raw_block(d, oldest_block(d, step.r, c), encoder, &status);
        end = block_begin(end, units, d.s.page_units()) + units;
      }
      added.of[kRawSide] -= kBlockTokens;
      added.of[kCodedSide] = end - held;
    }
  }
  if (step.batch_row >= 0 && lane_index() == 0) d.common.row_counts[step.batch_row] = added;
}

__global__ void __launch_bounds__(kEncodeThreads)
    apply_kernel(const __grid_constant__ CodedDeviceState d, EncodeItems items, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (d.common.report->status != StatusCode::kOk) return;
  const StepItem step = step_item(d, items, tokens);
  if (__syncthreads_or(step.coded) == 0) return;
  const Encoder encoder = make_encoder(d, static_cast<int32_t>(blockIdx.y), shared);
  if (!step.coded) return;
  const int32_t row = step.r.row;
  int32_t end =
      d.s.allocator.tokens[row].of[kCodedSide] - d.common.row_counts[step.batch_row].of[kCodedSide];
  const int32_t block = d.s.infos[step.r.sequence].window_first / kBlockTokens;
  auto status = StatusCode::kOk;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const int32_t units = encode_raw_block(d, oldest_block(d, step.r, c), encoder, &status);
    const int32_t begin = block_begin(end, units, d.s.page_units());
    const CodedBlockRef ref = write_encoded(d, row, begin, units, encoder.memory);
    if (lane_index() == 0) d.s.blocks(c, row)[block] = ref;
    end = begin + units;
  }
  if (lane_index() == 0) {
    rotate_raw_pages(d.s.page_ids(row, kRawSide), d.s.allocator.pages[row].of[kRawSide]);
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
  const EncodeItems items = {count * d.s.num_kv_heads, 1};
  return launch_encoder(plan_kernel, d, items, stream, tokens);
}

Status apply_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens,
                        GpuStream stream) {
  const EncodeItems items = {count * d.s.num_kv_heads, 1};
  if (Status s = launch_encoder(apply_kernel, d, items, stream, tokens); !s) return s;
  finish_kernel<<<1, kThreads, 0, stream>>>(d, count, tokens);
  return launch_status("begin_step");
}

}  // namespace tierkv
