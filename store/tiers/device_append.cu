// The generation phase: tokens of one layer into the window slots that their step has freed. Two
// warps per row, one for each component, and slots by value: the length of the kernel is that of
// its chain of reads, info, page id, page.

#include <algorithm>

#include "gpu/launch.cuh"
#include "gpu/pdl.cuh"
#include "store/tiers/device_step.cuh"

namespace tierkv {
namespace {

constexpr int32_t kCtaRows = 2;
constexpr int32_t kThreads = 64 * kCtaRows;

// Beyond fp16 a raw bfloat16 window could still hold what no tier behind it can.
__device__ bool is_in_range(const LaneValues& x) {
  bool in_range = true;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) in_range &= !(fabsf(x[i / 4][i % 4]) > kMaxHalf);
  return __all_sync(kFullWarp, in_range);
}

// One of the tokens of a row's append.
struct RowToken {
  int32_t sequence;
  int32_t row;
  int64_t element;  // of k and v
  int32_t back;     // tokens of the call from this one on
  bool goes_on;     // false after an earlier failure: nothing is written
};

// Its keys or its values. The input is asked for before its place is known. One that fails has
// written nothing, but the other component may have been: the slot is not in use.
template <class Formats, DType kDtype, Component kComponent>
__device__ StatusCode append_component(const DeviceState& d, const DeviceTokens& tokens,
                                       const RowToken& token) {
  const PageLayout layout = Formats::layout(d.s, kWindowSide);
  const auto* input =
      static_cast<const uint8_t*>(kComponent == Component::kKey ? tokens.k : tokens.v);
  LaneValues x[1];
  load_lane_values(input + token.element * dtype_bytes(kDtype), kDtype, layout.head_dim(), x[0]);
  const SequenceInfo info = d.s.infos[token.sequence];
  const int32_t position = info.num_tokens - token.back;
  const int32_t index = window_index(d.s.policy, info, position);
  const DeviceSlot at = device_slot(d, token.row, kWindowSide, index, layout);
  const PageRef page = page_ref(d, layout, at);
  float lo[1], hi[1];
  row_extrema(x, layout.head_dim(), lo, hi);
  LaneSide side;
  const StatusCode code = worst_of_warp(quantize_lane(page, kComponent, x[0], lo[0], hi[0], &side));
  if (code != StatusCode::kOk || !token.goes_on) return code;
  if (kDtype != DType::kFloat16 && !is_in_range(x[0])) return StatusCode::kOutOfRange;
  if (opens_window_index(d.s.policy, info, position) && at.slot % kTileTokens == 0) {
    clear_tile_side(page, at.slot / kTileTokens, kComponent);
    __syncwarp();
  }
  store_side(page, at.slot, kComponent, side);
  if (kComponent == Component::kKey) store_scalars(page, at.slot, 0.0f, position);
  __syncwarp();
  return code;
}

template <class Formats, DType kDtype>
__device__ StatusCode append_tokens_of(const DeviceState& d, const DeviceTokens& tokens,
                                       const RowToken& first, bool is_key) {
  const int64_t stride = int64_t{d.s.num_kv_heads} * Formats::layout(d.s, kWindowSide).head_dim();
  StatusCode code = StatusCode::kOk;
  RowToken token = first;
  for (; token.back > 0 && code == StatusCode::kOk; --token.back, token.element += stride) {
    code = is_key ? append_component<Formats, kDtype, Component::kKey>(d, tokens, token)
                  : append_component<Formats, kDtype, Component::kValue>(d, tokens, token);
  }
  return code;
}

// Entries first .. of the batch. Attention may begin beside it, at once where what it then reads is
// complete already.
template <class Formats, DType kDtype>
__global__ void __launch_bounds__(kThreads)
    append_step_kernel(const __grid_constant__ DeviceState d,
                       const __grid_constant__ DeviceTokens tokens,
                       const __grid_constant__ IdChunk ids, int32_t first) {
  __shared__ StatusCode codes[2 * kCtaRows];
  if (tokens.plan_is_settled) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, heads = d.s.num_kv_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) * kCtaRows + warp / 2;
  const int32_t entry = first + static_cast<int32_t>(blockIdx.y);
  const int32_t sequence = ids.slots[blockIdx.y];
  const int32_t row = sequence * d.s.rows_per_sequence() + tokens.layer * heads + head;
  const bool goes_on = !has_failed(d);  // waited for where something is written
  StatusCode code = StatusCode::kOk;
  if (head < heads) {
    const int64_t dim = Formats::layout(d.s, kWindowSide).head_dim();
    const int64_t element = (static_cast<int64_t>(entry) * tokens.tokens * heads + head) * dim;
    code = append_tokens_of<Formats, kDtype>(
        d, tokens, {sequence, row, element, tokens.tokens, goes_on}, warp % 2 == 0);
  }
  if (lane_index() == 0) codes[warp] = code;
  // Where a failure of this very launch stops one warp of a row, it stops the row.
  const bool all_go_on = __syncthreads_and(goes_on);
  if (warp % 2 != 0 || lane_index() != 0 || head >= heads) return;
  code = greater(code, codes[warp + 1]);
  if (code != StatusCode::kOk) {
    report_failure(d, {code, DeviceCall::kAppend, tokens.layer, sequence});
  } else if (all_go_on) {
    d.appended[row] = d.s.infos[sequence].num_tokens;
  }
}

using AppendKernel = void (*)(DeviceState, DeviceTokens, IdChunk, int32_t);
template <class Formats>
AppendKernel kernel_of(DType dtype) {
  if (dtype == DType::kBFloat16) return append_step_kernel<Formats, DType::kBFloat16>;
  if (dtype == DType::kFloat32) return append_step_kernel<Formats, DType::kFloat32>;
  return append_step_kernel<Formats, DType::kFloat16>;
}

}  // namespace

Status append_step(const DeviceState& d, const DeviceTokens& tokens, const int32_t* slots,
                   GpuStream stream) {
  const AppendKernel kernel = DefaultFormats::fit(d.s) ? kernel_of<DefaultFormats>(tokens.dtype)
                                                       : kernel_of<AnyFormats>(tokens.dtype);
  for (int32_t first = 0; first < tokens.count; first += kIdChunk) {
    IdChunk ids = {};
    const int32_t here = std::min(kIdChunk, tokens.count - first);
    std::copy_n(slots + first, here, ids.slots);
    const dim3 ctas(ctas_for(d.s.num_kv_heads, kCtaRows), static_cast<uint32_t>(here));
    const Status s =
        launch_after_previous(kernel, ctas, kThreads, 0, stream, d, tokens, ids, first);
    if (!s) return s.with_context("append");
  }
  return Status::ok();
}

}  // namespace tierkv
