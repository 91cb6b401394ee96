// SPDX-License-Identifier: Apache-2.0
// Where the state of tiers lies, and how a token's tier is decided: what host and device share.
// store/ENGINE.md, "Tiers", has the laws.
//
// The state of a (sequence, layer) is, for each kv_head, a TiersRow and then its map: 2 bits for
// each position, the first in the lowest bits.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "codec/format/rotation.h"
#include "store/place/raw_tokens.h"
#include "store/rows/log_mean.h"
#include "tierkv/allocator.h"
#include "tierkv/half.h"

namespace tierkv::store {

// As the map has them; of positions outside the body it may say anything. kNoTier: of sinks.
enum class BodyTier : uint8_t { kNoTier = 0, kHigh = 1, kLow = 2, kPruned = 3 };

inline constexpr int32_t kHighSide = 0, kLowSide = 1;
TKV_HD constexpr int32_t side_of(BodyTier tier) {
  return tier == BodyTier::kLow ? kLowSide : kHighSide;
}
TKV_HD constexpr bool is_kept(BodyTier tier) {
  return tier == BodyTier::kHigh || tier == BodyTier::kLow;
}

// What the allocator counts of a side with `tokens` tokens.
inline constexpr int32_t kFullPage = 2;
TKV_HD constexpr int32_t page_units(int32_t tokens, int32_t tokens_per_page) {
  return kFullPage * (tokens / tokens_per_page) + (tokens % tokens_per_page != 0 ? 1 : 0);
}

struct alignas(16) TiersRow {
  int32_t tokens[2] = {0, 0};  // by side
  LogMean mean;                // of importances that queries gave which were counted
  int64_t unused = 0;
};
static_assert(sizeof(TiersRow) == 32, "a multiple of 16");

// The map of positions before `end`: a multiple of 16.
TKV_HD constexpr int32_t bytes_of_map(int32_t end) {
  return (end + 63) / 64 * 16;
}

struct TiersShape {
  int32_t num_kv_heads = 0;
  int32_t map_bytes = 0;  // of a row

  TiersShape() = default;
  TiersShape(int32_t kv_heads, int32_t max_tokens)
      : num_kv_heads(kv_heads), map_bytes(bytes_of_map(max_tokens)) {}
  TKV_HD constexpr int64_t row_byte(int32_t kv_head) const {
    return int64_t{kv_head} * (static_cast<int32_t>(sizeof(TiersRow)) + map_bytes);
  }
  TKV_HD constexpr int64_t map_byte(int32_t kv_head) const {
    return row_byte(kv_head) + static_cast<int32_t>(sizeof(TiersRow));
  }
  TKV_HD constexpr int64_t state_bytes() const { return row_byte(num_kv_heads); }
};

TKV_HD BodyTier tier_at(const uint8_t* map, int32_t position) {
  return static_cast<BodyTier>(map[position / 4] >> 2 * (position % 4) & 3);
}
TKV_HD void set_tier(uint8_t* map, int32_t position, BodyTier tier) {
  const int32_t shift = 2 * (position % 4);
  const uint32_t others = map[position / 4] & ~(3u << shift);
  map[position / 4] = static_cast<uint8_t>(others | static_cast<uint32_t>(tier) << shift);
}

// u >= high: high; u >= low: low; else pruned.
struct Alphas {
  double high = 1, low = 0;
};

// The formats of a class of heads.
struct RowClass {
  PageLayout layout[2];    // by side
  StepRule rule[2][2];     // by side and component
  int32_t token_bytes[2];  // codes and metadata
  Alphas alphas;
};

// What the allocator counts of a row.
TKV_HD SideCounts units_of(const RowClass& row_class, const TiersRow& row) {
  return {{page_units(row.tokens[0], row_class.layout[0].tokens),
           page_units(row.tokens[1], row_class.layout[1].tokens)}};
}

// What kernels know of a format.
struct TiersCodes {
  static constexpr int32_t kMostClasses = 5;  // four of the format, and raw
  TiersShape shape;
  RowClass classes[kMostClasses];
  const uint8_t* class_of_head = nullptr;  // device [num_layers * num_kv_heads]
  Rotation rotation[3];                    // by component; the last one is off
  // Device [num_layers * num_kv_heads, head_dim], taken off keys; null: none.
  const float* key_means = nullptr;
};

// The tier of the token at `position`, which leaves the window.
TKV_HD BodyTier tier_of(const Alphas& alphas, const Importance& known, int32_t position,
                        const LogMean& mean) {
  const double u = relative_importance(known, position, mean);
  return u >= alphas.high ? BodyTier::kHigh : u < alphas.low ? BodyTier::kPruned : BodyTier::kLow;
}

// The same, and what `row` keeps of importances changes, so tokens are asked for in order.
TKV_HD BodyTier decide_tier(const Alphas& alphas, const Importance& known, int32_t position,
                            TiersRow* row) {
  if (is_averaged(known)) row->mean.add(log_mean_of(known.value));
  return tier_of(alphas, known, position, row->mean);
}

// A map by words of 16 positions. Bits 2 i of the result: position i has this tier.
inline constexpr int32_t kWordPositions = 16;
TKV_HD constexpr uint32_t positions_of(uint32_t word, BodyTier tier) {
  const uint32_t low = word & 0x55555555u, high = word >> 1 & 0x55555555u;
  return tier == BodyTier::kHigh ? low & ~high : tier == BodyTier::kLow ? high & ~low : low & high;
}
// Both bits of the positions [first, end) of a word; both may lie outside it.
TKV_HD constexpr uint32_t word_mask(int32_t first, int32_t end) {
  const uint32_t before_end = end >= kWordPositions ? ~0u : end <= 0 ? 0u : (1u << 2 * end) - 1;
  const uint32_t before = first >= kWordPositions ? ~0u : first <= 0 ? 0u : (1u << 2 * first) - 1;
  return before_end & ~before;
}
// Bit i of the lower half to bit 2 i.
TKV_HD constexpr uint32_t spread_bits(uint32_t x) {
  x &= 0xffffu;
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  x = (x | x << 2) & 0x33333333u;
  return (x | x << 1) & 0x55555555u;
}

}  // namespace tierkv::store
