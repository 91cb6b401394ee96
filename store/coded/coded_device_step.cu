// Steps of a coded store: two warps code the oldest raw block of a row where it is due, one its
// keys, the other its values.

#include <cuda_runtime.h>

#include "store/coded/coded_device_encode.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

__device__ RawBlock oldest_block(const CodedDeviceState& d, const CodedRowOf& r, Component c) {
  return {d.s.page_bytes(d.s.page_id(r.row, kRawSide, 0)), nullptr, r.row, c};
}

// A component of a row, and whether the step codes a block of it. Neighbouring warps have the two
// of a row.
struct StepItem {
  CodedRowOf r;
  int32_t batch_row;  // -1: none
  Component component;
  bool coded;
  bool fixed;  // at a fixed rate
};
__device__ StepItem step_item(const CodedDeviceState& d, const EncodeItems& items, int32_t tokens) {
  const EncodeItem item = encode_item(d, items, first_item());
  if (item.row < 0) return {{}, -1, Component::kKey, false, false};
  const auto component = item.part == 0 ? Component::kKey : Component::kValue;
  StepItem step = {coded_row_of(d, item.row), item.row, component, false, false};
  step.coded = step.r.sequence != kPaddingSequence &&
               coded_step_fills_block(d.s.infos[step.r.sequence], tokens, d.s.window_tokens);
  step.fixed = step.coded && d.s.fixed.takes(d.s.infos[step.r.sequence].window_first, 0.0f);
  return step;
}
static_assert(kEncodeWarps % 2 == 0);

// Where the two blocks of a row go, behind `end` units; by the whole CTA, of which each warp gives
// the units of its block.
struct RowPlaces {
  int32_t begin[2];
  int32_t end;
};
__device__ RowPlaces row_places(const CodedDeviceState& d, int32_t end, int32_t units) {
  __shared__ int32_t units_of[kEncodeWarps];
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  if (lane_index() == 0) units_of[warp] = units;
  __syncthreads();
  RowPlaces at{};
  at.end = end;
  for (int32_t c = 0; c < 2; ++c) {
    const int32_t size = units_of[warp / 2 * 2 + c];
    at.begin[c] = block_begin(at.end, size, d.s.page_units());
    at.end = at.begin[c] + size;
  }
  return at;
}

template <bool kChoices>
__global__ void __launch_bounds__(kEncodeThreads)
    plan_kernel(const __grid_constant__ CodedDeviceState d, EncodeItems items, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  const StepItem step = step_item(d, items, tokens);
  SideCounts added;
  if (step.batch_row >= 0 && step.r.sequence != kPaddingSequence) added.of[kRawSide] = tokens;
  if (__syncthreads_or(step.coded) != 0) {
    const Encoder encoder = make_encoder(d, static_cast<int32_t>(blockIdx.y), shared);
    int32_t held = 0, units = 0;
    if (step.coded) {
      held = d.s.allocator.tokens[step.r.row].of[kCodedSide];
      // Values were checked when they came in.
      units = plan_slices<kChoices>(d, encoder, oldest_block(d, step.r, step.component)).units;
      if (step.fixed) units = fixed_units(d, step.component);
    }
    const RowPlaces at = row_places(d, held, units);
    if (step.coded) {
      added.of[kRawSide] -= kBlockTokens;
      added.of[kCodedSide] = at.end - held;
    }
  }
  if (step.batch_row >= 0 && step.component == Component::kKey && lane_index() == 0) {
    d.common.row_counts[step.batch_row] = added;
  }
}

template <bool kChoices>
__global__ void __launch_bounds__(kEncodeThreads)
    apply_kernel(const __grid_constant__ CodedDeviceState d, EncodeItems items, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (d.common.report->status != StatusCode::kOk) return;
  const StepItem step = step_item(d, items, tokens);
  if (__syncthreads_or(step.coded) == 0) return;
  const Encoder encoder = make_encoder(d, static_cast<int32_t>(blockIdx.y), shared);
  const Component c = step.component;
  const int32_t row = step.r.row;
  RawBlock from{};
  PlannedBlock<kChoices> planned{};
  int32_t held = 0;
  if (step.coded) {
    held = d.s.allocator.tokens[row].of[kCodedSide] -
           d.common.row_counts[step.batch_row].of[kCodedSide];
    from = oldest_block(d, step.r, c);
    planned = plan_slices<kChoices>(d, encoder, from);
  }
  if (step.fixed) planned.units = fixed_units(d, c);
  const RowPlaces at = row_places(d, held, planned.units);
  if (step.coded) {
    const BlockPlace to = block_place(d, row, at.begin[static_cast<int32_t>(c)]);
    if (step.fixed) {
      write_fixed<kChoices>(d, encoder, from, to.bytes);
    } else if constexpr (kChoices) {
      write_slices<kChoices>(d, encoder, from, planned.book, to.bytes);
    } else {
      write_block(encoder.of(d, planned.book), planned.source, planned.plan, encoder.block(d),
                  to.bytes);
    }
    const int32_t block = d.s.infos[step.r.sequence].window_first / kBlockTokens;
    if (lane_index() == 0) {
      d.s.blocks(c, row)[block] = {to.offset, static_cast<uint32_t>(planned.units)};
    }
  }
  __syncthreads();  // both components have read the raw page
  if (step.coded && c == Component::kKey && lane_index() == 0) {
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
  return launch_encoder(d.has_choices() ? plan_kernel<true> : plan_kernel<false>, {}, d,
                        {count * d.s.num_kv_heads, 2}, stream, tokens);
}

Status apply_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens,
                        GpuStream stream) {
  EncodeLaunch launch;
  launch.writes = true;
  const EncodeItems items = {count * d.s.num_kv_heads, 2};
  if (Status s = launch_encoder(d.has_choices() ? apply_kernel<true> : apply_kernel<false>, launch,
                                d, items, stream, tokens);
      !s)
    return s;
  finish_kernel<<<1, kThreads, 0, stream>>>(d, count, tokens);
  return launch_status("begin_step");
}

}  // namespace tierkv
