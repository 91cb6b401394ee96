// SPDX-License-Identifier: Apache-2.0
// write() of chunks: a warp takes one component of a tile of a side, 16 tokens that follow each
// other in their tier. Tiles that the call goes on with, and those with a token that no format
// holds, go token by token. Bound: instructions, as in codec/gpu/pages/tile_codes.cuh.
#pragma once

#include "codec/gpu/pages/tile_codes.cuh"
#include "gpu/pdl.cuh"
#include "gpu/warp_sums.cuh"
#include "store/rows/tiers/device_tiers_kernels.cuh"

namespace tierkv::store {

// Shared memory of a warp: a channel table, a tile of rows, positions of its tokens.
template <int32_t kDim>
inline constexpr int32_t kTiersTileBytes = kTileWarpBytes<kDim> + 4 * kTileTokens;

// Tiles of both sides that a row's tokens may lie in.
TKV_HD constexpr int32_t most_tiles(int32_t leaving) {
  return leaving / kTileTokens + 4;
}

// Tokens [first, end) of a side, of one tile.
struct TileTokens {
  int32_t row, side;
  int32_t first, end;  // empty: the row has no such tile
};
__device__ __forceinline__ TileTokens tile_of(const TiersDraft& draft, int32_t row, int32_t index) {
  for (int32_t side = 0; side < 2; ++side) {
    const int32_t before = draft.before.tokens[side], after = draft.after.tokens[side];
    const int32_t first = before / kTileTokens;
    const int32_t tiles = before == after ? 0 : (after - 1) / kTileTokens + 1 - first;
    if (index < tiles) {
      const int32_t tile = (first + index) * kTileTokens;
      return {row, side, most(before, tile), least(after, tile + kTileTokens)};
    }
    index -= tiles;
  }
  return {row, 0, 0, 0};
}

// The group that holds token `rank` of a side, of those that leave; in all lanes.
__device__ __forceinline__ int32_t group_of_rank(const SideTokens* groups, int32_t num_groups,
                                                 int32_t side, int32_t rank) {
  int32_t found = 0;
#pragma unroll 1
  for (int32_t base = 0; base < num_groups; base += 32) {
    const int32_t group = base + lane_index();
    const bool is_before = group < num_groups && groups[group].of[side] <= rank;
    const uint32_t before = __ballot_sync(kFullWarp, is_before);
    found += __popc(before);
    if (before != kFullWarp) break;
  }
  return found - 1;
}

// Where the tokens of a tile are, [t.end - t.first].
__device__ __forceinline__ void find_positions(const TiersCall& c, const TiersPlace& at,
                                               const TileTokens& t, int32_t* positions) {
  const TiersDraft& draft = c.scratch.drafts[t.row];
  const SideTokens* groups = c.scratch.groups + int64_t{t.row} * c.scratch.groups_of_row;
  const auto* map = reinterpret_cast<const uint32_t*>(at.map());
  const int32_t first_group = draft.first / kGroupPositions;
  const int32_t num_groups = (draft.end - 1) / kGroupPositions + 1 - first_group;
  const BodyTier tier = t.side == kLowSide ? BodyTier::kLow : BodyTier::kHigh;
  const int32_t rank = t.first - draft.before.tokens[t.side], count = t.end - t.first;
  int32_t group = group_of_rank(groups, num_groups, t.side, rank);
  int32_t place = groups[group].of[t.side] - rank;  // of the group's first token in the tile
#pragma unroll 1
  for (; place < count && group < num_groups; ++group) {
    const int32_t base = (first_group + group) * kGroupPositions + lane_index() * kWordPositions;
    const uint32_t mask = word_mask(draft.first - base, draft.end - base);
    uint32_t word = mask == 0 ? 0u : positions_of(map[base / kWordPositions], tier) & mask;
    int32_t all;
    int32_t mine = place + sum_before(__popc(word), &all);
    for (; word != 0; word &= word - 1, ++mine) {
      if (mine >= 0 && mine < count) positions[mine] = base + lowest_bit(word) / 2;
    }
    place += all;
  }
  __syncwarp();
}

// Rows of a tile as fp16; those without a token are 0.
template <int32_t kDim>
__device__ __forceinline__ void load_tile_rows(const RawTokens& tokens, Component part,
                                               const int32_t* positions, int32_t count,
                                               uint8_t* rows) {
  constexpr int32_t kPieces = kDim / 8;
#pragma unroll 4
  for (int32_t i = 0; i < kTileTokens * kPieces / 32; ++i) {
    const int32_t piece = 32 * i + lane_index(), row = piece / kPieces, first = piece % kPieces * 8;
    uint4 x = {0, 0, 0, 0};
    if (row < count) x = raw_eight(tokens, part, positions[row], first);
    *reinterpret_cast<uint4*>(rows + row * kRowPitch<kDim> + 2 * first) = x;
  }
}

// Whether the tile has its codes; else nothing is defined of it.
template <int32_t kDim>
__device__ __forceinline__ bool write_whole_tile(const TiersCall& c, const TiersPlace& at,
                                                 const TileTokens& t, Component part,
                                                 const PageRef& page, const int32_t* positions,
                                                 uint8_t* shared) {
  auto* table = reinterpret_cast<ChannelPair*>(shared);
  uint8_t* rows = shared + kTableBytes<kDim>;
  const RawTokens tokens = device_tokens(c.view, c.works, t.row / c.view.num_kv_heads, at.kv_head);
  load_tile_rows<kDim>(tokens, part, positions, t.end - t.first, rows);
  const bool is_key = part == Component::kKey;
  const Rotation& rotation = c.codes.rotation[at.has_basis() ? static_cast<int32_t>(part) : 2];
  fill_channel_table<kDim>(rotation, false, is_key ? at.key_mean() : nullptr, -1.0f, table);
  __syncwarp();
  const PageLayout& layout = *page.layout;
  const int32_t tile = t.first % layout.tokens / kTileTokens;
  const TileTarget to = {page.bytes + layout.tile_codes_byte(part, tile),
                         page.bytes + layout.tile_metadata_byte(part, tile),
                         at.of_class().rule[t.side][static_cast<int32_t>(part)], !is_key,
                         page.raw_dtype};
  const uint32_t there = (2u << (t.end - t.first - 1)) - 1;
  return encode_tile_of<kDim, ChannelVector::kAddend>(
      layout.tile(part).type, {rows, table, DType::kFloat16, &rotation, there}, to);
}

template <int32_t kDim>
__device__ __forceinline__ void write_tiers_tile(const TiersCall& c, const TiersPlace& at,
                                                 const TileTokens& t, Component part,
                                                 uint8_t* shared) {
  auto* positions = reinterpret_cast<int32_t*>(shared + kTileWarpBytes<kDim>);
  find_positions(c, at, t, positions);
  int32_t first_slot;
  const PageRef page = at.page(t.side, t.first, &first_slot);
  const bool is_begun = t.first % kTileTokens == 0;
  if (!is_begun || !write_whole_tile<kDim>(c, at, t, part, page, positions, shared)) {
    __syncwarp();
    const RawTokens from = device_tokens(c.view, c.works, t.row / c.view.num_kv_heads, at.kv_head);
#pragma unroll 1
    for (int32_t first = t.first; first < t.end; first += kWarpTokens<kDim>) {
      const int32_t i = first + token_of_lane<kDim>();
      const bool is_there = i < t.end;
      uint4 raw = {0, 0, 0, 0};
      if (is_there && has_dims<kDim>()) {
        raw = raw_eight(from, part, positions[i - t.first], lane_dim<kDim>());
      }
      LaneCodes codes;
      const StatusCode code = encode_tiers_part<kDim>(c, at, t.side, part, raw, is_there, &codes);
      report_token<kDim>(c, at, code);
      if (is_there) store_lane_codes<kDim>(page, first_slot + i - t.first, part, codes);
    }
  }
  const TiersDraft& draft = c.scratch.drafts[t.row];
  const int32_t slot = first_slot + t.end - 1 - t.first;
  if (t.end != draft.after.tokens[t.side] || t.end - 1 - slot < draft.before.tokens[t.side]) return;
#pragma unroll 1
  for (int32_t tile = slot / kTileTokens + 1; tile < page.layout->tiles(); ++tile) {
    clear_tile_side<kDim>(page, tile, part);
  }
}

// Grid of warps: both components of most_tiles() tiles of every row. Shared memory:
// kTiersTileBytes a warp.
template <int32_t kDim>
__global__ void __launch_bounds__(kTiersThreads)
    write_tiers_tiles_kernel(const __grid_constant__ TiersCall c) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  wait_for_previous_kernel();
  commit(c.works);
  const int32_t task = warp_of_grid() / 2, tiles = most_tiles(c.works.most_leaving);
  const int32_t row = task / tiles, index = task % tiles;
  if (row >= c.num_rows || !c.works.has_pages()) return;
  const TiersDraft& draft = c.scratch.drafts[row];
  if (draft.first >= draft.end) return;
  const TiersPlace at = place_of(c, row);
  const auto part = static_cast<Component>(warp_of_grid() % 2);
  if (index == 0 && part == Component::kKey && lane_index() == 0) {
    *at.state() = draft.after;
  }
  const TileTokens t = tile_of(draft, row, index);
  if (t.first == t.end) return;
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  write_tiers_tile<kDim>(c, at, t, part, shared_bytes + warp * kTiersTileBytes<kDim>);
}

}  // namespace tierkv::store
