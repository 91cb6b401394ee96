// SPDX-License-Identifier: Apache-2.0
// How one launch's attention is cut into work: tiles, chunks and items. Shared by the plan (host
// and device) and by the kernel that follows it.
//
//   row    one (sequence, kv_head) of the launch; its tokens lie in up to three tiers, each a list
//          of pages of which only the last may be partly filled
//   tile   16 tokens of one tier. The tiles of a row are numbered through its tiers in order; a row
//          without tokens has one tile with nothing in it, so that it too is visited and its output
//          written
//   item   the consecutive tiles, of one row or of several, that one warp attends to; the items of
//          a CTA follow each other
//   class  of kv_heads: those of a class have the same formats in their tiers. Launches of one
//          class and of several differ in the types below, so that those of one class have none of
//          the others' code
//   chunk  up to `tiles_per_chunk` consecutive tiles of one page and item: what is copied at once
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "tierkv/attention.h"
#include "tierkv/page_table.h"

namespace tierkv {

inline constexpr int32_t kAttentionTiers = 3;
inline constexpr int32_t kClassHeads = 64;  // kv_heads of a layer that may be of several classes
inline constexpr int32_t kClassLayers = 128;
inline constexpr int32_t kCostUnitBytes = 64;
inline constexpr int32_t kMaxTileCost = 64;  // beside its bytes; keeps costs of rows in 32 bits
// A short row takes its beginning and end, in which its warp waits for tables, queries and pages
// one after the other, as long as for two pages; a long one has them hidden, and equal rows then
// cut into equal items. In cost units.
inline constexpr int32_t kShortRowTiles = 32;  // a row with fewer tiles is short
inline constexpr int32_t kShortRowCost = 384;
inline constexpr int32_t kMaxTierTokens = 1 << 26;  // of one row; keeps its cost inside 32 bits

// The types of both components in one word.
TKV_HD constexpr int32_t pair_format(CodeType k, CodeType v) {
  return k.word << 16 | v.word;
}
TKV_HD constexpr CodeType key_type(int32_t format) {
  return CodeType(format >> 16);
}
TKV_HD constexpr CodeType value_type(int32_t format) {
  return CodeType(format & 0xffff);
}

// One tier of every row of a launch. Small, as all of RowsOf, because parameters are fetched
// anew by every launch, a line at a time, and the beginning of the kernels waits for them.
struct TierSource {
  const int32_t* slots = nullptr;   // of page 0 of table row 0
  const int32_t* tokens = nullptr;  // of table row 0
  int32_t direction = 1;            // from a page's slot to the next one's
  int32_t format = 0;               // pair_format()
  int32_t page_tiles = 1;           // of a full page
  int32_t chunk_tiles = 1;
  int32_t segment[4] = {};       // byte in the page: key codes, their metadata, values, theirs
  int32_t segment_tile[4] = {};  // bytes of a tile there
  int32_t page_bytes = 0;        // of all four segments
  int32_t tile_cost = 1;         // bytes read / kCostUnitBytes + the grid's
  int32_t max_pages = 0;         // of a table row
  int32_t max_tokens = 0;        // that they hold
};

// The class of each kv_head of a layer, as two bits: bit h of the words is kv_head h's.
struct HeadPlanes {
  uint64_t low = 0, high = 0;

