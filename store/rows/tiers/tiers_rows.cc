// SPDX-License-Identifier: Apache-2.0
#include "store/rows/tiers/tiers_rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"

namespace tierkv::store {
namespace {

// The share of tokens in the high tier that estimates assume.
constexpr double kTypicalHigh = 0.3;

// The tokens of positions [first, end) by side, and of which row each is.
struct SideRows {
  std::vector<int32_t> rows[2];
};
SideRows rows_by_side(const uint8_t* map, int32_t first, int32_t end) {
  SideRows sides;
  for (int32_t p = first; p < end; ++p) {
    const BodyTier tier = tier_at(map, p);
    if (is_kept(tier)) sides.rows[side_of(tier)].push_back(p - first);
  }
  return sides;
}

}  // namespace

int64_t TiersRows::row_pages(int32_t layer, int32_t kv_head, int32_t tokens, bool at_most) const {
  const RowClass& c = row_class(layer, kv_head);
  const int32_t high_page = c.layout[kHighSide].tokens, low_page = c.layout[kLowSide].tokens;
  if (c.alphas.high <= 0) return pages_for(tokens, high_page);
  if (at_most) return worst_case_pages(tokens, high_page, low_page);
  const auto high = static_cast<int32_t>(kTypicalHigh * tokens);
  return pages_for(high, high_page) + pages_for(tokens - high, low_page);
}

int64_t TiersRows::layer_pages(int32_t layer, int32_t tokens, bool at_most) const {
  const int32_t body = std::max(0, tokens - config_.window_tokens - config_.sink_tokens);
  int64_t pages = 0;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) pages += row_pages(layer, h, body, at_most);
  return pages;
}

const Basis* TiersRows::basis(Component c, int32_t layer, int32_t kv_head) const {
  const std::vector<Basis>& all = bases(c);
  if (all.empty() || row_class(layer, kv_head).layout[0].k_tile.type.is_raw()) return nullptr;
  return &all[layer * shape_.num_kv_heads + kv_head];
}

TiersRow TiersRows::counts_before(const HostLayer& layer, int32_t kv_head, int32_t end) const {
  TiersRow row = row_state(layer, kv_head);
  row.tokens[0] = row.tokens[1] = 0;
  const uint8_t* map = map_of(layer, kv_head);
  for (int32_t p = 0; p < end; ++p) {
    const BodyTier tier = tier_at(map, p);
    if (is_kept(tier)) ++row.tokens[side_of(tier)];
  }
  return row;
}

SideCounts TiersRows::units_of(int32_t layer, int32_t kv_head, const TiersRow& row) const {
  const RowClass& c = row_class(layer, kv_head);
  SideCounts units;
  for (int32_t side = 0; side < 2; ++side) {
    units.of[side] = page_units(row.tokens[side], c.layout[side].tokens);
  }
  return units;
}

HostPage TiersRows::page_at(const RowClass& c, int32_t side, uint8_t* bytes) const {
  return {bytes, c.layout[side], DType::kFloat16, {c.rule[side][0], c.rule[side][1]}};
}

TiersRows::PageRun TiersRows::page_run(const HostLayer& layer, int32_t kv_head, int32_t side,
                                       int32_t token, int32_t count) const {
  const RowClass& c = row_class(layer.layer, kv_head);
  const int32_t per_page = c.layout[side].tokens;
  const int32_t row = pages_.row(layer.slot, layer.layer, kv_head);
  PageRun run;
  run.page = page_at(c, side, pages_.bytes(pages_.page(row, side, token / per_page)));
  run.slot = token % per_page;
  run.count = std::min(count, per_page - run.slot);
  return run;
}

void TiersRows::read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k,
                     float* v, uint8_t* pruned) const {
  const int32_t dim = config_.layout.head_dim;
  const uint8_t* map = map_of(layer, kv_head);
  const TiersRow before = counts_before(layer, kv_head, first);
  const SideRows sides = rows_by_side(map, first, end);
  for (int32_t side = 0; side < 2; ++side) {
    const std::vector<int32_t>& rows = sides.rows[side];
    for (int32_t done = 0; done < static_cast<int32_t>(rows.size());) {
      const PageRun run = page_run(layer, kv_head, side, before.tokens[side] + done,
                                   static_cast<int32_t>(rows.size()) - done);
      TokenOutput out;
      out.k = k;
      out.v = v;
      out.rows = rows.data() + done;
      out.count = run.count;
      (void)decode_tokens(run.page, run.slot, out);
      done += run.count;
    }
  }
  for (int32_t p = first; p < end; ++p) {
    const int64_t at = int64_t{p - first} * dim;
    const bool is_there = is_kept(tier_at(map, p));
    for (const Component c : {Component::kKey, Component::kValue}) {
      float* x = (c == Component::kKey ? k : v) + at;
      if (!is_there) {
        std::fill(x, x + dim, 0.0f);
      } else if (const Basis* rotated = basis(c, layer.layer, kv_head)) {
        rotated->undo(x, 1);
      }
    }
    if (pruned != nullptr && !is_there) pruned[p - first] = 1;
  }
}

void TiersRows::read_decided(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end,
                             RawScore* scores) const {
  const uint8_t* map = map_of(layer, kv_head);
  for (int32_t p = first; p < end; ++p) {
    const BodyTier tier = tier_at(map, p);
    scores[p - first] = {bits_float(static_cast<uint32_t>(tier)),
                         is_kept(tier) ? RawScore::kDecided : RawScore::kPruned};
  }
}

std::vector<SideCounts> TiersRows::cut_counts(const HostLayer& layer, int32_t body_end) const {
  std::vector<SideCounts> counts;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    counts.push_back(units_of(layer.layer, h, counts_before(layer, h, body_end)));
  }
  return counts;
}

// Slots behind the tokens that stay are empty again, as in pages that never held more.
void TiersRows::cut(const HostLayer& layer, int32_t body_end) {
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    const TiersRow now = row_state(layer, h), row = counts_before(layer, h, body_end);
    row_state(layer, h) = row;
    for (int32_t side = 0; side < 2; ++side) {
      const int32_t n = row.tokens[side], end = (n + kTileTokens - 1) / kTileTokens * kTileTokens;
      for (int32_t t = n; t < std::min(end, now.tokens[side]); ++t) {
        const PageRun run = page_run(layer, h, side, t, 1);
        (void)clear_token(run.page, run.slot);
      }
    }
  }
}

int64_t TiersRows::nominal_bytes(const HostLayer& layer) const {
  int64_t bytes = 0;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    const RowClass& c = row_class(layer.layer, h);
    const TiersRow& row = row_state(layer, h);
    for (int32_t side = 0; side < 2; ++side) {
      bytes += int64_t{row.tokens[side]} * c.token_bytes[side];
    }
    bytes += (std::max(0, layer.at.body_end - config_.sink_tokens) + 3) / 4;
  }
  return bytes;
}

}  // namespace tierkv::store
