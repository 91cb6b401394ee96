// One query of a row, whose heads are the columns of one row of attention's launch, counted by
// warps that take several pages of a side at once, a quarter of a tile a lane.
//
// What binds such a launch is latency, the fetching of its code included, and then instructions. So
// what attention does not write is read before attention has ended, a CTA's pages as a list in
// shared memory, and a lane asks for all that it needs of its tokens a turn ahead.
#pragma once

#include "store/tiers/count_query.h"
#include "store/tiers/device_rows.cuh"

namespace tierkv {

// How many lanes see to a page of each side: a power of two.
struct PageLanes {
  int32_t log2_of[kStoreSides];
};
inline PageLanes page_lanes(const StoreView& s) {
  PageLanes lanes{};
  for (int32_t side = 0; side < kStoreSides; ++side) {
    while (lanes.log2_of[side] < 5 && kQuarterTokens << lanes.log2_of[side] < s.page_tokens(side)) {
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
    r.tokens[i] = __shfl_sync(kFullWarp, tokens, i);
    r.pages[i] = __shfl_sync(kFullWarp, pages, i);
    r.tiles += (r.tokens[i] + kTileTokens - 1) / kTileTokens;
  }
  return r;
}

// A page of a row; by any lane. used: 0 where the row has no such page.
struct alignas(16) CountedPage {
  int32_t page;
  int32_t used;        // tokens
  int32_t first_tile;  // of the row
  int32_t side;
};
__device__ __forceinline__ CountedPage page_of_row(const DeviceState& d, int32_t row,
                                                   const RowPages& r, int32_t item) {
  CountedPage at{0, 0, 0, kStoreSides};
  int32_t tile = 0, index = item;
#pragma unroll
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t per_page = d.s.page_tokens(side);
    if (at.side == kStoreSides) {
      if (index < r.pages[side]) {
        at.side = side;
        at.used = smaller_of(per_page, r.tokens[side] - index * per_page);
        at.first_tile = tile + index * (per_page / kTileTokens);
      } else {
        index -= r.pages[side];
      }
    }
    tile += (r.tokens[side] + kTileTokens - 1) / kTileTokens;
  }
  if (at.used > 0) at.page = d.s.page_id(row, at.side, index);
  return at;
}

// A query that is counted.
struct CountedPosition {
  CountSchedule schedule;
  int32_t counted;  // queries counted through it; 0: it is not counted
};
inline constexpr int32_t kListedPages = 224;

// A row of the batch and the part of its pages that the CTA sees to, in shared memory.
template <int32_t kColumns>
struct CountedRow {
  CountedPage pages[kListedPages];
  bool is_frozen[kListedPages];
  int32_t row, batch_row;     // of the page table, of the batch
  int32_t ends[kStoreSides];  // of the sides in the list
  CountedPosition query;
  float offsets[kColumns];  // -lse in log2 units, -infinity: not a column
};

// Observations of the token at `position` up to the query; at most 0: it is not older.
template <bool kCountsAll>
__device__ __forceinline__ int32_t observations(const CountedPosition& query, int32_t position) {
  return query.counted - (kCountsAll ? position + 1 : query.schedule.counted_through(position));
}

// A lane's quarter of a tile.
template <int32_t kColumns>
struct Quarter {
  int32_t item;        // of the list; -1: the lane has none
  int32_t slot;        // of its first token
  int32_t log2_lanes;  // that the warp's pages have
  QuarterCodes<kColumns> codes;
  float references[kColumns];
  float2 means[2];
  int2 positions[2];
};

__device__ __forceinline__ float2* means_at(const DeviceState& d, const CountedPage& page,
                                            int32_t slot) {
  uint8_t* bytes = d.s.page_bytes(page.page);
  return reinterpret_cast<float2*>(bytes + d.s.layouts[page.side].score_byte(slot));
}

// Of turn `turn` of the CTA: the sides of its list one after the other, as many pages of one as a
// warp takes. False behind the last.
template <int32_t kColumns>
__device__ __forceinline__ bool load_quarter(const DeviceState& d, const TokenScores& scores,
                                             const PageLanes& lanes, const CountedRow<kColumns>& r,
                                             int32_t turn, Quarter<kColumns>* q) {
  q->item = -1;
  int32_t first = -1, begin = 0, end = 0, log2 = 0;
#pragma unroll
  for (int32_t side = 0; side < kStoreSides; ++side) {
    if (first < 0) {
      log2 = lanes.log2_of[side];
      end = r.ends[side];
      const int32_t turns = (end - begin + (32 >> log2) - 1) >> (5 - log2);
      if (turn < turns) first = begin + (turn << (5 - log2));
      turn -= turns;
      begin = end;
    }
  }
  if (first < 0) return false;
  const int32_t item = first + (lane_index() >> log2);
  const int32_t part = lane_index() & ((1 << log2) - 1);
  q->log2_lanes = log2;
  q->slot = part / 4 * kTileTokens + part % 4 * 2;
  if (item >= end) return true;
  const CountedPage page = r.pages[item];
  if (q->slot >= page.used) return true;
  q->item = item;
  const float2* means = means_at(d, page, q->slot);
  const auto* positions = reinterpret_cast<const int2*>(
      d.s.page_bytes(page.page) + d.s.layouts[page.side].position_byte(q->slot));
  q->means[0] = means[0];
  q->means[1] = means[4];
  q->positions[0] = positions[0];
  q->positions[1] = positions[4];
  const int64_t tile = scores.tile(r.batch_row, page.first_tile + part / 4);
  q->codes = reinterpret_cast<const QuarterCodes<kColumns>*>(scores.tile_codes(tile))[part % 4];
  const auto* references = reinterpret_cast<const float2*>(scores.tile_references(tile));
#pragma unroll
  for (int32_t i = 0; i < kColumns / 2; ++i) {
    const float2 pair = references[i];
    q->references[2 * i] = pair.x;
    q->references[2 * i + 1] = pair.y;
  }
  return true;
}

// By a warp, together.
template <int32_t kColumns, bool kCountsAll>
__device__ __forceinline__ void count_quarter(const DeviceState& d, const CountedRow<kColumns>& r,
                                              const Quarter<kColumns>& q) {
  // The least token: scores are not negative, so that their bits are in their order, and no two
  // tokens of a row have a position in common.
  uint64_t key = ~uint64_t{0};
  int32_t key_slot = kNoSlot;
  if (q.item >= 0) {
    const int32_t used = r.pages[q.item].used;
    const TileSteps<kColumns> steps = tile_steps(q.references, r.offsets);
    const CountedPosition query = r.query;
    const int32_t positions[kQuarterTokens] = {q.positions[0].x, q.positions[0].y, q.positions[1].x,
                                               q.positions[1].y};
    float mean[kQuarterTokens] = {q.means[0].x, q.means[0].y, q.means[1].x, q.means[1].y};
    // Without branches, so that the latencies of tokens overlap.
#pragma unroll
    for (int32_t i = 0; i < kQuarterTokens; ++i) {
      const int32_t slot = q.slot + quarter_token(0, i);
      const bool is_token = slot < used;
      const int32_t count = observations<kCountsAll>(query, positions[i]);
      const float counted =
          mean_with(mean[i], count, probability_of_steps(largest_steps(q.codes, steps, i)));
      mean[i] = (static_cast<int>(is_token) & static_cast<int>(count > 0)) != 0 ? counted : mean[i];
      const uint64_t this_key =
          static_cast<uint64_t>(float_bits(mean[i])) << 32 | static_cast<uint32_t>(positions[i]);
      const bool is_least = (static_cast<int>(is_token) & static_cast<int>(this_key < key)) != 0;
      key = is_least ? this_key : key;
      key_slot = is_least ? slot : key_slot;
    }
    if (!r.is_frozen[q.item]) {
      float2* means = means_at(d, r.pages[q.item], q.slot);
      means[0] = {mean[0], mean[1]};
      means[4] = {mean[2], mean[3]};
    }
  }
  __syncwarp();
  uint64_t least = key;
#pragma unroll 1
  for (int32_t i = 1; i < 1 << q.log2_lanes; i *= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, least, i);
    least = other < least ? other : least;
  }
  if (key_slot == kNoSlot || key != least || r.is_frozen[q.item]) return;
  const CountedPage page = r.pages[q.item];
  if (page.side == kWindowSide) return;
  PageRecord& record = d.s.allocator.records[page.page];
  record.min_score = bits_float(static_cast<uint32_t>(key >> 32));
  record.min_slot = key_slot;
  record.min_position = static_cast<int32_t>(key & 0xffffffffu);
}

}  // namespace tierkv
