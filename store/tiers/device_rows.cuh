// What the store's kernels share: a row of the batch, its pages, the victim of a page.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "codec/gpu/pages/page_token.cuh"
#include "gpu/cuda_device.cuh"
#include "store/tiers/device_state.h"
#include "store/tiers/step_plan.h"

namespace tierkv {

inline constexpr int32_t kRowWarps = 4;  // warps of a CTA that has a row each

// A row of a layer, or of all layers, of the batch; sequence -1: padding.
struct DeviceRow {
  int32_t entry;
  int32_t sequence;
  int32_t within;  // its sequence
  int32_t row;
};
__device__ inline DeviceRow entry_row(const DeviceState& d, int32_t entry, int32_t within) {
  const int32_t sequence = d.batch[entry];
  return {entry, sequence, within, sequence * d.s.rows_per_sequence() + within};
}
__device__ inline DeviceRow batch_row(const DeviceState& d, int32_t i) {
  const int32_t entry = i / d.s.rows_per_sequence();
  return entry_row(d, entry, i - entry * d.s.rows_per_sequence());
}
// kv_head h of entry e is i = e * num_kv_heads + h.
__device__ inline DeviceRow layer_row(const DeviceState& d, int32_t layer, int32_t i) {
  const int32_t entry = i / d.s.num_kv_heads;
  return entry_row(d, entry, layer * d.s.num_kv_heads + i - entry * d.s.num_kv_heads);
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

// The formats of the sides as kernels see them. A kernel that is compiled for given formats finds a
// code's place with a few instructions, where the general one spends most of its time on it.
struct AnyFormats {
  static constexpr int32_t kMinWarps = 1;  // of an SM that apply a step
  static bool fit(const StoreView&) { return true; }
  __device__ static PageLayout layout(const StoreView& s, int32_t side) { return s.layouts[side]; }
};
// The default: K8V4 for window and high, K4V2 for low, head_dim 128, on the pages that
// choose_page_size() takes for them.
struct DefaultFormats {
  static constexpr int32_t kMinWarps = 32;
  static bool fit(const StoreView& s);
  __device__ static constexpr PageLayout layout(const StoreView&, int32_t side) {
    return page_layout(shape(side));
  }
  TKV_HD static constexpr PageShape shape(int32_t side) {
    return side == kLowSide ? PageShape{128, kCodes4, kCodes2, 1, 1, 112}
                            : PageShape{128, kCodes8, kCodes4, 1, 1, 64};
  }
};
inline bool DefaultFormats::fit(const StoreView& s) {
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const PageLayout mine = page_layout(shape(side));
    if (std::memcmp(&mine, &s.layouts[side], sizeof(mine)) != 0) return false;
  }
  return true;
}
template <class Formats>
__device__ PageTokens page_tokens_of(const StoreView& s) {
  return {Formats::layout(s, kHighSide).tokens, Formats::layout(s, kLowSide).tokens,
          Formats::layout(s, kWindowSide).tokens};
}

struct DeviceSlot {
  int32_t page;
  int32_t slot;
};
// `layout` is the side's, perhaps a constant.
__device__ inline DeviceSlot device_slot(const DeviceState& d, int32_t row, int32_t side,
                                         int32_t index, const PageLayout& layout) {
  const auto i = static_cast<uint32_t>(index), tokens = static_cast<uint32_t>(layout.tokens);
  return {d.s.page_id(row, side, static_cast<int32_t>(i / tokens)),
          static_cast<int32_t>(i % tokens)};
}
__device__ inline PageRef page_ref(const DeviceState& d, const PageLayout& layout,
                                   const DeviceSlot& at) {
  return {d.s.page_bytes(at.page), &layout, d.s.raw_dtype};
}

// Over kLanes neighbours, by a whole warp.
template <int32_t kLanes>
__device__ RankedToken best_of_lanes(RankedToken mine) {
#pragma unroll
  for (int32_t lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    const RankedToken other = {__shfl_xor_sync(kFullWarp, mine.score, lanes),
                               __shfl_xor_sync(kFullWarp, mine.position, lanes),
                               __shfl_xor_sync(kFullWarp, mine.index, lanes)};
    mine = better_victim(mine, other);
  }
  return mine;
}
__device__ inline RankedToken best_of_warp(const RankedToken& mine) {
  return best_of_lanes<32>(mine);
}

__device__ inline void write_minimum(const DeviceState& d, int32_t page, const RankedToken& best) {
  if (lane_index() != 0) return;
  PageRecord& record = d.s.allocator.records[page];
  record.min_score = best.score;
  record.min_slot = best.index;
  record.min_position = best.position;
}

// The lane's victim among the tokens of a page but the one in slot `but`; the index is the slot.
__device__ inline RankedToken lane_victim(const DeviceState& d, int32_t side, int32_t page,
                                          int32_t used, int32_t but) {
  uint8_t* bytes = d.s.page_bytes(page);
  RankedToken mine = no_token();
  for (int32_t slot = lane_index(); slot < used; slot += 32) {
    if (slot == but) continue;
    const TokenPlace at = {bytes, slot};
    mine = better_victim(mine, {score_at(d.s, side, at), position_at(d.s, side, at), slot});
  }
  return mine;
}

// scan_page_record() of a page with `used` tokens, by a warp.
__device__ inline void rescan_device_page(const DeviceState& d, int32_t side, int32_t page,
                                          int32_t used) {
  write_minimum(d, page, best_of_warp(lane_victim(d, side, page, used, kNoSlot)));
}

// In program order, as load_counts().
__device__ inline int32_t load_now(const int32_t* from) {
  int32_t x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
// A struct of whole 16-byte words in as many accesses.
template <class T>
__device__ T load_words(const T* from) {
  static_assert(sizeof(T) % sizeof(int4) == 0 && alignof(T) % sizeof(int4) == 0);
  int4 words[sizeof(T) / sizeof(int4)];
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / sizeof(int4); ++i) {
    words[i] = reinterpret_cast<const int4*>(from)[i];
  }
  T x;
  memcpy(&x, words, sizeof(T));
  return x;
}
template <class T>
__device__ void store_words(T* to, const T& x) {
  static_assert(sizeof(T) % sizeof(int4) == 0 && alignof(T) % sizeof(int4) == 0);
  int4 words[sizeof(T) / sizeof(int4)];
  memcpy(words, &x, sizeof(T));
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / sizeof(int4); ++i) {
    reinterpret_cast<int4*>(to)[i] = words[i];
  }
}

inline Status launch_status(const char* what) {
  return cuda_status(cudaGetLastError(), what);
}

inline uint32_t ctas_for(int64_t items, int32_t per_cta) {
  return static_cast<uint32_t>((items + per_cta - 1) / per_cta);
}

}  // namespace tierkv
