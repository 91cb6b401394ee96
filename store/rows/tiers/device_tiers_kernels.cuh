// The kernels of tiers in device memory: the bytes of TiersRows (tiers_rows.h).
//
// plan(): a warp a row decides about what leaves. It writes tiers into the map, behind the body's
// end, where the map may say anything, and leaves a draft and the tokens of each side before every
// group of positions. A second kernel quantises what is kept and looks for what no format holds.
// write(): a warp a token, whose place follows from the draft, the map and its group. Bound:
// memory.
#pragma once

#include <cstdint>

#include "codec/gpu/pages/lane_encode.cuh"
#include "codec/gpu/pages/lane_rotation.cuh"
#include "store/place/device/device_fault.cuh"
#include "store/rows/device_tokens.h"
#include "store/rows/tiers/device_tiers_codes.cuh"

namespace tierkv::store {

struct SideTokens {
  int32_t of[2] = {0, 0};
};

// A row between plan() and write(): the positions [first, end) leave.
struct alignas(16) TiersDraft {
  TiersRow before, after;
  int32_t first = 0, end = 0;
  int32_t unused[2] = {};
};

// Positions of a group: its part of a map is one word a lane.
inline constexpr int32_t kGroupPositions = kWordPositions * 32;

// What plan() leaves for write(). groups: the tokens of each side that leave before a group of
// positions; a row has groups_of_row of them, the first being that of its first position.
struct TiersScratch {
  TiersDraft* drafts = nullptr;  // [entries * num_kv_heads]
  SideTokens* groups = nullptr;  // [entries * num_kv_heads, groups_of_row]
  int32_t groups_of_row = 0;
};
TKV_HD constexpr int32_t most_groups(int32_t positions) {
  return (positions + kGroupPositions - 2) / kGroupPositions + 1;
}

struct TiersCall {
  DeviceStoreView view;
  TiersCodes codes;
  DeviceWorks works;
  int32_t num_rows = 0;  // works.entries() * num_kv_heads
  DeviceRowCounts counts;
  TiersScratch scratch;
  DeviceFault* fault = nullptr;
};

__device__ __forceinline__ int32_t table_row(const DeviceStoreView& view, const TiersPlace& at) {
  return view.pages.row(at.slot, at.layer, at.kv_head);
}
__device__ __forceinline__ TiersPlace place_of(const TiersCall& c, int32_t row) {
  const int32_t entry = row / c.view.num_kv_heads, sequence = entry / c.works.num_layers;
  return {c.view, c.codes, c.works.slots[sequence],
          c.works.first_layer + entry - sequence * c.works.num_layers,
          row - entry * c.view.num_kv_heads};
}
// Whether the page operation before a call succeeded.
__device__ __forceinline__ bool is_taken(const DeviceWorks& works) {
  return works.report == nullptr || works.report->status == StatusCode::kOk;
}
// Where the counts of an entry's first row lie.
__device__ __forceinline__ int64_t count_index(const TiersCall& c, int32_t row,
                                               const TiersPlace& at) {
  const int32_t sequence = row / c.view.num_kv_heads / c.works.num_layers;
  return int64_t{sequence} * c.view.pages.allocator.shape.table.rows_per_sequence +
         at.layer * c.view.pages.rows_per_layer;
}
__device__ __forceinline__ SideCounts units_of(const RowClass& row_class, const TiersRow& row) {
  SideCounts units;
#pragma unroll
  for (int32_t side = 0; side < 2; ++side) {
    units.of[side] = page_units(row.tokens[side], row_class.layout[side].tokens);
  }
  return units;
}
// ---- maps ----

__device__ __forceinline__ int32_t sum_of_warp(int32_t x) {
#pragma unroll
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
  return x;
}

// Tokens by side of the positions [first, end) of a map; in all lanes.
__device__ __forceinline__ SideTokens count_tiers(const uint8_t* map, int32_t first, int32_t end) {
  SideTokens mine;
  for (int32_t w = first / kWordPositions + lane_index(); w * kWordPositions < end; w += 32) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(map)[w] &
                          word_mask(first - w * kWordPositions, end - w * kWordPositions);
    mine.of[kHighSide] += __popc(positions_of(word, BodyTier::kHigh));
    mine.of[kLowSide] += __popc(positions_of(word, BodyTier::kLow));
  }
  return {{sum_of_warp(mine.of[0]), sum_of_warp(mine.of[1])}};
}

