// The generation phase: a warp per row plans, the allocator deals out the pages, a warp per row
// carries the plan out. What a row decides depends on no other row.

#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 32 * kRowWarps;

__device__ int32_t warp_item() {
  return static_cast<int32_t>(blockIdx.x) * kRowWarps + static_cast<int32_t>(threadIdx.x) / 32;
}

__global__ void __launch_bounds__(kThreads)
    plan_step_kernel(const __grid_constant__ DeviceState d, int32_t rows, int32_t tokens) {
  const int32_t i = warp_item();
  if (i >= rows) return;
  const DeviceRow r = batch_row(d, i);
  if (r.sequence == kPaddingSequence) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  StepAction* actions = d.actions + static_cast<int64_t>(i) * kMaxStepTokens;
  const SideCounts added = plan_row_step(d.s, r.row, info, tokens, actions, WarpTeam());
  if (lane_index() != 0) return;
  d.row_counts[i] = added;
  // apply_step() moves the sequence's info on while its rows still need what it was.
  if (r.within == 0) d.before[r.entry] = info;
}

// As apply_step_row() of the host.
__device__ void apply_action(const DeviceState& d, int32_t row, const SequenceInfo& before,
                             const StepAction& action) {
  if (action.tier == Tier::kPruned) return;
  const int32_t side = side_of(action.tier);
  const DeviceSlot to = device_slot(d, row, side, action.slot);
  if (action.victim_position == kNoPosition) {
    open_token_slot(to.page, to.slot);
  } else if (action.victim_tier == Tier::kLow) {
    const DeviceSlot demoted = device_slot(d, row, kLowSide, action.victim_slot);
    open_token_slot(demoted.page, demoted.slot);
    move_page_token(to.page, to.slot, demoted.page, demoted.slot);
  }
  const int32_t index = window_index(d.s.policy, before, action.position);
  const DeviceSlot from = device_slot(d, row, kWindowSide, index);
  move_page_token(from.page, from.slot, to.page, to.slot);
}

__device__ void rescan_index(const DeviceState& d, int32_t row, int32_t side, int32_t index) {
  const int32_t page = index / d.s.page_tokens(side);
  rescan_device_page(d, side, d.s.page_id(row, side, page),
                     d.s.page_used(side, page, d.s.allocator.tokens[row].of[side]));
}

__device__ void rescan_action(const DeviceState& d, int32_t row, const StepAction& action) {
  if (action.tier == Tier::kPruned) return;
  rescan_index(d, row, side_of(action.tier), action.slot);
  if (action.victim_position != kNoPosition && action.victim_tier == Tier::kLow) {
    rescan_index(d, row, kLowSide, action.victim_slot);
  }
}

__global__ void __launch_bounds__(kThreads)
    apply_step_kernel(const __grid_constant__ DeviceState d, int32_t rows, int32_t tokens) {
  const int32_t i = warp_item();
  if (i >= rows) return;
  const DeviceRow r = batch_row(d, i);
  if (r.sequence == kPaddingSequence) return;
  if (d.report->status != StatusCode::kOk) {
    if (i == 0 && lane_index() == 0) {
      report_failure(d, {d.report->status, DeviceCall::kBeginStep, -1, -1});
    }
    return;
  }
  const SequenceInfo before = d.before[r.entry];
  const int32_t count = leaving_tokens(d.s.policy, before, tokens).count();
  const StepAction* actions = d.actions + static_cast<int64_t>(i) * kMaxStepTokens;
  for (int32_t a = 0; a < count; ++a) apply_action(d, r.row, before, actions[a]);
  for (int32_t a = 0; a < count; ++a) rescan_action(d, r.row, actions[a]);
  if (r.within == 0 && lane_index() == 0) {
    d.s.infos[r.sequence] = info_after_step(d.s.policy, before, tokens);
  }
}

__device__ bool is_in_range(const void* row, DType dtype, int32_t head_dim) {
  LaneValues x;
  load_lane_values(row, dtype, head_dim, x);
  bool in_range = true;
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    in_range &= !(fabsf(x[i / 4][i % 4]) > kMaxHalf) || !is_finite(x[i / 4][i % 4]);
  }
  return __all_sync(kAllLanes, in_range);
}

__device__ StatusCode append_token(const DeviceState& d, int32_t row, const SequenceInfo& info,
                                   const TokenInput& input) {
  const int32_t head_dim = d.s.layouts[kWindowSide].head_dim();
  const DeviceSlot at =
      device_slot(d, row, kWindowSide, window_index(d.s.policy, info, input.position));
  if (opens_window_index(d.s.policy, info, input.position)) open_token_slot(at.page, at.slot);
  const StatusCode code = overwrite_page_token(at.page, at.slot, input);
  if (code != StatusCode::kOk) return code;
  // Beyond fp16 a raw bfloat16 window could still hold what no tier behind it can.
  const bool in_range =
      is_in_range(input.k, input.dtype, head_dim) && is_in_range(input.v, input.dtype, head_dim);
  return in_range ? StatusCode::kOk : StatusCode::kOutOfRange;
}

__global__ void __launch_bounds__(kThreads)
    append_step_kernel(const __grid_constant__ DeviceState d,
                       const __grid_constant__ DeviceTokens x) {
  const int32_t i = warp_item(), heads = d.s.num_kv_heads;
  if (i >= x.count * heads || has_failed(d)) return;
  const DeviceRow r = layer_row(d, x.layer, i);
  if (r.sequence == kPaddingSequence) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  const int64_t dim = d.s.layouts[kWindowSide].head_dim(), bytes = dim * dtype_bytes(x.dtype);
  StatusCode code = StatusCode::kOk;
  for (int32_t t = 0; t < x.tokens && code == StatusCode::kOk; ++t) {
    const int64_t offset =
        ((static_cast<int64_t>(r.entry) * x.tokens + t) * heads + i % heads) * bytes;
    const TokenInput input = {static_cast<const uint8_t*>(x.k) + offset,
                              static_cast<const uint8_t*>(x.v) + offset, x.dtype, 0.0f,
                              info.num_tokens - x.tokens + t};
    code = append_token(d, r.row, info, input);
  }
  if (lane_index() != 0) return;
  if (code == StatusCode::kOk) {
    d.appended[r.row] = info.num_tokens;
  } else {
    report_failure(d, {code, DeviceCall::kAppend, x.layer, r.sequence});
  }
}

}  // namespace

Status plan_step(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  const int32_t rows = count * d.s.rows_per_sequence();
  plan_step_kernel<<<ctas_for(rows, kRowWarps), kThreads, 0, stream>>>(d, rows, tokens);
  return launch_status("plan_step");
}

Status apply_step(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  const int32_t rows = count * d.s.rows_per_sequence();
  apply_step_kernel<<<ctas_for(rows, kRowWarps), kThreads, 0, stream>>>(d, rows, tokens);
  return launch_status("apply_step");
}

Status append_step(const DeviceState& d, const DeviceTokens& tokens, GpuStream stream) {
  const int64_t rows = int64_t{tokens.count} * d.s.num_kv_heads;
  append_step_kernel<<<ctas_for(rows, kRowWarps), kThreads, 0, stream>>>(d, tokens);
  return launch_status("append");
}

}  // namespace tierkv
