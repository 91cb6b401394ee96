// The generation phase: a warp per row plans, the allocator deals out the pages, a warp per row
// carries the plan out. What a row decides depends on no other row.

#include <algorithm>

#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 32 * kRowWarps;

// Rows of an entry are dealt to the warps of its CTAs: grid (rows / kRowWarps, entries).
__device__ int32_t warp_row() {
  return static_cast<int32_t>(blockIdx.x) * kRowWarps + static_cast<int32_t>(threadIdx.x) / 32;
}
dim3 row_grid(int32_t rows, int32_t entries) {
  return dim3(ctas_for(rows, kRowWarps), static_cast<uint32_t>(entries));
}
// Of a batch row.
__device__ int64_t scratch_index(const DeviceState& d, const DeviceRow& r) {
  return static_cast<int64_t>(r.entry) * d.s.rows_per_sequence() + r.within;
}

// More than plan_append() of the allocator admits: kOutOfRange.
constexpr int32_t kRefusedTokens = 1 << 30;

// Entries first .. of the batch.
template <class Formats, class Overlay>
__global__ void __launch_bounds__(kThreads)
    plan_step_kernel(const __grid_constant__ DeviceState d, const __grid_constant__ IdChunk ids,
                     int32_t first, int32_t tokens) {
  const int32_t within = warp_row(), entry = first + static_cast<int32_t>(blockIdx.y);
  if (within >= d.s.rows_per_sequence()) return;
  const int32_t sequence = ids.slots[blockIdx.y];
  const DeviceRow r = {entry, sequence, within, sequence * d.s.rows_per_sequence() + within};
  const SequenceInfo info = d.s.infos[sequence];
  const int64_t i = scratch_index(d, r);
  SideCounts added;
  if (tokens > d.max_tokens - info.num_tokens || has_failed(d)) {
    added.of[kWindowSide] = kRefusedTokens;  // the row may be in any state: it is not looked at
  } else {
    const PlannedRow planned =
        planned_row(d.s, page_tokens_of<Formats>(d.s), r.row,
                    thresholds_at(d.s.policy, info.num_tokens + tokens), WarpTeam());
    added =
        plan_row_step<Overlay>(planned, info, tokens, d.actions + i * kMaxStepTokens, WarpTeam());
  }
  if (lane_index() != 0) return;
  d.row_counts[i] = added;
  if (within != 0) return;
  d.batch[entry] = sequence;
  d.before[entry] = info;  // apply_step() moves it on while its rows still need what it was
}

// A candidate enters `kSide`. Everything is asked for before anything is waited for: the candidate,
// the victim, and what the pages' minima will follow from.
template <class Formats, int32_t kSide>
__device__ void enter(const DeviceState& d, int32_t row, const SequenceInfo& before,
                      const StepAction& action) {
  const PageLayout window = Formats::layout(d.s, kWindowSide);
  const PageLayout layout = Formats::layout(d.s, kSide), low = Formats::layout(d.s, kLowSide);
  const bool has_victim = action.victim_position != kNoPosition;
  const bool demotes = kSide == kHighSide && has_victim && action.victim_tier == Tier::kLow;
  const int32_t index = window_index(d.s.policy, before, action.position);
  const DeviceSlot from = device_slot(d, row, kWindowSide, index, window);
  const DeviceSlot to = device_slot(d, row, kSide, action.slot, layout);
  DeviceSlot down = {0, 0};
  if (demotes) down = device_slot(d, row, kLowSide, action.victim_slot, low);
  const PageRef from_page = page_ref(d, window, from), to_page = page_ref(d, layout, to);
  const PageRef down_page = page_ref(d, low, down);

  LaneToken candidate, victim;
  RankedToken least = no_token(), least_down = no_token();
  load_lane_token(from_page, from.slot, &candidate);
  if (demotes) load_lane_token(to_page, to.slot, &victim);
  if (has_victim) {
    const int32_t first = action.slot - to.slot;
    const int32_t used = smaller_of(layout.tokens, d.s.allocator.tokens[row].of[kSide] - first);
    least = lane_victim(d, kSide, to.page, used, to.slot);
  } else {
    const PageRecord record = load_record(d.s.allocator, to.page);
    least = {record.min_score, record.min_position, record.min_slot};
  }
  if (demotes) {
    const PageRecord record = load_record(d.s.allocator, down.page);
    least_down = {record.min_score, record.min_position, record.min_slot};
  }

  if (demotes) {
    convert_side(to_page, down_page, Component::kKey, &victim.k);
    convert_side(to_page, down_page, Component::kValue, &victim.v);
    open_token_slot(down_page, down.slot);
    store_lane_token(down_page, down.slot, victim);
    write_minimum(d, down.page,
                  better_victim(least_down, {victim.score, victim.position, down.slot}));
  }
  convert_side(from_page, to_page, Component::kKey, &candidate.k);
  convert_side(from_page, to_page, Component::kValue, &candidate.v);
  if (!has_victim) open_token_slot(to_page, to.slot);
  store_lane_token(to_page, to.slot, candidate);
  least = better_victim(least, {candidate.score, candidate.position, to.slot});
  write_minimum(d, to.page, has_victim ? best_of_warp(least) : least);
}

