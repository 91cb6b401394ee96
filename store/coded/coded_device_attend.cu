// What goes into the attention of a coded store and what comes out: tokens of a layer onto raw
// pages, rows for attend_coded().

#include <cuda_runtime.h>

#include <cmath>

#include "codec/format/element.h"
#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/coded/coded_device_state.h"
#include "store/coded/coded_values.h"
#include "store/tiers/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kPlanThreads = 1024;

// Failed before this layer's append was enqueued.
__device__ bool failed_before(const CodedDeviceState& d, int32_t layer) {
  const DeviceFailure& f = *d.common.failure;
  return f.status != StatusCode::kOk && !(f.call == DeviceCall::kAppend && f.layer == layer);
}

// A CTA for the tokens of one row that lie on one raw page: blockIdx.x is the row of the layer,
// blockIdx.y the page from the first token's on. The rest of the last tile is set to zero.
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ CodedDeviceState d,
                  const __grid_constant__ DeviceTokens x) {
  const int32_t heads = d.s.num_kv_heads, head_dim = d.s.head_dim;
  const auto i = static_cast<int32_t>(blockIdx.x);
  const int32_t sequence = d.common.batch[i / heads];
  if (sequence == kPaddingSequence || failed_before(d, x.layer)) return;
  const SequenceInfo info = d.s.infos[sequence];
  const int32_t row = d.s.row_of(sequence, x.layer, i % heads);
  const int32_t end = info.num_tokens, first = end - x.tokens;
  const int32_t block = first / kBlockTokens + static_cast<int32_t>(blockIdx.y);
  const int32_t begin = max(first, block * kBlockTokens);
  if (begin >= end) return;
  const int32_t tiles_end = (end + kTileTokens - 1) / kTileTokens * kTileTokens;
  const int32_t stop = min((block + 1) * kBlockTokens, tiles_end);
  uint8_t* page = d.s.raw_page(row, info, begin);
  const bool prompt = info.window_origin == kInPrompt;
  // Tokens that nobody scores have no significance.
  for (int32_t p = begin + static_cast<int32_t>(threadIdx.x);
       prompt && d.s.fixed.format.any() && p < min(stop, end); p += kThreads) {
    *reinterpret_cast<float*>(page + raw_score_byte(head_dim, p % kBlockTokens)) = 0.0f;
  }
  auto code = StatusCode::kOk;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const void* from = c == Component::kKey ? x.k : x.v;
    const float* mean = d.s.means(c, row);
    const float step = prompt ? 1.0f : d.s.step(c, row);
    for (int32_t j = threadIdx.x; j < (stop - begin) * head_dim; j += kThreads) {
      const int32_t position = begin + j / head_dim, dim = j % head_dim;
      uint16_t y = 0;
      if (position < end) {
        const int64_t token = static_cast<int64_t>(i / heads) * x.tokens + (position - first);
        const float value =
            load_element(from, x.dtype, (token * heads + i % heads) * head_dim + dim);
        if (!is_finite(value)) {
          code = greater(code, StatusCode::kNonFinite);
        } else if (value > kMaxHalf || value < -kMaxHalf) {
          code = greater(code, StatusCode::kOutOfRange);
        }
        y = float_to_half(value);
        if (!prompt && is_finite(value)) {
          y = centred(y, mean[dim]);
          code = greater(code, check_centred(y, step));
        }
      }
      const int32_t at = raw_value_byte(head_dim, c, position % kBlockTokens, dim);
      *reinterpret_cast<uint16_t*>(page + at) = y;
    }
  }
  if (code != StatusCode::kOk) {
    report_failure(d.common, {code, DeviceCall::kAppend, x.layer, sequence});
  }
}

// The layer has its tokens unless one of its values was refused.
__global__ void __launch_bounds__(kThreads)
    finish_append_kernel(const __grid_constant__ CodedDeviceState d, int32_t layer,
                         int32_t num_rows) {
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= num_rows || has_failed(d.common)) return;
  const int32_t sequence = d.common.batch[i / d.s.num_kv_heads];
  if (sequence == kPaddingSequence) return;
  const int32_t row = d.s.row_of(sequence, layer, i % d.s.num_kv_heads);
  d.common.appended[row] = d.s.infos[sequence].num_tokens;
}