// How many tokens of the side lie in [first, position).
__device__ __forceinline__ int32_t rank_of(const uint8_t* map, const SideTokens* groups,
                                           int32_t first, int32_t position, int32_t side) {
  const int32_t group = position / kGroupPositions;
  const SideTokens near = count_tiers(map, most(first, group * kGroupPositions), position);
  return groups[group - first / kGroupPositions].of[side] + near.of[side];
}

// The tiers of 32 positions from `base` on, a multiple of 32, each lane its own; those of positions
// outside [first, end) stay as they are.
__device__ __forceinline__ void put_tiers(uint8_t* map, int32_t base, int32_t first, int32_t end,
                                          BodyTier tier) {
  const uint32_t low = __ballot_sync(kFullWarp, (static_cast<uint32_t>(tier) & 1u) != 0);
  const uint32_t high = __ballot_sync(kFullWarp, (static_cast<uint32_t>(tier) & 2u) != 0);
  const int32_t half = lane_index();
  if (half >= 2) return;
  const int32_t at = base + half * kWordPositions;
  const uint32_t mask = word_mask(first - at, end - at);
  if (mask == 0) return;
  uint32_t& word = reinterpret_cast<uint32_t*>(map)[at / kWordPositions];
  const uint32_t bits = spread_bits(low >> 16 * half) | spread_bits(high >> 16 * half) << 1;
  word = (word & ~mask) | (bits & mask);
}

// ---- plan ----

// What a row keeps of importances, as a warp goes through its tokens.
struct TiersMean {
  int32_t seen;
  double log_sum;
};

// The tier of the lane's token; tokens of lower lanes come first. One addition after the other, as
// in host memory.
__device__ __forceinline__ BodyTier decide_tiers(const Alphas& alphas, const Importance& known,
                                                 int32_t position, TiersMean* mean) {
  const uint32_t averaged = __ballot_sync(kFullWarp, is_averaged(known));
  const int32_t lane = lane_index();
  TiersMean mine = *mean;
  if (averaged != 0) {
    const double own = is_averaged(known) ? log_of_importance(known) : 0.0;
    for (uint32_t left = averaged; left != 0; left &= left - 1) {
      const int32_t from = lowest_bit(left);
      mean->log_sum += __shfl_sync(kFullWarp, own, from);
      ++mean->seen;
      if (from <= lane) mine = *mean;
    }
  }
  return tier_of(alphas, known, position, mine.seen, mine.log_sum);
}

__device__ __forceinline__ void decide_row(const TiersCall& c, int32_t row, const TiersPlace& at,
                                           TiersDraft* draft) {
  const DeviceTokens tokens = device_tokens(c.view, c.works, row / c.view.num_kv_heads, at.kv_head);
  const Alphas alphas = c.codes.classes[at.row_class].alphas;
  uint8_t* map = tiers_map(c.view, c.codes, at);
  SideTokens* groups = c.scratch.groups + int64_t{row} * c.scratch.groups_of_row;
  TiersMean mean = {draft->before.seen, draft->before.log_sum};
  SideTokens added;
  const int32_t first = draft->first, end = draft->end, first_base = first & ~31;
#pragma unroll 1
  for (int32_t base = first_base; base < end; base += 32) {
    if (lane_index() == 0 && (base == first_base || base % kGroupPositions == 0)) {
      groups[base / kGroupPositions - first / kGroupPositions] = added;
    }
    const int32_t position = base + lane_index();
    const bool leaves = position >= first && position < end;
    const Importance known = leaves ? tokens.importance(position) : Importance{};
    const BodyTier decided = decide_tiers(alphas, known, position, &mean);
    const BodyTier tier = leaves ? decided : BodyTier::kNoTier;
    added.of[kHighSide] += __popc(__ballot_sync(kFullWarp, tier == BodyTier::kHigh));
    added.of[kLowSide] += __popc(__ballot_sync(kFullWarp, tier == BodyTier::kLow));
    put_tiers(map, base, first, end, tier);
  }
  for (int32_t side = 0; side < 2; ++side) draft->after.tokens[side] += added.of[side];
  draft->after.seen = mean.seen;
  draft->after.log_sum = mean.log_sum;
}

