// The end of a prompt of a coded store: codes, places, blocks, and what stays raw.

#include <cuda_runtime.h>

#include "store/coded/coded_device_prompt.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

// The tokens that stay raw must be what a step can code one day. A CTA for a component of a row.
__global__ void __launch_bounds__(kThreads)
    check_rest_kernel(const __grid_constant__ CodedDeviceState d) {
  const CodedRowOf r = coded_row_of(d, static_cast<int32_t>(blockIdx.x / 2));
  if (r.sequence == kPaddingSequence) return;
  const Component c = component_of(blockIdx.x);
  const SequenceInfo info = d.s.infos[r.sequence];
  const int32_t first = coded_blocks(d, info) * kBlockTokens;
  for (int32_t i = threadIdx.x; i < (info.num_tokens - first) * d.s.head_dim; i += kThreads) {
    const int32_t p = first + i / d.s.head_dim;
    const uint16_t y =
        raw_value(d, prompt_block(d, r, c, p / kBlockTokens), p % kBlockTokens, i % d.s.head_dim);
    if (check_centred(y, d.s.step(c, r.row)) != StatusCode::kOk) report_code(d, r);
  }
}

// The block and component of an item, of those that the prompt codes.
struct PromptItem {
  CodedRowOf r;
  int32_t block;
  Component component;
  bool coded;
};
__device__ PromptItem prompt_item(const CodedDeviceState& d, const EncodeItem& item) {
  PromptItem p = {coded_row_of(d, item.row), item.part / 2, component_of(item.part), false};
  p.coded = p.r.sequence != kPaddingSequence && p.block < coded_blocks(d, d.s.infos[p.r.sequence]);
  return p;
}

// Items of a row: block, component. Sizes go to the directory.
template <bool kChoices>
__global__ void __launch_bounds__(kEncodeThreads, 4)
    size_kernel(const __grid_constant__ CodedDeviceState d, EncodeItems items) {
  extern __shared__ __align__(16) uint8_t shared[];
  const Encoder encoder = make_encoder(d, static_cast<int32_t>(blockIdx.y), shared);
  for (int64_t i = first_item();; i += items_of_grid()) {
    const EncodeItem item = encode_item(d, items, i);
    if (item.row < 0) return;
    const PromptItem p = prompt_item(d, item);
    if (!p.coded) continue;
    const Component c = p.component;
    const auto plan = plan_slices<kChoices>(d, encoder, prompt_block(d, p.r, c, p.block));
    if (plan.source.status != StatusCode::kOk) report_code(d, p.r);
    const int32_t units = becomes_fixed(d, p.r, p.block) ? fixed_units(d, c) : plan.units;
    if (lane_index() == 0) {
      d.s.blocks(c, p.r.row)[p.block] = {0, static_cast<uint32_t>(units)};
    }
  }
}

// One CTA: a prompt with a value that has no code pads the batch; the counts begin at zero.
__global__ void __launch_bounds__(kThreads)
    admit_kernel(const __grid_constant__ CodedDeviceState d, int32_t count) {
  const bool failed = has_failed(d.common);
  for (int32_t e = threadIdx.x; e < count; e += kThreads) {
    d.common.entry_counts[e] = SideCounts{};
    if (failed) d.common.batch[e] = kPaddingSequence;
  }
}

// Where the blocks of a row go: until they are written the directory has units of the row.
__global__ void __launch_bounds__(kThreads)
    place_kernel(const __grid_constant__ CodedDeviceState d, int32_t rows) {
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= rows) return;
  const CodedRowOf r = coded_row_of(d, i);
  if (r.sequence == kPaddingSequence) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  int32_t end = 0;
  for (int32_t b = 0; b < coded_blocks(d, info); ++b) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      CodedBlockRef& ref = d.s.blocks(c, r.row)[b];
      const auto units = static_cast<int32_t>(ref.units);
      const int32_t begin = block_begin(end, units, d.s.page_units());
      ref.offset = static_cast<uint32_t>(begin);
      end = begin + units;
    }
  }
  SideCounts kept;
  kept.of[kCodedSide] = end;
  kept.of[kRawSide] =
      CodedView::raw_tokens(coded_info_after_prompt(info.num_tokens, d.s.window_tokens));
  d.common.row_counts[i] = kept;
  atomicMax(&d.common.entry_counts[r.entry].of[kCodedSide], pages_for(end, d.s.page_units()));
}

template <bool kChoices>
__global__ void __launch_bounds__(kEncodeThreads, 3)
    write_kernel(const __grid_constant__ CodedDeviceState d, EncodeItems items) {
  extern __shared__ __align__(16) uint8_t shared[];
  if (d.common.report->status != StatusCode::kOk) return;
  const Encoder encoder = make_encoder(d, static_cast<int32_t>(blockIdx.y), shared);
  for (int64_t i = first_item();; i += items_of_grid()) {
    const EncodeItem item = encode_item(d, items, i);
    if (item.row < 0) return;
    const PromptItem p = prompt_item(d, item);
    if (!p.coded) continue;
    const Component c = p.component;
    CodedBlockRef& ref = d.s.blocks(c, p.r.row)[p.block];
    const BlockPlace to = block_place(d, p.r.row, static_cast<int32_t>(ref.offset));
    const RawBlock block = prompt_block(d, p.r, c, p.block);
    if (becomes_fixed(d, p.r, p.block)) {
      write_fixed<kChoices>(d, encoder, block, to.bytes);
    } else {
      int32_t book = encoder.index(d, c, 0);
      if (kChoices && d.books_of(c) > 1) book = plan_slices<kChoices>(d, encoder, block).book;
      write_slices<kChoices>(d, encoder, block, book, to.bytes);
    }
    if (lane_index() == 0) ref.offset = to.offset;
  }
}