// One CTA: items of the rows before each row.
__global__ void __launch_bounds__(kPlanThreads)
    rows_kernel(const __grid_constant__ CodedDeviceState d,
                const __grid_constant__ CodedRowPlan plan) {
  __shared__ int32_t sums[kPlanThreads];
  const int32_t heads = d.s.num_kv_heads, num_rows = plan.count * heads;
  const int32_t share = (num_rows + kPlanThreads - 1) / kPlanThreads;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * share;
  const int32_t last = min(first + share, num_rows);
  const auto row_of = [&](int32_t i) {
    CodedRow row;
    const int32_t sequence = d.common.batch[i / heads];
    if (sequence == kPaddingSequence) return row;
    const SequenceInfo info = d.s.infos[sequence];
    const PageTableShape& table = d.s.allocator.shape.table;
    const int32_t r = d.s.row_of(sequence, 0, i % heads);
    row.coded_tokens = info.window_first;
    row.window_tokens = CodedView::raw_tokens(info);
    row.first_block = r * d.s.max_blocks;
    row.first_page = int64_t{r} * table.row_stride() + table.slot_of(kRawSide, 0);
    row.step = r;
    row.mean = info.window_origin == kInPrompt ? -1 : r;
    return row;
  };
  const auto items_of = [](const CodedRow& row) {
    return (row.coded_tokens + kBlockTokens - 1) / kBlockTokens +
           (row.window_tokens + kBlockTokens - 1) / kBlockTokens;
  };
  int32_t mine = 0;
  for (int32_t i = first; i < last; ++i) mine += items_of(row_of(i));
  sums[threadIdx.x] = mine;
  __syncthreads();
  for (int32_t stride = 1; stride < kPlanThreads; stride *= 2) {
    const int32_t other =
        static_cast<int32_t>(threadIdx.x) >= stride ? sums[threadIdx.x - stride] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  int32_t item = sums[threadIdx.x] - mine;
  for (int32_t i = first; i < last; ++i) {
    CodedRow row = row_of(i);
    row.first_item = item;
    plan.rows[i] = row;
    item += items_of(row);
  }
  if (threadIdx.x == kPlanThreads - 1) *plan.item_count = item;
}

__global__ void __launch_bounds__(kThreads)
    report_kernel(const __grid_constant__ CodedDeviceState d, CodedVerdict v) {
  wait_for_previous_kernel();
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= v.count * d.s.num_kv_heads || v.status[i] == StatusCode::kOk) return;
  report_failure(d.common,
                 {v.status[i], DeviceCall::kAttend, v.layer, d.common.batch[i / d.s.num_kv_heads]});
}

}  // namespace

Status append_coded(const CodedDeviceState& d, const DeviceTokens& x, GpuStream stream) {
  const int32_t rows = x.count * d.s.num_kv_heads;
  const dim3 ctas(static_cast<uint32_t>(rows), ctas_for(x.tokens, kBlockTokens) + 1);
  append_kernel<<<ctas, kThreads, 0, stream>>>(d, x);
  if (Status s = launch_status("append"); !s) return s;
  finish_append_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, x.layer, rows);
  return launch_status("append");
}

Status plan_coded_rows(const CodedDeviceState& d, const CodedRowPlan& plan, GpuStream stream) {
  rows_kernel<<<1, kPlanThreads, 0, stream>>>(d, plan);
  return launch_status("attend");
}

Status report_coded_rows(const CodedDeviceState& d, const CodedVerdict& v, GpuStream stream) {
  const int32_t rows = v.count * d.s.num_kv_heads;
  return launch_after_previous(report_kernel, ctas_for(rows, kThreads), kThreads, 0, stream, d, v);
}

}  // namespace tierkv
