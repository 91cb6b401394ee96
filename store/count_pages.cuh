// One query of a row, whose heads are the columns of one row of attention's launch, counted by
// warps that take several pages of a side at once, half a tile a lane.
//
// What binds such a launch is latency, the fetching of its code included, and then instructions. So
// what attention does not write is read before attention has ended, all that a lane needs of its
// tokens is asked for at once, and page ids a turn ahead.
#pragma once

#include "store/count_query.h"
#include "store/device_rows.cuh"

namespace tierkv {

// How many lanes see to a page of each side: a power of two.
struct PageLanes {
  int32_t log2_of[kStoreSides];
};
inline PageLanes page_lanes(const StoreView& s) {
  PageLanes lanes{};
  for (int32_t side = 0; side < kStoreSides; ++side) {
    while (lanes.log2_of[side] < 5 &&
           kHalfTileTokens << lanes.log2_of[side] < s.page_tokens(side)) {
      ++lanes.log2_of[side];
    }
  }
  return lanes;
}

// The pages of a row.
struct RowPages {
  int32_t tokens[kStoreSides], pages[kStoreSides];
  int32_t tiles;
};
// By a warp.
__device__ __forceinline__ RowPages pages_of_row(const DeviceState& d, int32_t row) {
  const int32_t side = smaller_of(lane_index(), kStoreSides - 1);
  const int32_t tokens = d.s.allocator.tokens[row].of[side];
  const int32_t pages = pages_for(tokens, d.s.page_tokens(side));
  RowPages r;
  r.tiles = 0;
#pragma unroll
  for (int32_t i = 0; i < kStoreSides; ++i) {
    r.tokens[i] = __shfl_sync(kAllLanes, tokens, i);
    r.pages[i] = __shfl_sync(kAllLanes, pages, i);
    r.tiles += (r.tokens[i] + kTileTokens - 1) / kTileTokens;
  }
  return r;
}

// A lane's page of a turn.
struct CountedPage {
  int32_t side;  // of all pages of a warp; kStoreSides: there are no more
  int32_t page;
  int32_t used;        // tokens; 0: no page
  int32_t first_tile;  // of the row
};
// Turn `turn` of the row: its sides one after the other, as many pages of one as a warp takes.
__device__ __forceinline__ CountedPage page_of_turn(const DeviceState& d, const PageLanes& lanes,
                                                    int32_t row, const RowPages& r, int32_t turn) {
  CountedPage at{kStoreSides, 0, 0, 0};
  int32_t tile = 0, index = 0;
#pragma unroll
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t per_page = d.s.page_tokens(side), log2 = lanes.log2_of[side];
    const int32_t first = turn << (5 - log2);
    if (turn >= 0 && first < r.pages[side]) {
      at.side = side;
      index = first + (lane_index() >> log2);
      at.used = smaller_of(per_page, r.tokens[side] - index * per_page);
      at.first_tile = tile + index * (per_page / kTileTokens);
      turn = -1;
    } else if (turn >= 0) {
      turn -= (r.pages[side] + (32 >> log2) - 1) >> (5 - log2);
    }
    tile += (r.tokens[side] + kTileTokens - 1) / kTileTokens;
  }
  at.used = larger_of(at.used, 0);
  if (at.used > 0) at.page = d.s.page_id(row, at.side, index);
  return at;
}

// A query that is counted.
struct CountedPosition {
  CountSchedule schedule;
  int32_t counted;  // queries counted through it; 0: it is not counted
};
// A row of the batch, in shared memory.
template <int32_t kColumns>
struct CountedRow {
  int32_t row;  // of the page table
  RowPages pages;
  CountedPosition query;
  float offsets[kColumns];  // -lse in log2 units, -infinity: not a column
};

// The least token that a lane or a team has seen: scores are not negative, so that their bits are
// in their order, and no two tokens of a row have a position in common.
struct LeastToken {
  uint64_t key = ~uint64_t{0};  // bits of the score, then the position
  int32_t slot = kNoSlot;
};

// Observations of the token at `position` up to the query; at most 0: it is not older.
template <bool kCountsAll>
__device__ __forceinline__ int32_t observations(const CountedPosition& query, int32_t position) {
  return query.counted - (kCountsAll ? position + 1 : query.schedule.counted_through(position));
}

