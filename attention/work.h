// How one launch's attention is cut into work: tiers, chunks and items. Shared by the plan (host
// and device) and by the kernel that follows it.
//
//   row    one (sequence, kv_head) of the launch; its tokens lie in up to three tiers, each a list
//   of pages of which
//          only the last may be partly filled
//   chunk  up to `tiles_per_chunk` consecutive tiles of one page: what a warp copies and attends to
//   at once. The chunks
//          of a row are numbered through its tiers in order; a row without tokens has one chunk
//          with nothing in it, so that it too is visited and its output written
//   item   the consecutive chunks, of one row or of several, that one CTA attends to
#pragma once

#include <cstdint>

#include "codec/page_layout.h"
#include "tierkv/page_table.h"

namespace tierkv {

inline constexpr int32_t kAttentionTiers = 3;
inline constexpr int32_t kCostUnitBytes = 64;
inline constexpr int32_t kEmptyRowCost = 16;  // in cost units: about what writing zeros takes

// One tier of every row of a launch.
struct TierSource {
  PageLayout layout;
  SideView side;
  int32_t tiles_per_chunk = 1;
  int32_t chunks_per_page = 1;
  int32_t chunk_cost = 1;  // bytes read / kCostUnitBytes, of the mean chunk of a full page
};

// The rows of a launch: row i is kv_head i % num_kv_heads of sequence i / num_kv_heads of the
// batch.
struct AttentionRows {
  TierSource tiers[kAttentionTiers];
  const int32_t* sequences =
      nullptr;  // [num_rows / num_kv_heads], -1: no sequence; null: 0, 1, 2, ...
  int32_t num_rows = 0;
  int32_t num_kv_heads = 1;
  int32_t num_tiers = 0;
  int32_t num_table_sequences = 0;
  int32_t rows_per_sequence = 1;  // of the page table: num_layers * num_kv_heads
};

// Tokens of one row by tier, as the plan and the kernel see them.
struct RowTokens {
  int32_t tier[kAttentionTiers] = {0, 0, 0};
  bool corrupt = false;  // a count or the sequence was outside the table
};

// The share of one CTA; items[i + 1] says where item i ends. Written by the plan.
struct WorkItem {
  int32_t row;         // of its first chunk; num_rows in the item after the last
  int32_t chunk;       // of that row, where it starts
  int32_t num_chunks;  // 0: nothing to do
  int32_t span_first;  // the items that share `row`: span_first .. span_last
  int32_t span_last;
  int32_t reserved[3];
};
static_assert(sizeof(WorkItem) == 32, "two 16-byte accesses per item");

// Where a chunk lies.
struct ChunkPlace {
  int32_t tier;
  int32_t page;    // slot of the row's tier
  int32_t tile;    // first tile in the page
  int32_t tokens;  // 0 only in the chunk of a row without tokens
};

TKV_HD constexpr int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}
TKV_HD constexpr int32_t smaller(int32_t a, int32_t b) {
  return a < b ? a : b;
}

// Bytes attention reads of one tile.
TKV_HD constexpr int32_t tile_read_bytes(const PageLayout& p) {
  return p.k_tile.bytes() + p.v_tile.bytes() + tile_metadata_bytes(p.k_groups + p.v_groups);
}

// Cuts the pages of a tier into chunks of at most slot_bytes: as few as possible, of nearly equal
// and, where there is more than one tile, even length. The caller knows that a tile fits.
TKV_HD void cut_pages(TierSource& tier, int32_t slot_bytes) {
  const int32_t tiles = tier.layout.tiles(), tile_bytes = tile_read_bytes(tier.layout);
  const int32_t most = slot_bytes / tile_bytes;
  const int32_t even = most > 1 ? most & ~1 : 1;
  const int32_t equal = ceil_div(tiles, ceil_div(tiles, even));
  tier.tiles_per_chunk = equal > 1 ? smaller(even, (equal + 1) & ~1) : 1;
  tier.chunks_per_page = ceil_div(tiles, tier.tiles_per_chunk);
  tier.chunk_cost = ceil_div(tiles * tile_bytes, tier.chunks_per_page * kCostUnitBytes);
}

