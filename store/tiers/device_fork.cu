// Fork on the device: the page operations of HostStore::fork() in the same order, so that both give
// the same page ids, and one kernel that copies what is not shared.

#include <cub/block/block_reduce.cuh>

#include "store/tiers/device_rows.cuh"
#include "store/tiers/device_store.h"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;

__device__ bool is_open(const DeviceState& d, int32_t side, int32_t tokens) {
  return side != kWindowSide && tokens % d.s.page_tokens(side) != 0;
}
// Pages of a side that a copy needs for itself.
__device__ int32_t own_pages(const DeviceState& d, int32_t side, int32_t tokens) {
  if (side == kWindowSide) return pages_for(tokens, d.s.page_tokens(side));
  return is_open(d, side, tokens) ? 1 : 0;
}

// One CTA. report: what a copy of `source` needs; and in row_counts what its rows share.
__global__ void __launch_bounds__(kThreads)
    plan_fork_kernel(const __grid_constant__ DeviceState d, int32_t source) {
  using Sum = cub::BlockReduce<int64_t, kThreads>;
  __shared__ Sum::TempStorage storage;
  int64_t needed = 0;
  for (int32_t w = threadIdx.x; w < d.s.rows_per_sequence(); w += kThreads) {
    SideCounts tokens = d.s.allocator.tokens[source * d.s.rows_per_sequence() + w];
    for (int32_t side = 0; side < kStoreSides; ++side)
      needed += own_pages(d, side, tokens.of[side]);
    tokens.of[kWindowSide] = 0;
    d.row_counts[w] = tokens;
  }
  needed = Sum(storage).Sum(needed);
  if (threadIdx.x == 0) *d.other_report = {StatusCode::kOk, -1, needed, 0, 0, 0};
}

// Every row takes the `tokens` next ones of its window.
__global__ void __launch_bounds__(kThreads)
    plan_window_kernel(const __grid_constant__ DeviceState d, int32_t tokens) {
  const int32_t w = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);
  if (w >= d.s.rows_per_sequence()) return;
  SideCounts added;
  added.of[kWindowSide] = tokens;
  d.row_counts[w] = added;
}

__device__ void copy_page(const DeviceState& d, int32_t source, int32_t target) {
  const auto* from = reinterpret_cast<const uint4*>(d.s.page_bytes(source));
  auto* to = reinterpret_cast<uint4*>(d.s.page_bytes(target));
  const auto pieces = static_cast<int32_t>(d.s.pages.page_bytes / sizeof(uint4));
#pragma unroll 4
  for (int32_t i = threadIdx.x; i < pieces; i += kThreads) to[i] = from[i];
}

// A CTA per row.
__global__ void __launch_bounds__(kThreads)
    copy_row_kernel(const __grid_constant__ DeviceState d, int32_t source, int32_t target) {
  const auto w = static_cast<int32_t>(blockIdx.x);
  const int32_t from = source * d.s.rows_per_sequence() + w;
  const int32_t to = target * d.s.rows_per_sequence() + w;
  const SideCounts tokens = d.s.allocator.tokens[from];
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t count = own_pages(d, side, tokens.of[side]);
    const int32_t end = pages_for(tokens.of[side], d.s.page_tokens(side));
    for (int32_t page = end - count; page < end; ++page) {
      copy_page(d, d.s.page_id(from, side, page), d.s.page_id(to, side, page));
    }
  }
  __syncthreads();
  const int32_t side = static_cast<int32_t>(threadIdx.x) / 32;  // a warp each
  if (side < kWindowSide && is_open(d, side, tokens.of[side])) {
    const int32_t last = tokens.of[side] / d.s.page_tokens(side);
    rescan_device_page(d, side, d.s.page_id(to, side, last),
                       d.s.page_used(side, last, tokens.of[side]));
  }
  if (threadIdx.x != 0) return;
  d.appended[to] = d.appended[from];
  if (w == 0) d.s.infos[target] = d.s.infos[source];
}

}  // namespace

Status DeviceStore::count_fork(int32_t source) {
  plan_fork_kernel<<<1, kThreads, 0, stream_>>>(state_, source);
  if (Status s = launch_status("fork"); !s) return s;
  OpReport report;
  RingCursors* free = mirror_->view_.allocator.ring.cursors;
  if (Status s = copy(&report, state_.other_report, sizeof(report)); !s) return s;
  if (Status s = copy(free, state_.s.allocator.ring.cursors, sizeof(*free)); !s) return s;
  if (Status s = settle(); !s) return s;
  return mirror_->require_pages(report.pages_needed);
}

Result<SequenceId> DeviceStore::fork(SequenceId source) {
  const Result<int32_t> from = table().complete_live_slot_of(source);
  if (!from) return from.status();
  const Result<int32_t> to = table().free_slot();
  if (!to) return to.status();
  if (Status s = count_fork(*from); !s) return s;

  // From here on nothing can fail but the device.
  if (Status s = set_batch(DeviceCall::kNone, {*to, *from}, 0); !s) return s;
  const SequenceBatch copies = {state_.batch, 1};
  OpReport* report = state_.other_report;
  if (Status s = run(PageOp::fork(copies, state_.batch + 1, state_.copies, report)); !s) return s;
  if (Status s = run(PageOp::truncate(copies, state_.row_counts, state_.copies, report)); !s) {
    return s;
  }
  const SequenceInfo info = table().info(*from);
  const int32_t per_page = state_.s.page_tokens(kWindowSide), rows = rows_per_sequence();
  for (int32_t left = window_side_tokens(state_.s.policy, info); left > 0; left -= per_page) {
    const int32_t tokens = smaller_of(left, per_page);
    plan_window_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream_>>>(state_, tokens);
    if (Status s = run(PageOp::append(copies, state_.row_counts, report)); !s) return s;
  }
  copy_row_kernel<<<rows, kThreads, 0, stream_>>>(state_, *from, *to);
  if (Status s = launch_status("fork"); !s) return s;
  return table().claim(*to, SequencePhase::kLive, info);
}

}  // namespace tierkv
