// SPDX-License-Identifier: Apache-2.0
// The kernels of tiers in device memory: the bytes of TiersRows (tiers_rows.h).
//
// plan(): steps by a thread a row, chunks by 16 warps a row, which decide about what leaves. They
// write tiers into the map, behind the body's end, where the map may say anything. Those of a step
// are in the draft too; a chunk leaves the tokens of each side before every group of positions.
// write(): of steps a warp a token, whose place follows from the draft; chunks go by tiles
// (device_tiers_tiles.cuh). Bound: latency.
#pragma once

#include <cstdint>

#include "codec/gpu/pages/lane_encode.cuh"
#include "codec/gpu/pages/lane_rotation.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_reports.cuh"
#include "store/rows/device_tokens.h"
#include "store/rows/tiers/tiers_shape.h"

namespace tierkv::store {

inline constexpr int32_t kTiersThreads = 128;
inline constexpr int32_t kTiersWarps = kTiersThreads / 32;

struct SideTokens {
  int32_t of[2] = {0, 0};
};

// A row between plan() and write(): the positions [first, end) leave.
struct alignas(16) TiersDraft {
  int32_t first = 0, end = 0;
  uint32_t tiers = 0;  // steps: those of positions from `first` on, 2 bits each
  int32_t unused = 0;
  TiersRow before, after;
};
static_assert(kMaxStepTokens <= kWordPositions);

// Positions of a group: its part of a map is one word a lane.
inline constexpr int32_t kGroupPositions = kWordPositions * 32;

// What plan() leaves for write(). groups, of chunks: the tokens of each side that leave before a
// group of positions; a row has groups_of_row of them, the first being that of its first position.
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

// A row of a (sequence, layer).
struct TiersPlace {
  const DeviceStoreView& view;
  const TiersCodes& codes;
  int32_t slot, layer, kv_head;
  int32_t row_class = codes.class_of_head[layer * view.num_kv_heads + kv_head];

  __device__ __forceinline__ const RowClass& of_class() const { return codes.classes[row_class]; }
  __device__ __forceinline__ TiersRow* state() const {
    return reinterpret_cast<TiersRow*>(view.slots.state(slot, layer) +
                                       codes.shape.row_byte(kv_head));
  }
  __device__ __forceinline__ uint8_t* map() const {
    return view.slots.state(slot, layer) + codes.shape.map_byte(kv_head);
  }
  // Rows that stay raw keep their coordinates.
  __device__ __forceinline__ bool has_basis() const {
    return !of_class().layout[0].k_tile.type.is_raw();
  }
  __device__ __forceinline__ const float* key_mean() const {
    if (codes.key_means == nullptr || !has_basis()) return nullptr;
    return codes.key_means +
           (int64_t{layer} * view.num_kv_heads + kv_head) * int64_t{view.head_dim};
  }
  // The page that holds token `index` of a side.
  __device__ __forceinline__ PageRef page(int32_t side, int32_t index) const {
    const PageLayout& layout = of_class().layout[side];
    const int32_t row = view.pages.row(slot, layer, kv_head);
    const int32_t page = view.pages.page(row, side, index / layout.tokens);
    return {view.pages.base + page * view.pages.page_bytes, &layout, DType::kFloat16};
  }
};
__device__ __forceinline__ TiersPlace place_of(const TiersCall& c, int32_t row) {
  const int32_t entry = row / c.view.num_kv_heads;
  const auto [sequence, slot, layer] = c.works.entry(entry);
  return {c.view, c.codes, slot, layer, row - entry * c.view.num_kv_heads};
}
// Where a row's counts are to go.
__device__ __forceinline__ SideCounts& target_of(const TiersCall& c, int32_t row) {
  const int32_t entry = row / c.view.num_kv_heads;
  return c.counts
      .target[c.view.counts_row(c.works.entry(entry)) + row - entry * c.view.num_kv_heads];
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
  word = mask == ~0u ? bits : (word & ~mask) | (bits & mask);
}

// ---- plan ----

// The means that lanes up to each one add up to.
__device__ __forceinline__ LogMean mean_of_lanes(LogMean mine) {
#pragma unroll
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) {
    const LogMean below = {__shfl_up_sync(kFullWarp, mine.seen, lanes), 0,
                           __shfl_up_sync(kFullWarp, mine.logs, lanes)};
    if (lane_index() >= lanes) mine.add(below);
  }
  return mine;
}
__device__ __forceinline__ LogMean mean_of_lane(const LogMean& mean, int32_t lane) {
  return {__shfl_sync(kFullWarp, mean.seen, lane), 0, __shfl_sync(kFullWarp, mean.logs, lane)};
}