TKV_HD int32_t tier_chunks(const TierSource& tier, int32_t tokens) {
  const int32_t pages = tokens / tier.layout.tokens;
  const int32_t rest = ceil_div(tokens - pages * tier.layout.tokens, kTileTokens);
  return pages * tier.chunks_per_page + ceil_div(rest, tier.tiles_per_chunk);
}

inline constexpr int64_t kPaddingRow = -1;
inline constexpr int64_t kStrayRow = -2;  // of a sequence outside the table

// The row of the page table, or one of the above.
TKV_HD int64_t table_row_of(const AttentionRows& rows, int32_t layer, int32_t row) {
  const int32_t place = row / rows.num_kv_heads, kv_head = row - place * rows.num_kv_heads;
  const int32_t sequence = rows.sequences == nullptr ? place : rows.sequences[place];
  if (sequence < 0) return sequence == -1 ? kPaddingRow : kStrayRow;
  if (sequence >= rows.num_table_sequences) return kStrayRow;
  return static_cast<int64_t>(sequence) * rows.rows_per_sequence + layer * rows.num_kv_heads +
         kv_head;
}

// The tokens of a table row, cut to what its table can hold: a corrupt count cannot lead outside
// the table.
TKV_HD RowTokens row_tokens(const AttentionRows& rows, int64_t table_row) {
  RowTokens n;
  n.corrupt = table_row == kStrayRow;
  if (table_row < 0) return n;
  for (int32_t t = 0; t < kAttentionTiers && t < rows.num_tiers; ++t) {
    const SideView& side = rows.tiers[t].side;
    const int64_t most = static_cast<int64_t>(side.max_pages) * side.tokens_per_page;
    const int32_t tokens = side.tokens[table_row * side.token_stride];
    n.tier[t] = tokens < 0 ? 0 : tokens > most ? static_cast<int32_t>(most) : tokens;
    n.corrupt |= n.tier[t] != tokens;
  }
  return n;
}

struct RowWork {
  int32_t chunks;  // at least 1
  int64_t cost;
};
TKV_HD RowWork row_work(const AttentionRows& rows, const RowTokens& n) {
  RowWork w{0, 0};
  for (int32_t t = 0; t < kAttentionTiers && t < rows.num_tiers; ++t) {
    const int32_t chunks = tier_chunks(rows.tiers[t], n.tier[t]);
    w.chunks += chunks;
    w.cost += static_cast<int64_t>(chunks) * rows.tiers[t].chunk_cost;
  }
  return w.chunks == 0 ? RowWork{1, kEmptyRowCost} : w;
}

// The chunk of a row that holds cost unit `cost` of it, 0 <= cost < row_work().cost.
TKV_HD int32_t chunk_at_cost(const AttentionRows& rows, const RowTokens& n, int64_t cost) {
  int32_t first = 0;
  for (int32_t t = 0; t < kAttentionTiers && t < rows.num_tiers; ++t) {
    const int32_t chunks = tier_chunks(rows.tiers[t], n.tier[t]);
    const int64_t tier_cost = static_cast<int64_t>(chunks) * rows.tiers[t].chunk_cost;
    if (cost < tier_cost) return first + static_cast<int32_t>(cost / rows.tiers[t].chunk_cost);
    cost -= tier_cost;
    first += chunks;
  }
  return 0;
}

TKV_HD ChunkPlace chunk_place(const AttentionRows& rows, const RowTokens& n, int32_t chunk) {
  for (int32_t t = 0; t < kAttentionTiers && t < rows.num_tiers; ++t) {
    const TierSource& tier = rows.tiers[t];
    const int32_t chunks = tier_chunks(tier, n.tier[t]);
    if (chunk >= chunks) {
      chunk -= chunks;
      continue;
    }
    const int32_t page = chunk / tier.chunks_per_page;
    const int32_t tile = (chunk - page * tier.chunks_per_page) * tier.tiles_per_chunk;
    const int32_t page_left = tier.layout.tokens - tile * kTileTokens;
    const int32_t tier_left = n.tier[t] - page * tier.layout.tokens - tile * kTileTokens;
    return {t, page, tile,
            smaller(tier.tiles_per_chunk * kTileTokens, smaller(page_left, tier_left))};
  }
  return {0, 0, 0, 0};
}

}  // namespace tierkv