__device__ __forceinline__ void plan_tiers_row(const TiersCall& c, int32_t row) {
  const int32_t entry = row / c.view.num_kv_heads;
  const LayerTokens from = c.works.from[entry], to = c.works.to[entry];
  const TiersPlace at = place_of(c, row);
  TiersDraft draft;
  draft.first = most(from.body_end, c.view.laws.sink_tokens);
  draft.end = most(draft.first, to.body_end);
  if (draft.first < draft.end) {
    draft.before = draft.after = *tiers_state(c.view, c.codes, at);
    decide_row(c, row, at, &draft);
    if (lane_index() == 0) {
      c.counts.target[count_index(c, row, at) + at.kv_head] =
          units_of(c.codes.classes[at.row_class], draft.after);
    }
  }
  if (lane_index() == 0) c.scratch.drafts[row] = draft;
}

__global__ void __launch_bounds__(kTiersThreads)
    plan_tiers_kernel(const __grid_constant__ TiersCall c) {
  const int32_t row = warp_of_grid();
  if (row < c.num_rows) plan_tiers_row(c, row);
}

// A token that leaves, by a warp.
struct LeavingToken {
  int32_t row;
  int32_t position;
  BodyTier tier;  // kNoTier: the row has no such token
};
__device__ __forceinline__ LeavingToken leaving_token(const TiersCall& c, const TiersPlace& at,
                                                      int32_t row, int32_t index) {
  const TiersDraft& draft = c.scratch.drafts[row];
  const int32_t position = draft.first + index;
  if (position >= draft.end) return {row, position, BodyTier::kNoTier};
  return {row, position, tier_at(tiers_map(c.view, c.codes, at), position)};
}

__device__ __forceinline__ void load_raw_token(const DeviceTokens& tokens, Component component,
                                               int32_t position, int32_t head_dim, LaneValues& x) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      x[i][j] = 0.0f;
      if (!has_chunk(i, head_dim) || lane_dim(i) >= head_dim) continue;
      x[i][j] = half_to_float(tokens.half_at(component, position, lane_dim(i) + 8 * j));
    }
  }
}

// Rows that stay raw keep their coordinates.
__device__ __forceinline__ bool has_basis(const TiersCodes& codes, const TiersPlace& at) {
  return !codes.classes[at.row_class].layout[0].k_tile.type.is_raw();
}
__device__ __forceinline__ const float* key_mean(const DeviceStoreView& view,
                                                 const TiersCodes& codes, const TiersPlace& at) {
  if (codes.key_means == nullptr || !has_basis(codes, at)) return nullptr;
  return codes.key_means +
         (int64_t{at.layer} * view.num_kv_heads + at.kv_head) * int64_t{view.head_dim};
}

// The codes of one component on a page of its side; the status in all lanes.
__device__ __forceinline__ StatusCode encode_raw_token(const TiersCall& c, const TiersPlace& at,
                                                       const LeavingToken& t, Component component,
                                                       const PageRef& page, LaneSide* codes) {
  const DeviceTokens tokens =
      device_tokens(c.view, c.works, t.row / c.view.num_kv_heads, at.kv_head);
  const int32_t head_dim = c.view.head_dim, part = static_cast<int32_t>(component);
  LaneValues x[1];
  load_raw_token(tokens, component, t.position, head_dim, x[0]);
  if (has_basis(c.codes, at)) {
    if (component == Component::kKey) {
      add_mean(key_mean(c.view, c.codes, at), -1.0f, head_dim, x[0]);
    }
    rotate(c.codes.rotation[part], head_dim, x[0]);
  }
  const StepRule rule = c.codes.classes[at.row_class].rule[side_of(t.tier)][part];
  return worst_of_warp(encode_side(page, component, rule, x, codes));
}

