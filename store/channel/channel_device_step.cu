// Where tokens begin, prompts and steps: counts for the page operations; blocks of a step;
// sequences for attention.

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/gpu/channel_encode.cuh"
#include "store/channel/channel_device_state.h"
#include "store/tiers/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kCtasPerSm = 24;  // four rounds of those that are resident

__device__ int32_t thread_item() {
  return static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
}

__device__ SequenceInfo info_after(const ChannelDeviceState& d, const SequenceInfo& info,
                                   int32_t tokens) {
  return channel_info_after_begin(info, tokens, d.s.window_tokens, d.s.layout.tokens);
}

// All rows of a sequence hold as much, and its first one says for all what to reserve.
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ ChannelDeviceState d, ChannelBegin begin) {
  const int32_t i = thread_item(), rows = d.s.rows_per_sequence();
  if (i >= begin.count * rows) return;
  const int32_t entry = i / rows, sequence = d.common.batch[entry];
  if (sequence == kPaddingSequence) return;
  const SideCounts held = d.s.allocator.tokens[sequence * rows + i % rows];
  SideCounts counts = d.s.counts_after(held, info_after(d, d.s.infos[sequence], begin.tokens));
  SideCounts pages;
  for (const int32_t side : {kBlockSide, kResidualSide}) {
    const int32_t per_page = d.s.allocator.shape.table.tokens_per_page[side];
    pages.of[side] = pages_for(counts.of[side], per_page) - pages_for(held.of[side], per_page);
    if (begin.call == DeviceCall::kBeginStep) counts.of[side] -= held.of[side];
  }
  d.common.row_counts[i] = counts;
  if (i % rows == 0) d.common.entry_counts[entry] = pages;
}

// The CTAs of an entry, blockIdx.y, share its rows.
template <class Encoder>
__global__ void __launch_bounds__(kChannelThreads)
    step_kernel(const __grid_constant__ ChannelDeviceState d, int32_t tokens) {
  __shared__ ChannelShared<Encoder::kHeadDim> shared;
  if (d.common.report->status != StatusCode::kOk) return;
  const int32_t sequence = d.common.batch[blockIdx.y];
  if (sequence == kPaddingSequence) return;
  const SequenceInfo before = d.s.infos[sequence];
  const int32_t block = d.s.blocks_of(before);
  if (d.s.blocks_of(info_after(d, before, tokens)) == block) return;
  const int32_t rows = d.s.rows_per_sequence();
  for (auto w = static_cast<int32_t>(blockIdx.x); w < rows; w += static_cast<int32_t>(gridDim.x)) {
    const int32_t row = sequence * rows + w;
    const auto tile_at = [&](Component c, int32_t tile) {
      const int32_t position = before.window_first + tile * kTileTokens;
      return d.s.raw_page(row, before.window_first, position) + d.s.raw_tile_byte(c, position);
    };
    (void)Encoder::encode(d.s.layout, make_raw_source(tile_at), d.s.block(row, block), shared);
    __syncthreads();  // all have read their page ids
    if (threadIdx.x == 0) {
      rotate_left(d.s.page_ids(row, kResidualSide), d.s.allocator.pages[row].of[kResidualSide],
                  d.s.pages_of_blocks(1));
    }
  }
}

// One CTA, behind all rows. A begin that was refused pads the batch.
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ ChannelDeviceState d, ChannelBegin begin) {
  const StatusCode status = d.common.report->status;
  if (status != StatusCode::kOk && threadIdx.x == 0) {
    report_failure(d.common, {status, begin.call, -1, -1});
  }
  for (int32_t e = threadIdx.x; e < begin.count; e += kThreads) {
    const int32_t sequence = d.common.batch[e];
    if (sequence == kPaddingSequence) continue;
    if (status == StatusCode::kOk) {
      d.s.infos[sequence] = info_after(d, d.s.infos[sequence], begin.tokens);
    } else {
      d.common.batch[e] = kPaddingSequence;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    end_prompts_kernel(const __grid_constant__ ChannelDeviceState d, int32_t count) {
  const int32_t e = thread_item();
  if (e >= count || d.common.batch[e] == kPaddingSequence) return;
  SequenceInfo& info = d.s.infos[d.common.batch[e]];
  info = channel_info_after_prompt(info);
}

__global__ void __launch_bounds__(kThreads)
    sequences_kernel(const __grid_constant__ ChannelDeviceState d, ChannelSequence* to,
                     int32_t count) {
  const int32_t i = thread_item();
  if (i >= count) return;
  const int32_t sequence = d.common.batch[i];
  ChannelSequence found;
  if (sequence != kPaddingSequence) found = attended_sequence(d.s, sequence, d.s.infos[sequence]);
  to[i] = found;
}

}  // namespace

Status plan_channel_begin(const ChannelDeviceState& d, const ChannelBegin& begin,
                          GpuStream stream) {
  const int64_t rows = int64_t{begin.count} * d.s.rows_per_sequence();
  plan_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, begin);
  return launch_status("begin");
}

Status finish_channel_begin(const ChannelDeviceState& d, const ChannelBegin& begin,
                            GpuStream stream) {
  if (begin.call == DeviceCall::kBeginStep) {
    const Result<DeviceLimits> limits = device_limits();
    if (!limits) return limits.status();
    constexpr int32_t kMostEntries = 65535;  // of a launch
    if (begin.count > kMostEntries) {
      return Status(StatusCode::kUnsupported, "more than 65535 sequences in a step");
    }
    const uint32_t share = ctas_for(int64_t{kCtasPerSm} * limits->sms, begin.count);
    const dim3 grid(std::min(share, static_cast<uint32_t>(d.s.rows_per_sequence())),
                    static_cast<uint32_t>(begin.count));
    with_channel_encoder(d.s.layout, [&](auto encoder) {
      step_kernel<decltype(encoder)><<<grid, kChannelThreads, 0, stream>>>(d, begin.tokens);
    });
  }
  finish_kernel<<<1, kThreads, 0, stream>>>(d, begin);
  return launch_status("begin");
}

Status end_channel_prompts(const ChannelDeviceState& d, int32_t count, GpuStream stream) {
  end_prompts_kernel<<<ctas_for(count, kThreads), kThreads, 0, stream>>>(d, count);
  return launch_status("end_prompt");
}

Status find_channel_sequences(const ChannelDeviceState& d, ChannelSequence* sequences,
                              int32_t count, GpuStream stream) {
  sequences_kernel<<<ctas_for(count, kThreads), kThreads, 0, stream>>>(d, sequences, count);
  return launch_status("attend");
}

}  // namespace tierkv