__device__ void rescan_index(const DeviceState& d, int32_t row, int32_t side, int32_t index) {
  const int32_t page = index / d.s.page_tokens(side);
  rescan_device_page(d, side, d.s.page_id(row, side, page),
                     d.s.page_used(side, page, d.s.allocator.tokens[row].of[side]));
}

template <class Formats>
__global__ void __launch_bounds__(kThreads, Formats::kMinCtas)
    apply_step_kernel(const __grid_constant__ DeviceState d, int32_t tokens) {
  if (warp_row() >= d.s.rows_per_sequence()) return;
  const DeviceRow r = entry_row(d, static_cast<int32_t>(blockIdx.y), warp_row());
  if (r.sequence == kPaddingSequence) return;
  if (d.report->status != StatusCode::kOk) {
    if (r.entry + r.within + lane_index() == 0) {
      report_failure(d, {d.report->status, DeviceCall::kBeginStep, -1, -1});
    }
    return;
  }
  const SequenceInfo before = d.before[r.entry];
  const int32_t count = leaving_tokens(d.s.policy, before, tokens).count();
  const StepAction* actions = d.actions + scratch_index(d, r) * kMaxStepTokens;
  for (int32_t a = 0; a < count; ++a) {
    const StepAction action = actions[a];
    if (action.tier == Tier::kHigh) enter<Formats, kHighSide>(d, r.row, before, action);
    if (action.tier == Tier::kLow) enter<Formats, kLowSide>(d, r.row, before, action);
  }
  // While the rounds went on, pages had slots whose tokens were yet to come.
  for (int32_t a = 0; count > 1 && a < count; ++a) {
    const StepAction action = actions[a];
    if (action.tier == Tier::kPruned) continue;
    rescan_index(d, r.row, side_of(action.tier), action.slot);
    if (action.victim_position == kNoPosition || action.victim_tier != Tier::kLow) continue;
    rescan_index(d, r.row, kLowSide, action.victim_slot);
  }
  if (r.within == 0 && lane_index() == 0) {
    d.s.infos[r.sequence] = info_after_step(d.s.policy, before, tokens);
  }
}

// Beyond fp16 a raw bfloat16 window could still hold what no tier behind it can.
__device__ bool is_in_range(const LaneValues (&x)[2]) {
  bool in_range = true;
#pragma unroll
  for (int32_t i = 0; i < 8 * kLaneChunks; ++i) {
    const float value = x[i / (4 * kLaneChunks)][i / 4 % kLaneChunks][i % 4];
    in_range &= !(fabsf(value) > kMaxHalf);
  }
  return __all_sync(kAllLanes, in_range);
}

// Token t of the row, asked for before its place is known.
template <DType kDtype>
__device__ void load_token_input(const DeviceTokens& x, int64_t element, int32_t head_dim,
                                 LaneValues (&values)[2]) {
  const int64_t offset = element * dtype_bytes(kDtype);
  load_lane_values(static_cast<const uint8_t*>(x.k) + offset, kDtype, head_dim, values[0]);
  load_lane_values(static_cast<const uint8_t*>(x.v) + offset, kDtype, head_dim, values[1]);
}