  TKV_HD int32_t class_of(int32_t kv_head) const {
    return static_cast<int32_t>((low >> kv_head & 1) | (high >> kv_head & 1) << 1);
  }
  void set(int32_t kv_head, int32_t head_class) {
    low |= static_cast<uint64_t>(head_class & 1) << kv_head;
    high |= static_cast<uint64_t>(head_class >> 1) << kv_head;
  }
};
// The planes of the layer that a launch attends to.
template <int32_t kClasses>
struct LayerClasses {
  HeadPlanes heads;
};
template <>
struct LayerClasses<1> {};

// The rows of a launch. Table row i of the batch is kv_head i % num_kv_heads of its sequence i /
// num_kv_heads; it is `passes` rows with a part of the query columns each
// (attention/core/columns.h).
template <int32_t kClasses>
struct RowsOf : LayerClasses<kClasses> {
  TierSource tiers[kClasses * kAttentionTiers];  // class c's begin at c * kAttentionTiers
  const int32_t* sequences =
      nullptr;               // [num_rows / num_kv_heads], -1: no sequence; null: 0, 1, 2, ...
  int32_t row_stride = 0;    // of slots, from a table row to the next
  int32_t token_stride = 0;  // likewise
  int32_t num_rows = 0;
  int32_t passes = 1;
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

// The share of one warp; item i ends where item i + 1 starts. Written by the plan.
struct alignas(16) WorkItem {
  int32_t row;      // of its first tile; num_rows behind the last item
  int32_t tile;     // of that row, where it starts; 0 behind the last item
  int32_t tiles;    // 0: nothing to do
  int32_t tier[3];  // tokens of `row`
};
static_assert(sizeof(WorkItem) == 32, "two 16-byte accesses per item");

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

// Tiles of a chunk of at most slot_bytes: as many as make the fewest chunks of a page, of nearly
// equal and, where a page has several, even length. The caller knows that a tile fits.
TKV_HD constexpr int32_t cut_page(int32_t page_tiles, int32_t tile_bytes, int32_t slot_bytes) {
  const int32_t most = smaller(slot_bytes / tile_bytes, page_tiles);
  if (most == page_tiles || most == 1) return most;
  const int32_t even = most & ~1;
  const int32_t equal = ceil_div(page_tiles, ceil_div(page_tiles, even));
  return smaller(even, (equal + 1) & ~1);
}

inline TierSource tier_source(const PageLayout& layout, const SideView& side, int32_t slot_bytes,
                              int32_t tile_cost = AttentionGrid().tile_cost) {
  TierSource tier;
  const int32_t tile_bytes = tile_read_bytes(layout);
  const int64_t held = static_cast<int64_t>(side.max_pages) * layout.tokens;
  tier.slots = side.slots;
  tier.tokens = side.tokens;
  tier.direction = side.direction;
  tier.format = pair_format(layout.k_tile.type, layout.v_tile.type);
  tier.page_tiles = layout.tiles();
  tier.chunk_tiles = cut_page(layout.tiles(), tile_bytes, slot_bytes);
  const Component components[2] = {Component::kKey, Component::kValue};
  for (int32_t c = 0; c < 2; ++c) {
    tier.segment[2 * c] = layout.tile_codes_byte(components[c], 0);
    tier.segment[2 * c + 1] = layout.tile_metadata_byte(components[c], 0);
    tier.segment_tile[2 * c] = layout.tile(components[c]).bytes();
    tier.segment_tile[2 * c + 1] = tile_metadata_bytes(layout.groups(components[c]));
  }
  tier.page_bytes = layout.scores;
  tier.tile_cost = tile_cost + ceil_div(tile_bytes, kCostUnitBytes);
  tier.max_pages = side.max_pages;
  tier.max_tokens = held < kMaxTierTokens ? static_cast<int32_t>(held) : kMaxTierTokens;
  return tier;
}

// The row of the batch that a row of the launch is a pass of.
template <int32_t kClasses>
TKV_HD int32_t batch_row_of(const RowsOf<kClasses>& rows, int32_t row) {
  return rows.passes == 1 ? row : row / rows.passes;
}

// Where in `tiers` those of a row's class begin.
template <int32_t kClasses>
TKV_HD int32_t first_tier_of(const RowsOf<kClasses>& rows, int32_t row) {
  if constexpr (kClasses == 1) {
    return 0;
  } else {
    return rows.heads.class_of(batch_row_of(rows, row) % rows.num_kv_heads) * kAttentionTiers;
  }
}

inline constexpr int64_t kPaddingRow = -1;
inline constexpr int64_t kStrayRow = -2;  // of a sequence outside the table

// The row of the page table of a sequence that is in it.
template <int32_t kClasses>
TKV_HD int64_t table_row_in(const RowsOf<kClasses>& rows, int32_t layer, int32_t sequence,
                            int32_t kv_head) {
  return static_cast<int64_t>(sequence) * rows.rows_per_sequence + layer * rows.num_kv_heads +
         kv_head;
}

// The row of the page table, or one of the above.
template <int32_t kClasses>
TKV_HD int64_t table_row_of(const RowsOf<kClasses>& rows, int32_t layer, int32_t row) {
  const int32_t batch_row = batch_row_of(rows, row);
  const int32_t place = batch_row / rows.num_kv_heads;
  const int32_t kv_head = batch_row - place * rows.num_kv_heads;
  const int32_t sequence = rows.sequences == nullptr ? place : rows.sequences[place];
  if (sequence < 0) return sequence == -1 ? kPaddingRow : kStrayRow;
  if (sequence >= rows.num_table_sequences) return kStrayRow;
  return table_row_in(rows, layer, sequence, kv_head);
}

// A count of the table, cut to what the table can hold: a corrupt one cannot lead outside it.
TKV_HD int32_t cut_tokens(const TierSource& tier, int32_t tokens) {
  return tokens < 0 ? 0 : smaller(tokens, tier.max_tokens);
}

// The tokens of a table row whose tiers begin at first_tier.
template <int32_t kClasses>
TKV_HD RowTokens row_tokens(const RowsOf<kClasses>& rows, int64_t table_row,
                            int32_t first_tier = 0) {
  RowTokens n;
  n.corrupt = table_row == kStrayRow;
  if (table_row < 0) return n;
  for (int32_t t = 0; t < kAttentionTiers; ++t) {
    if (t >= rows.num_tiers) continue;
    const TierSource& tier = rows.tiers[first_tier + t];
    const int32_t tokens = tier.tokens[table_row * rows.token_stride];
    n.tier[t] = cut_tokens(tier, tokens);
    n.corrupt |= n.tier[t] != tokens;
  }
  return n;
}

// What a row's beginning and end cost.
TKV_HD constexpr int32_t row_cost(int32_t tiles) {
  return tiles < kShortRowTiles ? kShortRowCost : 0;
}

struct RowWork {
  int32_t tiles;  // at least 1
  uint32_t cost;  // likewise
};
template <int32_t kClasses>
TKV_HD RowWork row_work(const RowsOf<kClasses>& rows, const RowTokens& n, int32_t first_tier = 0) {
  RowWork w{0, 0};
  for (int32_t t = 0; t < kAttentionTiers; ++t) {
    const int32_t tiles = tile_count(n.tier[t]);
    w.tiles += tiles;
    w.cost +=
        static_cast<uint32_t>(tiles) * static_cast<uint32_t>(rows.tiers[first_tier + t].tile_cost);
  }
  w.cost += row_cost(w.tiles);
  if (w.tiles == 0) w.tiles = 1;
  return w;
}

// The largest cost between two places where an item may start.
template <int32_t kClasses>
TKV_HD int32_t largest_step_cost(const RowsOf<kClasses>& rows) {
  int32_t cost = 0;
  for (int32_t c = 0; c < kClasses; ++c) {
    for (int32_t t = 0; t < kAttentionTiers && t < rows.num_tiers; ++t) {
      const int32_t of_tier = rows.tiers[c * kAttentionTiers + t].tile_cost;
      if (of_tier > cost) cost = of_tier;
    }
  }
  return kShortRowCost + 2 * cost;
}

// The cost of a launch's rows.
struct LaunchCost {
  int64_t total;
  int64_t first;  // of row 0
};

// So many of max_ctas that rows of one cost begin and end with a CTA, which saves joining parts;
// max_ctas where that would leave more than one in 16 without work.
TKV_HD constexpr int32_t even_ctas(int32_t num_rows, int32_t max_ctas) {
  const int32_t rows_of_cta = ceil_div(num_rows, max_ctas);
  const int32_t groups = num_rows / rows_of_cta;
  const int32_t ctas = max_ctas / groups * groups;
  const bool is_even = groups * rows_of_cta == num_rows && ctas >= max_ctas - max_ctas / 16;
  return is_even ? ctas : max_ctas;
}
// Where CTAs have more work than this, using every SM gains more than saving joins.
inline constexpr int64_t kLongCost = 1 << 14;

// The CTAs that get work, so many that no two start at the same place.
// even: even_ctas() of the two.
template <int32_t kClasses>
TKV_HD int32_t working_ctas(const RowsOf<kClasses>& rows, int32_t max_ctas, int32_t even,
                            LaunchCost cost) {
  const auto step = static_cast<uint32_t>(largest_step_cost(rows));
  if (cost.total >= static_cast<int64_t>(max_ctas) * step) {
    const bool is_wanted = rows.num_rows >= even || cost.total < max_ctas * kLongCost;
    return is_wanted && cost.first * rows.num_rows == cost.total ? even : max_ctas;
  }
  const auto most = static_cast<int32_t>(static_cast<uint32_t>(cost.total) / step);
  return most < 1 ? 1 : most;
}

// Divides by a number that is known early: later this takes a few instructions.
class Divisor {
 public:
  Divisor() = default;
  TKV_HD explicit Divisor(int32_t d)
      : value_(static_cast<uint32_t>(d)), reciprocal_(~0u / static_cast<uint32_t>(d)) {}

