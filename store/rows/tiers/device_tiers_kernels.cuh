// SPDX-License-Identifier: Apache-2.0
// The kernels of tiers in device memory: the bytes of TiersRows (tiers_rows.h). Bound: latency.
//
// plan(): steps by a thread a row, chunks by 16 warps a row. Those of a step are in the draft as
// well; a chunk leaves the tokens of each side before every group of positions.
// write(): tokens of steps one by one; chunks go by tiles (device_tiers_tiles.cuh).
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
struct alignas(16) LeavingTokens {
  int32_t first = 0, end = 0;
  uint32_t tiers = 0;  // steps: those of positions from `first` on, 2 bits each
  int32_t held = 0;    // tokens before those of the chunk
  int32_t slot = 0, layer = 0, sequence = 0;
  int16_t kv_head = 0, row_class = 0;
};
struct TiersDraft : LeavingTokens {
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
  int32_t row_class;

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
  // The page that holds token `index` of a side, and its place there; page 0 where it is not there.
  __device__ __forceinline__ PageRef page(int32_t side, int32_t index, int32_t* place,
                                          bool is_there = true) const {
    const PageLayout& layout = of_class().layout[side];
    const int32_t number =
        static_cast<int32_t>(static_cast<uint32_t>(index) / static_cast<uint32_t>(layout.tokens));
    *place = index - number * layout.tokens;
    const int32_t row = view.pages.row(slot, layer, kv_head);
    const int32_t page = is_there ? view.pages.page(row, side, number) : 0;
    return {view.pages.base + page * view.pages.page_bytes, &layout, DType::kFloat16};
  }
};
__device__ __forceinline__ TiersPlace place_of(const DeviceStoreView& view, const TiersCodes& codes,
                                               int32_t slot, int32_t layer, int32_t kv_head) {
  return {view,  codes,   slot,
          layer, kv_head, codes.class_of_head[layer * view.num_kv_heads + kv_head]};
}
__device__ __forceinline__ TiersPlace place_of(const TiersCall& c, int32_t row) {
  const int32_t entry = row / c.view.num_kv_heads;
  const auto [sequence, slot, layer] = c.works.entry(entry);
  return place_of(c.view, c.codes, slot, layer, row - entry * c.view.num_kv_heads);
}
// Where a row's counts are to go.
__device__ __forceinline__ SideCounts& target_of(const TiersCall& c, int32_t row) {
  const int32_t entry = row / c.view.num_kv_heads;
  return c.counts
      .target[c.view.counts_row(c.works.entry(entry)) + row - entry * c.view.num_kv_heads];
}
// ---- maps ----

template <int32_t kLanes>
__device__ __forceinline__ int32_t sum_of_lanes(int32_t x) {
#pragma unroll
  for (int32_t lanes = 1; lanes < kLanes; lanes *= 2) x += __shfl_xor_sync(kFullWarp, x, lanes);
  return x;
}

// Tokens by side of the positions [first, end) of a map; in all of kLanes neighbours. Those of a
// warp may ask about other positions of other maps.
template <int32_t kLanes = 32>
__device__ __forceinline__ SideTokens count_tiers(const uint8_t* map, int32_t first, int32_t end) {
  SideTokens mine;
  const int32_t lane = lane_index() % kLanes;
  for (int32_t w = first / kWordPositions + lane; w * kWordPositions < end; w += kLanes) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(map)[w] &
                          word_mask(first - w * kWordPositions, end - w * kWordPositions);
    mine.of[kHighSide] += __popc(positions_of(word, BodyTier::kHigh));
    mine.of[kLowSide] += __popc(positions_of(word, BodyTier::kLow));
  }
  return {{sum_of_lanes<kLanes>(mine.of[0]), sum_of_lanes<kLanes>(mine.of[1])}};
}