template <class Formats, DType kDtype>
__device__ StatusCode append_token(const DeviceState& d, const DeviceTokens& x, const DeviceRow& r,
                                   int64_t element, int32_t back) {
  const PageLayout layout = Formats::layout(d.s, kWindowSide);
  LaneValues values[2];
  load_token_input<kDtype>(x, element, layout.head_dim(), values);
  const SequenceInfo info = d.s.infos[r.sequence];
  const int32_t position = info.num_tokens - back;
  const int32_t index = window_index(d.s.policy, info, position);
  const DeviceSlot at = device_slot(d, r.row, kWindowSide, index, layout);
  const PageRef page = page_ref(d, layout, at);
  LaneToken token;
  const StatusCode code =
      quantize_token(page, {nullptr, nullptr, kDtype, 0.0f, position}, values, &token);
  if (code != StatusCode::kOk) return code;
  if (kDtype != DType::kFloat16 && !is_in_range(values)) return StatusCode::kOutOfRange;
  if (opens_window_index(d.s.policy, info, position)) open_token_slot(page, at.slot);
  store_lane_token(page, at.slot, token);
  return code;
}

template <class Formats, DType kDtype>
__global__ void __launch_bounds__(kThreads)
    append_step_kernel(const __grid_constant__ DeviceState d,
                       const __grid_constant__ DeviceTokens x) {
  const int32_t heads = d.s.num_kv_heads, head = warp_row();
  if (head >= heads) return;
  const DeviceRow r = entry_row(d, static_cast<int32_t>(blockIdx.y), x.layer * heads + head);
  if (r.sequence == kPaddingSequence || has_failed(d)) return;
  const int64_t dim = Formats::layout(d.s, kWindowSide).head_dim();
  const int64_t first = (static_cast<int64_t>(r.entry) * x.tokens * heads + head) * dim;
  StatusCode code = StatusCode::kOk;
  for (int32_t t = 0; t < x.tokens && code == StatusCode::kOk; ++t) {
    code = append_token<Formats, kDtype>(d, x, r, first + t * heads * dim, x.tokens - t);
  }
  if (lane_index() != 0) return;
  if (code == StatusCode::kOk) {
    d.appended[r.row] = d.s.infos[r.sequence].num_tokens;
  } else {
    report_failure(d, {code, DeviceCall::kAppend, x.layer, r.sequence});
  }
}

template <class Formats>
void launch_append(const DeviceState& d, const DeviceTokens& x, GpuStream stream) {
  const dim3 ctas = row_grid(d.s.num_kv_heads, x.count);
  if (x.dtype == DType::kFloat16) {
    append_step_kernel<Formats, DType::kFloat16><<<ctas, kThreads, 0, stream>>>(d, x);
  } else if (x.dtype == DType::kBFloat16) {
    append_step_kernel<Formats, DType::kBFloat16><<<ctas, kThreads, 0, stream>>>(d, x);
  } else {
    append_step_kernel<Formats, DType::kFloat32><<<ctas, kThreads, 0, stream>>>(d, x);
  }
}

}  // namespace

Status plan_step(const DeviceState& d, const int32_t* slots, int32_t count, int32_t tokens,
                 GpuStream stream) {
  for (int32_t first = 0; first < count; first += kIdChunk) {
    IdChunk ids = {};
    const int32_t here = std::min(kIdChunk, count - first);
    std::copy_n(slots + first, here, ids.slots);
    const dim3 ctas = row_grid(d.s.rows_per_sequence(), here);
    if (tokens > 1) {
      plan_step_kernel<AnyFormats, StepOverlay>
          <<<ctas, kThreads, 0, stream>>>(d, ids, first, tokens);
    } else if (DefaultFormats::fit(d.s)) {
      plan_step_kernel<DefaultFormats, NoOverlay>
          <<<ctas, kThreads, 0, stream>>>(d, ids, first, tokens);
    } else {
      plan_step_kernel<AnyFormats, NoOverlay><<<ctas, kThreads, 0, stream>>>(d, ids, first, tokens);
    }
  }
  return launch_status("begin_step");
}

Status apply_step(const DeviceState& d, int32_t count, int32_t tokens, GpuStream stream) {
  const dim3 ctas = row_grid(d.s.rows_per_sequence(), count);
  if (DefaultFormats::fit(d.s)) {
    apply_step_kernel<DefaultFormats><<<ctas, kThreads, 0, stream>>>(d, tokens);
  } else {
    apply_step_kernel<AnyFormats><<<ctas, kThreads, 0, stream>>>(d, tokens);
  }
  return launch_status("begin_step");
}

Status append_step(const DeviceState& d, const DeviceTokens& tokens, GpuStream stream) {
  if (DefaultFormats::fit(d.s)) {
    launch_append<DefaultFormats>(d, tokens, stream);
  } else {
    launch_append<AnyFormats>(d, tokens, stream);
  }
  return launch_status("append");
}

}  // namespace tierkv