// The positions of a row that leave, and what decides about them.
struct LeavingRow {
  RawTokens tokens;
  Alphas alphas;
  uint8_t* map;
  int32_t first, end;

  // Those of a group; empty behind the last one.
  __device__ __forceinline__ Positions of_group(int32_t group) const {
    const int32_t begin = most(first, group * kGroupPositions);
    return {begin, most(begin, least(end, (group + 1) * kGroupPositions))};
  }
};

// What a group adds to the mean; in all lanes.
__device__ __forceinline__ LogMean mean_of_group(const LeavingRow& row, Positions range) {
  LogMean mine;
#pragma unroll 4
  for (int32_t p = range.first + lane_index(); p < range.end; p += 32) {
    const Importance known = row.tokens.importance(p);
    if (is_averaged(known)) mine.add(log_mean_of(known.value));
  }
  return mean_of_lane(mean_of_lanes(mine), 31);
}

// Decides about a group behind tokens with this mean; the group's own are added to it.
__device__ __forceinline__ SideTokens decide_group(const LeavingRow& row, Positions range,
                                                   LogMean* mean) {
  SideTokens added;
#pragma unroll 1
  for (int32_t base = range.first & ~31; base < range.end; base += 32) {
    const int32_t position = base + lane_index();
    const bool leaves = position >= range.first && position < range.end;
    const Importance known = leaves ? row.tokens.importance(position) : Importance{};
    LogMean mine = *mean;
    if (__any_sync(kFullWarp, is_averaged(known))) {
      mine.add(mean_of_lanes(is_averaged(known) ? log_mean_of(known.value) : LogMean{}));
      *mean = mean_of_lane(mine, 31);
    }
    const BodyTier decided = tier_of(row.alphas, known, position, mine);
    const BodyTier tier = leaves ? decided : BodyTier::kNoTier;
    added.of[kHighSide] += __popc(__ballot_sync(kFullWarp, tier == BodyTier::kHigh));
    added.of[kLowSide] += __popc(__ballot_sync(kFullWarp, tier == BodyTier::kLow));
    put_tiers(row.map, base, range.first, range.end, tier);
  }
  return added;
}

// What the warps of a row tell each other, in shared memory.
inline constexpr int32_t kChunkPlanWarps = 16;
struct RowSums {
  LogMean means[kChunkPlanWarps];
  SideTokens sides[kChunkPlanWarps];
};

// All warps of the row call this. Each takes one group at a time; they go on together.
__device__ __forceinline__ void decide_row(const LeavingRow& row, SideTokens* groups, RowSums* sums,
                                           TiersRow* after) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t first_group = row.first / kGroupPositions;
  const int32_t end_group = (row.end - 1) / kGroupPositions + 1;
  LogMean mean = after->mean;
  SideTokens sides;
#pragma unroll 1
  for (int32_t turn = first_group; turn < end_group; turn += kChunkPlanWarps) {
    const int32_t group = turn + warp;
    const Positions range = row.of_group(group);
    LogMean before = mean;
    const LogMean mine = mean_of_group(row, range);
    if (lane_index() == 0) sums->means[warp] = mine;
    __syncthreads();
    for (int32_t w = 0; w < kChunkPlanWarps; ++w) {
      const LogMean other = sums->means[w];
      mean.add(other);
      if (w < warp) before.add(other);
    }
    const SideTokens added = decide_group(row, range, &before);
    SideTokens behind = sides;
    if (lane_index() == 0) sums->sides[warp] = added;
    __syncthreads();
    for (int32_t w = 0; w < kChunkPlanWarps; ++w) {
      const SideTokens other = sums->sides[w];
      for (int32_t side = 0; side < 2; ++side) {
        sides.of[side] += other.of[side];
        if (w < warp) behind.of[side] += other.of[side];
      }
    }
    if (lane_index() == 0 && group < end_group) groups[group - first_group] = behind;
  }
  for (int32_t side = 0; side < 2; ++side) after->tokens[side] += sides.of[side];
  after->mean = mean;
}

