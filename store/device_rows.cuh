// What the store's kernels share: a row of the batch, its pages, the victim of a page.
#pragma once

#include <cuda_runtime.h>

#include "codec/page_token.cuh"
#include "store/device_state.h"
#include "store/step_plan.h"

namespace tierkv {

inline constexpr int32_t kRowWarps = 4;  // warps of a CTA that has a row each

// A row of a layer, or of all layers, of the batch; sequence -1: padding.
struct DeviceRow {
  int32_t entry;
  int32_t sequence;
  int32_t within;  // its sequence
  int32_t row;
};
__device__ inline DeviceRow batch_row(const DeviceState& d, int32_t i) {
  const int32_t per_sequence = d.s.rows_per_sequence(), entry = i / per_sequence;
  const int32_t sequence = d.batch[entry], within = i - entry * per_sequence;
  return {entry, sequence, within, sequence * per_sequence + within};
}
// kv_head h of entry e is i = e * num_kv_heads + h.
__device__ inline DeviceRow layer_row(const DeviceState& d, int32_t layer, int32_t i) {
  const int32_t heads = d.s.num_kv_heads, entry = i / heads;
  const int32_t sequence = d.batch[entry], within = layer * heads + i - entry * heads;
  return {entry, sequence, within, sequence * d.s.rows_per_sequence() + within};
}

__device__ inline bool has_failed(const DeviceState& d) {
  return d.failure->status != StatusCode::kOk;
}
__device__ inline void report_failure(const DeviceState& d, const DeviceFailure& failure) {
  const int32_t none = static_cast<int32_t>(StatusCode::kOk);
  const int32_t status = static_cast<int32_t>(failure.status);
  if (atomicCAS(reinterpret_cast<int32_t*>(&d.failure->status), none, status) != none) return;
  d.failure->call = failure.call;
  d.failure->layer = failure.layer;
  d.failure->slot = failure.slot;
}

struct DeviceSlot {
  PageRef page;
  int32_t slot;
};
__device__ inline PageRef page_ref(const DeviceState& d, int32_t side, int32_t page) {
  return {d.s.page_bytes(page), &d.s.layouts[side], d.s.raw_dtype};
}
__device__ inline DeviceSlot device_slot(const DeviceState& d, int32_t row, int32_t side,
                                         int32_t index) {
  const int32_t per_page = d.s.page_tokens(side), page = index / per_page;
  return {page_ref(d, side, d.s.page_id(row, side, page)), index - page * per_page};
}

__device__ inline RankedToken best_of_warp(RankedToken mine) {
#pragma unroll
  for (int32_t lanes = 16; lanes > 0; lanes /= 2) {
    const RankedToken other = {__shfl_xor_sync(kAllLanes, mine.score, lanes),
                               __shfl_xor_sync(kAllLanes, mine.position, lanes),
                               __shfl_xor_sync(kAllLanes, mine.index, lanes)};
    mine = better_victim(mine, other);
  }
  return mine;
}
struct WarpTeam {
  __device__ static int32_t rank() { return lane_index(); }
  __device__ static int32_t size() { return 32; }
  __device__ static RankedToken best(const RankedToken& mine) { return best_of_warp(mine); }
};

// scan_page_record() of a page with `used` tokens, by a warp.
__device__ inline void rescan_device_page(const DeviceState& d, int32_t side, int32_t page,
                                          int32_t used) {
  const uint8_t* bytes = d.s.page_bytes(page);
  RankedToken mine = no_token();
  for (int32_t slot = lane_index(); slot < used; slot += 32) {
    const TokenPlace at = {const_cast<uint8_t*>(bytes), slot};
    mine = better_victim(mine, {score_at(d.s, side, at), position_at(d.s, side, at), slot});
  }
  const RankedToken best = best_of_warp(mine);
  if (lane_index() != 0) return;
  PageRecord& record = d.s.allocator.records[page];
  record.min_score = best.score;
  record.min_slot = best.index;
  record.min_position = best.position;
}

inline Status launch_status(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return Status::ok();
  return Status(StatusCode::kCuda, std::string(what) + ": " + cudaGetErrorString(error));
}

inline uint32_t ctas_for(int64_t items, int32_t per_cta) {
  return static_cast<uint32_t>((items + per_cta - 1) / per_cta);
}

}  // namespace tierkv