// Raw tokens that stay: their means come off, and their pages' content moves to the first pages,
// whose blocks are coded by now. A CTA for a component of a row.
__global__ void __launch_bounds__(kThreads)
    move_rest_kernel(const __grid_constant__ CodedDeviceState d) {
  if (d.common.report->status != StatusCode::kOk) return;
  const CodedRowOf r = coded_row_of(d, static_cast<int32_t>(blockIdx.x / 2));
  if (r.sequence == kPaddingSequence) return;
  const Component c = component_of(blockIdx.x);
  const SequenceInfo info = d.s.infos[r.sequence];
  const int32_t first = coded_blocks(d, info), head_dim = d.s.head_dim;
  const int32_t raw = info.num_tokens - first * kBlockTokens;
  for (int32_t j = 0; j * kBlockTokens < raw; ++j) {
    const RawBlock from = prompt_block(d, r, c, first + j);
    uint8_t* to = d.s.page_bytes(d.s.page_id(r.row, kRawSide, j));
    const int32_t tokens = min(kBlockTokens, raw - j * kBlockTokens);
    const int32_t slots = (tokens + kTileTokens - 1) / kTileTokens * kTileTokens;
    for (int32_t i = threadIdx.x; i < slots * head_dim; i += kThreads) {
      const int32_t slot = i / head_dim, dim = i % head_dim;
      const uint16_t y = slot < tokens ? raw_value(d, from, slot, dim) : uint16_t{0};
      *reinterpret_cast<uint16_t*>(to + raw_value_byte(head_dim, c, slot, dim)) = y;
    }
    __syncthreads();  // the next page's target may be this one's source
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ CodedDeviceState d, int32_t count) {
  const StatusCode status = d.common.report->status;
  if (status != StatusCode::kOk && threadIdx.x == 0) {
    report_failure(d.common, {status, DeviceCall::kEndPrompt, -1, -1});
  }
  for (int32_t e = threadIdx.x; e < count && status == StatusCode::kOk; e += kThreads) {
    const int32_t sequence = d.common.batch[e];
    if (sequence == kPaddingSequence) continue;
    SequenceInfo& info = d.s.infos[sequence];
    info = coded_info_after_prompt(info.num_tokens, d.s.window_tokens);
  }
}

// Enough CTAs to fill the device a few times over: each brings its code words along.
Result<uint32_t> most_encode_ctas(const CodedDeviceState& d) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const int32_t layers = d.s.rows_per_sequence() / d.s.num_kv_heads;
  return static_cast<uint32_t>((8 * limits->sms + layers - 1) / layers);
}
EncodeItems block_items(const CodedDeviceState& d, const PromptEnd& prompt) {
  return {prompt.count * d.s.num_kv_heads, prompt.most_blocks * 2};
}
bool codes_blocks(const CodedDeviceState& d, const PromptEnd& prompt) {
  return prompt.count > 0 && prompt.most_blocks > 0 && d.books != nullptr;
}

}  // namespace

Status begin_coded_prompt_end(const CodedDeviceState& d, const PromptEnd& prompt,
                              GpuStream stream) {
  if (Status s = find_prompt_basis(d, prompt, stream); !s) return s;
  const auto ctas = static_cast<uint32_t>(rows_of(d, prompt.count)) * 2;
  check_rest_kernel<<<ctas, kThreads, 0, stream>>>(d);
  return launch_status("end_prompt");
}

Status plan_coded_prompt(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream) {
  if (codes_blocks(d, prompt)) {
    const Result<uint32_t> ctas = most_encode_ctas(d);
    if (!ctas) return ctas.status();
    if (Status s = launch_encoder(d.has_choices() ? size_kernel<true> : size_kernel<false>,
                                  {*ctas, false}, d, block_items(d, prompt), stream);
        !s) {
      return s;
    }
  }
  admit_kernel<<<1, kThreads, 0, stream>>>(d, prompt.count);
  if (Status s = launch_status("end_prompt"); !s) return s;
  const int32_t rows = rows_of(d, prompt.count);
  place_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, rows);
  return launch_status("end_prompt");
}

Status write_coded_prompt(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream) {
  if (codes_blocks(d, prompt)) {
    const Result<uint32_t> ctas = most_encode_ctas(d);
    if (!ctas) return ctas.status();
    if (Status s = launch_encoder(d.has_choices() ? write_kernel<true> : write_kernel<false>,
                                  {*ctas, true}, d, block_items(d, prompt), stream);
        !s) {
      return s;
    }
  }
  const auto ctas = static_cast<uint32_t>(rows_of(d, prompt.count)) * 2;
  move_rest_kernel<<<ctas, kThreads, 0, stream>>>(d);
  return launch_status("end_prompt");
}

Status finish_coded_prompt(const CodedDeviceState& d, const PromptEnd& prompt, GpuStream stream) {
  finish_kernel<<<1, kThreads, 0, stream>>>(d, prompt.count);
  return launch_status("end_prompt");
}

}  // namespace tierkv