// How many tokens of the side lie in [first, position); by kLanes lanes, as count_tiers().
template <int32_t kLanes>
__device__ __forceinline__ int32_t rank_of(const uint8_t* map, const SideTokens* groups,
                                           int32_t first, int32_t position, int32_t side) {
  const int32_t group = position / kGroupPositions;
  const SideTokens near = count_tiers<kLanes>(map, most(first, group * kGroupPositions), position);
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
  draft.held = from.tokens;
  draft.slot = at.slot, draft.layer = at.layer, draft.sequence = entry / c.works.num_layers;
  draft.kv_head = static_cast<int16_t>(at.kv_head);
  draft.row_class = static_cast<int16_t>(at.row_class);
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

// ---- write ----

// Eight elements of a raw token, from `dim` on, as fp16.
__device__ __forceinline__ uint4 raw_eight(const RawTokens& tokens, Component part,
                                           int32_t position, int32_t dim) {
  const auto words = *reinterpret_cast<const uint4*>(tokens.token(part, position) + dim);
  if (tokens.type_of(position) == DType::kFloat16) return words;
  return four_bfloats_to_halves(words);
}

// One component of raw tokens, each of a row and side of its own, as codes. What a format cannot
// hold becomes 0; the status says so, the same in all lanes of a token.
template <int32_t kDim>
__device__ __forceinline__ StatusCode encode_tiers_part(const TiersCall& c, const TiersPlace& at,
                                                        int32_t side, Component part,
                                                        const uint4& raw, bool is_there,
                                                        LaneCodes* codes) {
  const auto i = static_cast<int32_t>(part);
  const RowClass& row_class = at.of_class();
  LaneValues x;
  unpack_eight(raw, DType::kFloat16, x);
  if (part == Component::kKey) {
    LaneValues mean;
    load_lane_floats<kDim>(at.key_mean(), mean);
#pragma unroll
    for (int32_t n = 0; n < kLaneDims; ++n) x[n] = add_rn(x[n], -mean[n]);
  }
  if (__any_sync(kFullWarp, at.has_basis())) {
    LaneValues y;
#pragma unroll
    for (int32_t n = 0; n < kLaneDims; ++n) y[n] = x[n];
    rotate<kDim>(c.codes.rotation[i], y);
#pragma unroll
    for (int32_t n = 0; n < kLaneDims; ++n) x[n] = at.has_basis() ? y[n] : x[n];
  }
  const LaneFormat format = {row_class.layout[side].tile(part).type, row_class.rule[side][i],
                             DType::kFloat16};
  const StatusCode code = encode_lane<kDim>(format, x, codes);
  if (code == StatusCode::kOk || !is_there) return StatusCode::kOk;
  *codes = {};
  return code;
}

// The place reports a chunk's values that are not finite, or beyond fp16: only it can tell the two
// apart. Tokens of the ring are finite.
template <int32_t kDim>
__device__ __forceinline__ void report_token(const TiersCall& c, const TiersPlace& at,
                                             StatusCode code) {
  if (code == StatusCode::kOk || lane_of_token<kDim>() != 0) return;
  if (code == StatusCode::kOutOfRange) report_fault(c.fault, {code, at.slot, at.layer, at.kv_head});
}

// Behind the last token of a side, the last of `written`: the slots of its tile, unless the token
// opened it, and the tiles of its page, where the call began them.
template <int32_t kDim>
__device__ __forceinline__ void clear_behind(const PageRef& page, int32_t slot, int32_t written) {
  const int32_t in_tile = slot % kTileTokens;
  if (in_tile < written && written > 1) {
#pragma unroll 1
    for (int32_t i = slot + 1; i < slot - in_tile + kTileTokens; ++i) clear_slot<kDim>(page, i);
  }
  if (slot >= written) return;
#pragma unroll 1
  for (int32_t tile = slot / kTileTokens + 1; tile < page.layout->tiles(); ++tile) {
    clear_tile<kDim>(page, tile);
  }
}

// Grid of warps: most_leaving tokens of every row. Tokens are coded while pages are dealt: the plan
// has ended when this kernel starts (DeviceRowFormat::write()), and nothing is written before the
// wait.
template <int32_t kDim>
__global__ void __launch_bounds__(kTiersThreads, 8)
    write_tiers_kernel(const __grid_constant__ TiersCall c) {
  const int32_t n = warp_of_grid() * kWarpTokens<kDim> + token_of_lane<kDim>();
  const int32_t of_row = c.works.most_leaving;
  const int32_t row = least(of_row == 1 ? n : n / of_row, c.num_rows - 1), i = n - row * of_row;
  const TiersDraft* const whole = c.scratch.drafts + row;
  const auto draft = load_whole<LeavingTokens>(whole);
  const TiersPlace at = {c.view, c.codes, draft.slot, draft.layer, draft.kv_head, draft.row_class};
  const int32_t position = draft.first + i;
  const bool leaves = i < of_row && position < draft.end;
  const auto tier = leaves ? static_cast<BodyTier>(draft.tiers >> 2 * i & 3u) : BodyTier::kNoTier;
  const int32_t side = side_of(tier);
  const int32_t before = whole->before.tokens[side], after = whole->after.tokens[side];
  LaneCodes codes[2];
  auto found = StatusCode::kOk;
  {
    const RawTokens tokens =
        raw_tokens(c.view.raw, c.view.raw_row(draft.slot, draft.layer, draft.kv_head), draft.held,
                   c.works.chunk, {draft.sequence, draft.kv_head, c.view.num_kv_heads});
    uint4 raw[2] = {};
    if (is_kept(tier) && has_dims<kDim>()) {
      raw[0] = raw_eight(tokens, Component::kKey, position, lane_dim<kDim>());
      raw[1] = raw_eight(tokens, Component::kValue, position, lane_dim<kDim>());
    }
#pragma unroll
    for (int32_t part = 0; part < 2; ++part) {
      const StatusCode code = encode_tiers_part<kDim>(c, at, side, static_cast<Component>(part),
                                                      raw[part], is_kept(tier), &codes[part]);
      if (found == StatusCode::kOk) found = code;
    }
  }
  const int32_t index = before + __popc(positions_of(draft.tiers, tier) & word_mask(0, i));
  wait_for_previous_kernel();
  commit(c.works);
  if (!c.works.has_pages()) return;
  report_token<kDim>(c, at, found);
  constexpr int32_t kStateLanes = sizeof(TiersRow) / sizeof(uint4);
  if (leaves && i == 0 && lane_of_token<kDim>() < kStateLanes) {
    reinterpret_cast<uint4*>(at.state())[lane_of_token<kDim>()] =
        reinterpret_cast<const uint4*>(&whole->after)[lane_of_token<kDim>()];
  }
  int32_t slot;
  const PageRef page = at.page(side, index, &slot, is_kept(tier));
  if (is_kept(tier) && after == before + 1 && slot % kTileTokens == 0) {
    clear_tile<kDim>(page, slot / kTileTokens);
  }
  __syncwarp();
  if (!is_kept(tier)) return;
  store_lane_codes<kDim>(page, slot, Component::kKey, codes[0]);
  store_lane_codes<kDim>(page, slot, Component::kValue, codes[1]);
  if (index + 1 == after) clear_behind<kDim>(page, slot, after - before);
}

}  // namespace tierkv::store