// By a thread: the tokens of a step, at most kWordPositions.
__device__ __forceinline__ void decide_step(const LeavingRow& row, TiersDraft* draft) {
  auto* word = reinterpret_cast<uint32_t*>(row.map) + row.first / kWordPositions;
  uint32_t held = *word;
  TiersRow& after = draft->after;
#pragma unroll 1
  for (int32_t p = row.first; p < row.end; ++p) {
    const BodyTier tier = decide_tier(row.alphas, row.tokens.importance(p), p, &after);
    after.tokens[kHighSide] += tier == BodyTier::kHigh ? 1 : 0;
    after.tokens[kLowSide] += tier == BodyTier::kLow ? 1 : 0;
    draft->tiers |= static_cast<uint32_t>(tier) << 2 * (p - row.first);
  }
  for (int32_t base = row.first & ~(kWordPositions - 1);;) {
    const uint32_t mask = word_mask(row.first - base, row.end - base);
    const uint32_t bits = base <= row.first ? draft->tiers << 2 * (row.first - base)
                                            : draft->tiers >> 2 * (base - row.first);
    *word = (held & ~mask) | (bits & mask);
    base += kWordPositions;
    if (base >= row.end) break;
    held = *++word;
  }
}

// Copies that a compiler would make byte by byte.
template <class T>
__device__ __forceinline__ T load_whole(const T* from) {
  static_assert(sizeof(T) % sizeof(uint4) == 0 && alignof(T) >= sizeof(uint4));
  uint4 words[sizeof(T) / sizeof(uint4)];
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / sizeof(uint4); ++i) {
    words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  T of;
  memcpy(&of, words, sizeof(T));
  return of;
}

// By a thread (sums is null) or a CTA.
__device__ __forceinline__ void plan_tiers_row(const TiersCall& c, int32_t row, RowSums* sums) {
  const int32_t entry = row / c.view.num_kv_heads;
  const LayerTokens from = c.works.from[entry], to = c.works.to[entry];
  const TiersPlace at = place_of(c, row);
  TiersDraft draft;
  draft.first = most(from.body_end, c.view.laws.sink_tokens);
  draft.end = most(draft.first, to.body_end);
  const bool writes = sums == nullptr || threadIdx.x == 0;
  if (draft.first < draft.end) {
    draft.before = draft.after = load_whole(at.state());
    const RowClass& row_class = at.of_class();
    const LeavingRow leaving = {device_tokens(c.view, c.works, entry, at.kv_head), row_class.alphas,
                                at.map(), draft.first, draft.end};
    if (sums == nullptr) {
      decide_step(leaving, &draft);
    } else {
      decide_row(leaving, c.scratch.groups + int64_t{row} * c.scratch.groups_of_row, sums,
                 &draft.after);
    }
    if (writes) target_of(c, row) = units_of(row_class, draft.after);
  }
  if (writes) c.scratch.drafts[row] = draft;
}

// Steps: a thread a row.
__global__ void __launch_bounds__(kTiersThreads)
    plan_tiers_kernel(const __grid_constant__ TiersCall c) {
  wait_for_previous_kernel();
  const auto row = static_cast<int32_t>(blockIdx.x * kTiersThreads + threadIdx.x);
  if (row < c.num_rows) plan_tiers_row(c, row, nullptr);
}
// Chunks: a CTA a row. Shared memory: a RowSums.
__global__ void __launch_bounds__(32 * kChunkPlanWarps)
    plan_tiers_chunk_kernel(const __grid_constant__ TiersCall c) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  wait_for_previous_kernel();
  plan_tiers_row(c, static_cast<int32_t>(blockIdx.x), reinterpret_cast<RowSums*>(shared_bytes));
}

// A raw token as it is there, each lane its dims, and what is taken off its key.
struct RawToken {
  uint16_t x[2][kLaneChunks][4];
  LaneValues key_mean;
  bool is_half;
};
// All loads are in flight together.
template <int32_t kDim>
__device__ __forceinline__ void load_raw_token(const TiersCall& c, const TiersPlace& at,
                                               int32_t entry, int32_t position, RawToken* token) {
  const RawTokens tokens = device_tokens(c.view, c.works, entry, at.kv_head);
  const bool is_held = position < tokens.held;
  const int64_t in_chunk = (position - tokens.held) * tokens.token_stride;
  token->is_half = is_held || tokens.dtype == DType::kFloat16;
  load_normal(at.key_mean(), kDim, token->key_mean);
#pragma unroll
  for (int32_t n = 0; n < 2 * kLaneChunks; ++n) {
    const int32_t part = n / kLaneChunks, i = n % kLaneChunks;
    const auto component = static_cast<Component>(part);
    const bool is_there = has_chunk(i, kDim) && lane_dim(i) < kDim;
    const uint8_t* const ring = tokens.raw + tokens.layout.token_byte(component, position);
    const uint16_t* const from = (is_held ? reinterpret_cast<const uint16_t*>(ring)
                                          : (part == 0 ? tokens.k : tokens.v) + in_chunk) +
                                 lane_dim(i);
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) token->x[part][i][j] = is_there ? from[8 * j] : uint16_t{0};
  }
}