  TKV_HD uint32_t value() const { return value_; }
  TKV_HD uint32_t quotient(uint32_t x) const {
    // x (2^32 / value - reciprocal) / 2^32 is below 1, so this is the quotient or one less.
    const auto q = static_cast<uint32_t>(uint64_t{x} * reciprocal_ >> 32);
    return x - q * value_ < value_ ? q : q + 1;
  }

 private:
  uint32_t value_ = 1;
  uint32_t reciprocal_ = ~0u;
};

// `total` units cut into at most 2^12 equal parts.
class EvenCut {
 public:
  TKV_HD EvenCut(int64_t total, Divisor parts) {
    const uint32_t n = parts.value();
    uint32_t rest;
    if (total < 1ll << 32) {  // a division of 64 bits takes a hundred instructions
      const auto all = static_cast<uint32_t>(total);
      share_ = parts.quotient(all);
      rest = all - static_cast<uint32_t>(share_) * n;
    } else {
      share_ = total / n;
      rest = static_cast<uint32_t>(total - share_ * n);
    }
    fraction_ = parts.quotient((rest << kFractionBits) + n - 1);
  }

  // Where part i begins: total * i / parts rounded down, or one more where that is nearly a whole
  // number.
  TKV_HD int64_t start(int32_t i) const {
    return share_ * i + (fraction_ * static_cast<uint32_t>(i) >> kFractionBits);
  }

 private:
  static constexpr int32_t kFractionBits = 20;
  int64_t share_;      // of a part, rounded down
  uint32_t fraction_;  // and the rest of it
};

// The tile of a row that holds cost unit `cost` of it, 0 <= cost < row_work().cost; an even one of
// its tier, so that the tiles of an item go in pairs. tile_cost, tokens: of each tier.
TKV_HD int32_t tile_at_cost(const Divisor* tile_cost, const int32_t* tokens, uint32_t cost) {
  int32_t all = 0;
  for (int32_t t = 0; t < kAttentionTiers; ++t) all += tile_count(tokens[t]);
  const auto own = static_cast<uint32_t>(row_cost(all));
  if (cost < own) return 0;
  uint32_t left = cost - own;
  int32_t first = 0;
  for (int32_t t = 0; t < kAttentionTiers; ++t) {
    const int32_t tiles = tile_count(tokens[t]);
    const uint32_t tier_cost = static_cast<uint32_t>(tiles) * tile_cost[t].value();
    if (left < tier_cost) return first + static_cast<int32_t>(tile_cost[t].quotient(left) & ~1u);
    left -= tier_cost;
    first += tiles;
  }
  return 0;
}

}  // namespace tierkv