// ---- write ----

// The page that holds token `index` of a side.
__device__ __forceinline__ PageRef tiers_page(const DeviceStoreView& view, const TiersCodes& codes,
                                              const TiersPlace& at, int32_t side, int32_t index) {
  const PageLayout& layout = codes.classes[at.row_class].layout[side];
  const int32_t page =
      page_at(view.pages.allocator, table_row(view, at), side, index / layout.tokens);
  return {view.pages.base + page * view.pages.page_bytes, &layout, DType::kFloat16};
}
__device__ __forceinline__ void clear_slots(const PageRef& page, int32_t first, int32_t end) {
  const LaneSide nothing = {};
#pragma unroll 1
  for (int32_t slot = first; slot < end; ++slot) {
    store_whole_side(page, slot, Component::kKey, nothing);
    store_whole_side(page, slot, Component::kValue, nothing);
  }
}

// Behind the last token of a side: the slots of its tile and the tiles of its page, where the call
// began them.
__device__ __forceinline__ void clear_behind(const PageRef& page, int32_t slot, int32_t written) {
  const int32_t in_tile = slot % kTileTokens;
  if (in_tile < written) clear_slots(page, slot + 1, slot - in_tile + kTileTokens);
  if (slot >= written) return;
#pragma unroll 1
  for (int32_t tile = slot / kTileTokens + 1; tile < page.layout->tiles(); ++tile) {
    clear_tile_side(page, tile, Component::kKey);
    clear_tile_side(page, tile, Component::kValue);
  }
}

__device__ __forceinline__ void write_tiers_token(const TiersCall& c, const TiersPlace& at,
                                                  const LeavingToken& t) {
  const TiersDraft& draft = c.scratch.drafts[t.row];
  const int32_t side = side_of(t.tier), before = draft.before.tokens[side];
  const SideTokens* groups = c.scratch.groups + int64_t{t.row} * c.scratch.groups_of_row;
  const int32_t index =
      before + rank_of(tiers_map(c.view, c.codes, at), groups, draft.first, t.position, side);
  const PageRef page = tiers_page(c.view, c.codes, at, side, index);
  const int32_t slot = index % page.layout->tokens;
  StatusCode code = StatusCode::kOk;
#pragma unroll 1
  for (int32_t part = 0; part < 2; ++part) {
    const auto component = static_cast<Component>(part);
    LaneSide codes;
    const StatusCode of_part = encode_raw_token(c, at, t, component, page, &codes);
    if (of_part != StatusCode::kOk) codes = {};
    store_whole_side(page, slot, component, codes);
    code = greater(code, of_part);
  }
  if (code != StatusCode::kOk && lane_index() == 0) {
    report_fault(c.fault, {code, at.slot, at.layer, at.kv_head});
  }
  if (index + 1 == draft.after.tokens[side]) clear_behind(page, slot, index + 1 - before);
}

// Grid of warps: most_leaving tokens of every row. What a format cannot hold becomes 0.
__global__ void __launch_bounds__(kTiersThreads)
    write_tiers_kernel(const __grid_constant__ TiersCall c) {
  const int32_t warp = warp_of_grid(), row = warp / c.works.most_leaving;
  if (row >= c.num_rows || !is_taken(c.works)) return;
  const TiersPlace at = place_of(c, row);
  const LeavingToken t = leaving_token(c, at, row, warp - row * c.works.most_leaving);
  if (t.tier == BodyTier::kNoTier) return;
  if (t.position == c.scratch.drafts[row].first && lane_index() == 0) {
    *tiers_state(c.view, c.codes, at) = c.scratch.drafts[row].after;
  }
  if (is_kept(t.tier)) write_tiers_token(c, at, t);
}

}  // namespace tierkv::store