// ---- write ----

__device__ __forceinline__ void clear_slots(const PageRef& page, int32_t first, int32_t end) {
  const LaneSide nothing = {};
#pragma unroll 1
  for (int32_t slot = first; slot < end; ++slot) {
    store_whole_side(page, slot, Component::kKey, nothing);
    store_whole_side(page, slot, Component::kValue, nothing);
  }
}

// Behind the last token of a side, the last of `written`: the slots of its tile, unless the token
// opened it, and the tiles of its page, where the call began them.
__device__ __forceinline__ void clear_behind(const PageRef& page, int32_t slot, int32_t written) {
  const int32_t in_tile = slot % kTileTokens;
  if (in_tile < written && written > 1) {
    clear_slots(page, slot + 1, slot - in_tile + kTileTokens);
  }
  if (slot >= written) return;
#pragma unroll 1
  for (int32_t tile = slot / kTileTokens + 1; tile < page.layout->tiles(); ++tile) {
    clear_tile_side(page, tile, Component::kKey);
    clear_tile_side(page, tile, Component::kValue);
  }
}

// One component of a token into its slot. What a format cannot hold becomes 0 and a fault.
template <int32_t kDim>
__device__ __forceinline__ void write_tiers_part(const TiersCall& c, const TiersPlace& at,
                                                 const RawToken& token, Component component,
                                                 const PageRef& page, int32_t slot) {
  const bool is_key = component == Component::kKey;
  const int32_t part = is_key ? 0 : 1;
  LaneValues x;
#pragma unroll
  for (int32_t n = 0; n < 4 * kLaneChunks; ++n) {
    const int32_t i = n / 4, j = n % 4;
    const uint16_t raw = is_key ? token.x[0][i][j] : token.x[1][i][j];
    const float y = half_to_float(token.is_half ? raw : float_to_half(bfloat16_to_float(raw)));
    x[i][j] = is_key ? add_rn(y, -token.key_mean[i][j]) : y;
  }
  if (at.has_basis()) rotate(c.codes.rotation[part], kDim, x);
  const auto side = static_cast<int32_t>(page.layout - at.of_class().layout);
  LaneSide codes;
  const StatusCode code =
      worst_of_warp(encode_side<kDim>(page, component, at.of_class().rule[side][part], x, &codes));
  if (code != StatusCode::kOk) codes = {};
  store_whole_side<kDim>(page, slot, component, codes);
  if (code != StatusCode::kOk && lane_index() == 0) {
    report_fault(c.fault, {code, at.slot, at.layer, at.kv_head});
  }
}

// Grid of warps: most_leaving tokens of every row.
template <int32_t kDim>
__global__ void __launch_bounds__(kTiersThreads, 8)
    write_tiers_kernel(const __grid_constant__ TiersCall c) {
  wait_for_previous_kernel();
  commit(c.works);
  const int32_t warp = warp_of_grid(), row = warp / c.works.most_leaving;
  if (row >= c.num_rows || !c.works.has_pages()) return;
  const TiersPlace at = place_of(c, row);
  const TiersDraft draft = load_whole(c.scratch.drafts + row);
  const int32_t i = warp - row * c.works.most_leaving, position = draft.first + i;
  if (position >= draft.end) return;
  if (i == 0 && lane_index() == 0) *at.state() = draft.after;
  const auto tier = static_cast<BodyTier>(draft.tiers >> 2 * i & 3u);
  if (!is_kept(tier)) return;
  const int32_t side = side_of(tier);
  const int32_t before =
      side == kLowSide ? draft.before.tokens[kLowSide] : draft.before.tokens[kHighSide];
  const int32_t after =
      side == kLowSide ? draft.after.tokens[kLowSide] : draft.after.tokens[kHighSide];
  const int32_t index = before + __popc(positions_of(draft.tiers, tier) & word_mask(0, i));
  RawToken token;
  load_raw_token<kDim>(c, at, row / c.view.num_kv_heads, position, &token);
  const PageRef page = at.page(side, index);
  const int32_t slot = index % page.layout->tokens;
  if (after == before + 1) open_token_slot(page, slot);
#pragma unroll
  for (int32_t part = 0; part < 2; ++part) {
    write_tiers_part<kDim>(c, at, token, static_cast<Component>(part), page, slot);
  }
  if (index + 1 == after) clear_behind(page, slot, after - before);
}

}  // namespace tierkv::store
