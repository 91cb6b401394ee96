// SPDX-License-Identifier: Apache-2.0
#include "store/rows/tiers/tiers_rows.h"
#include "store/place/place.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
#include "codec/host/page_codec.h"

namespace tierkv::store {
namespace {

// The share of tokens in the high tier that estimates assume.
constexpr double kTypicalHigh = 0.3;
constexpr int32_t kTokensAtOnce = 256;  // that are encoded

// Names the token for which append_tokens() has refused a batch, whose row 0 is position `first`.
// Tokens are finite, so all that a page refuses of them is their range.
Status failure_of(const HostPage& page, int32_t slot, TokenBatch batch, int32_t first) {
  const int32_t* const end = batch.rows + std::exchange(batch.count, 1);
  while (batch.rows + 1 < end && append_tokens(page, slot, batch)) ++batch.rows, ++slot;
  return Status(StatusCode::kOutOfRange, "position " + std::to_string(first + *batch.rows) +
                                             ": a key or value is beyond the format's range");
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
  std::vector<int32_t> rows_of[2];  // by side: what rows of the result its tokens are
  for (int32_t p = first; p < end; ++p) {
    const BodyTier tier = tier_at(map, p);
    if (is_kept(tier)) rows_of[side_of(tier)].push_back(p - first);
  }
  for (int32_t side = 0; side < 2; ++side) {
    const std::vector<int32_t>& rows = rows_of[side];
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

std::vector<SideCounts> TiersRows::cut_counts(const HostLayer& layer, int32_t body_end) const {
  std::vector<SideCounts> counts;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    counts.push_back(units_of(row_class(layer.layer, h), counts_before(layer, h, body_end)));
  }
  return counts;
}

// Slots behind the tokens that stay are empty again, as in pages that never held more.
void TiersRows::cut(const HostLayer& layer, int32_t body_end) {
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    const TiersRow now = row_state(layer, h), row = counts_before(layer, h, body_end);
    row_state(layer, h) = row;
    for (int32_t side = 0; side < 2; ++side) {
      clear_slots(layer, h, side, row.tokens[side], now.tokens[side]);
    }
  }
}

void TiersRows::clear_slots(const HostLayer& layer, int32_t kv_head, int32_t side, int32_t token,
                            int32_t end) const {
  for (int32_t t = token; t < end && t % kTileTokens != 0; ++t) {
    const PageRun run = page_run(layer, kv_head, side, t, 1);
    (void)clear_token(run.page, run.slot);
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

// ---- tokens that leave the window: their tiers, then their bytes ----

TiersRows::RowDraft TiersRows::draft_behind(const TiersRow& row, int32_t position) const {
  RowDraft draft;
  draft.row = row;
  draft.position = position;
  for (int32_t side = 0; side < 2; ++side) {
    draft.sides[side].first = draft.sides[side].end = row.tokens[side];
  }
  return draft;
}

TiersRows::PageRun TiersRows::stage(const RowClass& c, int32_t side, int32_t count,
                                    StagedSide* staged) const {
  const int32_t per_page = c.layout[side].tokens;
  const int64_t page = staged->end / per_page - staged->first / per_page;
  staged->bytes.resize((page + 1) * sizes_.page_bytes / kPageAlignment);
  PageRun run;
  run.page = page_at(c, side, staged->bytes[page * sizes_.page_bytes / kPageAlignment].bytes);
  run.slot = staged->end % per_page;
  run.count = std::min(count, per_page - run.slot);
  staged->end += run.count;
  return run;
}

// kOutOfRange for what a format cannot hold.
Status TiersRows::encode(const BodyWork& work, int32_t kv_head, RowDraft* draft) const {
  const int32_t dim = config_.layout.head_dim, layer = work.layer.layer;
  const auto all = static_cast<int32_t>(draft->tiers.size());
  std::vector<float> x[2];
  for (int32_t at = 0; at < all; at += kTokensAtOnce) {
    const int32_t count = std::min(kTokensAtOnce, all - at);
    for (const Component c : {Component::kKey, Component::kValue}) {
      std::vector<float>& to = x[static_cast<int32_t>(c)];
      to.resize(int64_t{count} * dim);
      work.tokens[kv_head].read(c, draft->position + at, count, to.data());
      const Basis* rotated = basis(c, layer, kv_head);
      if (rotated != nullptr) rotated->apply(to.data(), count);
    }
    std::vector<int32_t> rows[2];
    for (int32_t i = 0; i < count; ++i) {
      const BodyTier tier = draft->tiers[at + i];
      if (is_kept(tier)) rows[side_of(tier)].push_back(i);
    }
    for (int32_t side = 0; side < 2; ++side) {
      TokenBatch batch;
      batch.k = x[0].data();
      batch.v = x[1].data();
      batch.rows = rows[side].data();
      batch.dtype = DType::kFloat32;
      for (auto left = static_cast<int32_t>(rows[side].size()); left > 0; left -= batch.count) {
        const PageRun run = stage(row_class(layer, kv_head), side, left, &draft->sides[side]);
        batch.count = run.count;
        if (Status s = append_tokens(run.page, run.slot, batch); !s) {
          return failure_of(run.page, run.slot, batch, draft->position + at);
        }
        batch.rows += run.count;
      }
    }
  }
  return Status::ok();
}

Result<std::unique_ptr<BodyPlan>> TiersRows::plan(const std::vector<BodyWork>& works) {
  auto plan = std::make_unique<TiersPlan>();
  for (const BodyWork& work : works) {
    LayerPlan layer;
    for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
      const int32_t first = most(work.layer.at.body_end, config_.sink_tokens);
      RowDraft draft = draft_behind(row_state(work.layer, h), first);
      const Alphas& alphas = row_class(work.layer.layer, h).alphas;
      for (int32_t p = first; p < work.body_end; ++p) {
        const BodyTier tier = decide_tier(alphas, work.tokens[h].importance(p), p, &draft.row);
        if (is_kept(tier)) ++draft.row.tokens[side_of(tier)];
        draft.tiers.push_back(tier);
      }
      if (Status s = encode(work, h, &draft); !s) {
        return s.with_context(name_of(work.layer.id()) + ", layer " +
                              std::to_string(work.layer.layer) + ", kv_head " + std::to_string(h));
      }
      layer.tokens.push_back(units_of(row_class(work.layer.layer, h), draft.row));
      plan->rows.push_back(std::move(draft));
    }
    plan->layers.push_back(std::move(layer));
  }
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

// Whole pages at once, the tokens of a page that is continued one by one.
void TiersRows::write_side(const HostLayer& layer, int32_t kv_head, int32_t side,
                           const StagedSide& staged) const {
  const RowClass& c = row_class(layer.layer, kv_head);
  const int32_t per_page = c.layout[side].tokens;
  const StagedBlock* block = staged.bytes.data();
  for (int32_t t = staged.first; t < staged.end;) {
    const PageRun to = page_run(layer, kv_head, side, t, staged.end - t);
    if (to.slot == 0) {
      std::memcpy(to.page.bytes, block->bytes, static_cast<size_t>(c.layout[side].scores));
    } else {
      // A page is read through the type that writes it.
      const HostPage from = page_at(c, side, const_cast<uint8_t*>(block->bytes));
      for (int32_t slot = to.slot; slot < to.slot + to.count; ++slot) {
        TokenCodes token;
        load_token(from, slot, &token);
        if (slot % kTileTokens == 0) clear_tile(to.page, slot / kTileTokens);
        store_token(to.page, slot, token);
      }
    }
    t += per_page - t % per_page;
    block += sizes_.page_bytes / kPageAlignment;
  }
}

PageRanges TiersRows::place(const HostLayer& layer, BodyPlan& plan, size_t work) {
  const RowDraft* drafts = static_cast<TiersPlan&>(plan).rows.data() + work * shape_.num_kv_heads;
  PageRanges ranges;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    for (int32_t side = 0; side < 2; ++side) {
      const StagedSide& staged = drafts[h].sides[side];
      if (staged.tiles != nullptr) {
        place_side(layer, h, side, staged, &ranges);
      } else {
        write_side(layer, h, side, staged);
      }
    }
    write_state(layer, h, drafts[h]);
  }
  return ranges;
}

void TiersRows::write_state(const HostLayer& layer, int32_t kv_head, const RowDraft& draft) const {
  row_state(layer, kv_head) = draft.row;
  if (draft.map != nullptr) {
    std::copy_n(draft.map, bytes_of_map(draft.position), map_of(layer, kv_head));
  }
  for (size_t t = 0; t < draft.tiers.size(); ++t) {
    set_tier(map_of(layer, kv_head), draft.position + static_cast<int32_t>(t), draft.tiers[t]);
  }
}

}  // namespace tierkv::store
