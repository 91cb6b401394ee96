// Steps of a coded store: a warp codes the oldest raw block of a row where it is due.

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/coded_encode_warp.cuh"
#include "codec/cuda_device.cuh"
#include "store/coded_device_state.h"
#include "store/coded_values.h"
#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kEncodeWarps = 4;
constexpr int32_t kThreads = 256;

struct StepRowOf {
  int32_t entry, sequence, within, row;
};
__device__ StepRowOf step_row(const CodedDeviceState& d, int32_t i) {
  const int32_t rows = d.s.rows_per_sequence(), sequence = d.common.batch[i / rows];
  return {i / rows, sequence, i % rows, sequence * rows + i % rows};
}

__device__ EncodeMemory warp_memory(uint8_t* shared) {
  uint8_t* mine = shared + static_cast<int32_t>(threadIdx.x / 32) * kEncodeWarpBytes;
  return {reinterpret_cast<int16_t*>(mine), reinterpret_cast<uint32_t*>(mine + kEncodeCodesBytes),
          reinterpret_cast<uint32_t*>(mine + kEncodeCodesBytes + kMaxCodedBlockBytes)};
}

// Codes the oldest raw block of a row into memory.block; its bytes. By the whole warp.
__device__ int32_t encode_oldest(const CodedDeviceState& d, const StepRowOf& r, Component c,
                                 const EncodeMemory& memory, int32_t* counter) {
  const uint8_t* page = d.s.page_bytes(d.s.page_id(r.row, kRawSide, 0));
  const float step = (c == Component::kKey ? d.key_steps : d.value_steps)[r.within];
  for (int32_t i = lane_index(); i < kBlockTokens * d.s.head_dim; i += kWarpLanes) {
    const int32_t t = i / d.s.head_dim, dim = i % d.s.head_dim;
    const int32_t at = raw_value_byte(d.s.head_dim, c, t, dim);
    memory.codes[t * kSliceDims + dim] =
        step_code(*reinterpret_cast<const uint16_t*>(page + at), step);
  }
  __syncwarp();
  const DeviceCodebook& book =
      d.books[2 * (r.within / d.s.num_kv_heads) + (c == Component::kKey ? 0 : 1)];
  const EncodeSlice slice{book, memory, kBlockTokens, d.s.head_dim,
                          most_coded_block_bytes(d.s.head_dim)};
  return encode_slice(slice, counter);
}

// The row's warp in a grid of kEncodeWarps a CTA; -1: none.
__device__ int32_t warp_item(int32_t items) {
  const auto i = static_cast<int32_t>(blockIdx.x * kEncodeWarps + threadIdx.x / 32);
  return i < items ? i : -1;
}

__global__ void __launch_bounds__(kEncodeWarps * 32)
    plan_kernel(const __grid_constant__ CodedDeviceState d, int32_t rows, int32_t tokens) {
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ int32_t counters[kEncodeWarps];
  const int32_t i = warp_item(rows);
  if (i < 0) return;
  const StepRowOf r = step_row(d, i);
  SideCounts added;
  if (r.sequence != kPaddingSequence) {
    const SequenceInfo info = d.s.infos[r.sequence];
    added.of[kRawSide] = tokens;
    if (coded_step_fills_block(info, tokens, d.s.window_tokens)) {
      const EncodeMemory memory = warp_memory(shared);
      const int32_t held = d.s.allocator.tokens[r.row].of[kCodedSide];
      int32_t end = held;
      for (const Component c : {Component::kKey, Component::kValue}) {
        const int32_t units =
            encode_oldest(d, r, c, memory, counters + threadIdx.x / 32) / kBlockAlignment;
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
  const int32_t i = warp_item(rows);
  if (i < 0 || d.common.report->status != StatusCode::kOk) return;
  const StepRowOf r = step_row(d, i);
  if (r.sequence == kPaddingSequence) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  if (!coded_step_fills_block(info, tokens, d.s.window_tokens)) return;
  const EncodeMemory memory = warp_memory(shared);
  int32_t end = d.s.allocator.tokens[r.row].of[kCodedSide] - d.common.row_counts[i].of[kCodedSide];
  for (const Component c : {Component::kKey, Component::kValue}) {
    const int32_t units =
        encode_oldest(d, r, c, memory, counters + threadIdx.x / 32) / kBlockAlignment;
    const int32_t begin = block_begin(end, units, d.s.page_units());
    const int32_t page = d.s.page_id(r.row, kCodedSide, begin / d.s.page_units());
    const int32_t in_page = begin % d.s.page_units();
    auto* to = reinterpret_cast<uint4*>(d.s.page_bytes(page)) + in_page;
    for (int32_t j = lane_index(); j < units; j += kWarpLanes) {
      to[j] = reinterpret_cast<const uint4*>(memory.block)[j];
    }
    if (lane_index() == 0) {
      const auto first = static_cast<uint32_t>(int64_t{page} * d.s.page_units() + in_page);
      d.s.blocks(c, r.row)[info.window_first / kBlockTokens] = {first,
                                                                static_cast<uint32_t>(units)};
    }
    __syncwarp();
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

template <class Kernel>
Status launch_encoder(Kernel kernel, const CodedDeviceState& d, int32_t rows, int32_t tokens,
                      GpuStream stream) {
  constexpr int32_t kBytes = kEncodeWarps * kEncodeWarpBytes;
  if (Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
          "shared memory");
      !s) {
    return s;
  }
  kernel<<<ctas_for(rows, kEncodeWarps), kEncodeWarps * 32, kBytes, stream>>>(d, rows, tokens);
  return launch_status("begin_step");
}

}  // namespace

Status plan_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  return launch_encoder(plan_kernel, d, count * d.s.rows_per_sequence(), tokens, stream);
}

Status apply_coded_step(const CodedDeviceState& d, int32_t count, int32_t tokens,
                        GpuStream stream) {
  const int32_t rows = count * d.s.rows_per_sequence();
  if (Status s = launch_encoder(apply_kernel, d, rows, tokens, stream); !s) return s;
  finish_kernel<<<1, kThreads, 0, stream>>>(d, count, tokens);
  return launch_status("begin_step");
}

}  // namespace tierkv
