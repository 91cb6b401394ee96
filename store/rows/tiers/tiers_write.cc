// SPDX-License-Identifier: Apache-2.0
// Tokens that leave the window: their tiers, then their bytes.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec/host/page_codec_checks.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

constexpr int32_t kTokensAtOnce = 256;

}  // namespace

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
      work.tokens->read(c, kv_head, draft->position + at, count, to.data());
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
        if (Status s = append_tokens(run.page, run.slot, batch); !s) return s;
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
        const BodyTier tier = decide_tier(alphas, work.tokens->importance(h, p), p, &draft.row);
        if (is_kept(tier)) ++draft.row.tokens[side_of(tier)];
        draft.tiers.push_back(tier);
      }
      if (Status s = encode(work, h, &draft); !s) {
        return s.with_context("layer " + std::to_string(work.layer.layer) + ", kv_head " +
                              std::to_string(h));
      }
      layer.tokens.push_back(units_of(work.layer.layer, h, draft.row));
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

void TiersRows::write(const std::vector<HostLayer>& layers, const BodyPlan& plan) {
  const auto& tiers = static_cast<const TiersPlan&>(plan);
  for (size_t i = 0; i < tiers.rows.size(); ++i) {
    const HostLayer& layer = layers[i / shape_.num_kv_heads];
    const auto h = static_cast<int32_t>(i % shape_.num_kv_heads);
    const RowDraft& draft = tiers.rows[i];
    for (int32_t side = 0; side < 2; ++side) write_side(layer, h, side, draft.sides[side]);
    write_state(layer, h, draft);
  }
}

void TiersRows::write_state(const HostLayer& layer, int32_t kv_head, const RowDraft& draft) const {
  row_state(layer, kv_head) = draft.row;
  for (size_t t = 0; t < draft.tiers.size(); ++t) {
    set_tier(map_of(layer, kv_head), draft.position + static_cast<int32_t>(t), draft.tiers[t]);
  }
}

}  // namespace tierkv::store