template <int32_t kColumns, bool kCountsAll>
__device__ __forceinline__ void count_half_tile(const DeviceState& d, const TokenScores& scores,
                                                const CountedRow<kColumns>& r, int64_t tile,
                                                const CountedPage& page, int32_t part, bool frozen,
                                                LeastToken* least) {
  const PageLayout& layout = d.s.layouts[page.side];
  const int32_t slot = part / 2 * kTileTokens + part % 2 * 4;
  uint8_t* bytes = d.s.page_bytes(page.page);
  auto* means = reinterpret_cast<float4*>(bytes + layout.score_byte(slot));
  const auto* at = reinterpret_cast<const int4*>(bytes + layout.position_byte(slot));
  const auto* of_tile = reinterpret_cast<const HalfTileCodes<kColumns>*>(scores.tile_codes(tile));
  const float4 old[2] = {means[0], means[2]};
  const int4 position[2] = {at[0], at[2]};
  const HalfTileCodes<kColumns> codes = of_tile[part % 2];
  float references[kColumns];
  const float* from = scores.tile_references(tile);
#pragma unroll
  for (int32_t i = 0; i < kColumns; i += 2) {
    const auto pair = *reinterpret_cast<const float2*>(from + i);
    references[i] = pair.x;
    references[i + 1] = pair.y;
  }
  const TileSteps<kColumns> steps = tile_steps(references, r.offsets);
  const CountedPosition query = r.query;
  const int32_t positions[kHalfTileTokens] = {position[0].x, position[0].y, position[0].z,
                                              position[0].w, position[1].x, position[1].y,
                                              position[1].z, position[1].w};
  float mean[kHalfTileTokens] = {old[0].x, old[0].y, old[0].z, old[0].w,
                                 old[1].x, old[1].y, old[1].z, old[1].w};
  // Without branches, so that the latencies of tokens overlap.
#pragma unroll
  for (int32_t i = 0; i < kHalfTileTokens; ++i) {
    const int32_t here = slot + half_tile_token(0, i);
    const bool is_token = here < page.used;
    const int32_t count = observations<kCountsAll>(query, positions[i]);
    const float counted =
        mean_with(mean[i], count, probability_of_steps(largest_steps(codes, steps, i)));
    mean[i] = (static_cast<int>(is_token) & static_cast<int>(count > 0)) != 0 ? counted : mean[i];
    const uint64_t key =
        static_cast<uint64_t>(float_bits(mean[i])) << 32 | static_cast<uint32_t>(positions[i]);
    const bool is_least = (static_cast<int>(is_token) & static_cast<int>(key < least->key)) != 0;
    least->key = is_least ? key : least->key;
    least->slot = is_least ? here : least->slot;
  }
  if (frozen) return;
  means[0] = {mean[0], mean[1], mean[2], mean[3]};
  means[2] = {mean[4], mean[5], mean[6], mean[7]};
}

// By a warp: a turn's pages.
template <int32_t kColumns, bool kCountsAll>
__device__ __forceinline__ void count_turn(const DeviceState& d, const TokenScores& scores,
                                           const CountedRow<kColumns>& r, int32_t batch_row,
                                           const CountedPage& page, int32_t log2_lanes) {
  LeastToken least;
  const int32_t lanes = 1 << log2_lanes;
  const bool frozen = page.used > 0 && is_frozen(d.s.allocator, page.page);
#pragma unroll 1
  for (int32_t part = lane_index() % lanes; part / 2 * kTileTokens + part % 2 * 4 < page.used;
       part += lanes) {
    const int64_t tile = scores.tile(batch_row, page.first_tile + part / 2);
    count_half_tile<kColumns, kCountsAll>(d, scores, r, tile, page, part, frozen, &least);
  }
  __syncwarp();
  uint64_t of_page = least.key;
#pragma unroll 1
  for (int32_t i = 1; i < lanes; i *= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, of_page, i);
    of_page = other < of_page ? other : of_page;
  }
  if (least.slot == kNoSlot || least.key != of_page) return;
  if (frozen || page.side == kWindowSide) return;
  PageRecord& record = d.s.allocator.records[page.page];
  record.min_score = bits_float(static_cast<uint32_t>(of_page >> 32));
  record.min_slot = least.slot;
  record.min_position = static_cast<int32_t>(of_page & 0xffffffffu);
}

}  // namespace tierkv
