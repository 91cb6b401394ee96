// Tokens that leave the window: their tiers, then their bytes.
#include <algorithm>
#include <string>
#include <utility>

#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

constexpr int32_t kTokensAtOnce = 256;

}  // namespace

template <class Put>
Status TiersRows::encode(const BodyWork& work, int32_t kv_head, const std::vector<BodyTier>& tiers,
                         Put&& put) const {
  const int32_t dim = config_.layout.head_dim, first = body_first(work.layer.at);
  std::vector<float> x[2];
  for (int32_t at = 0; at < static_cast<int32_t>(tiers.size()); at += kTokensAtOnce) {
    const int32_t count = std::min(kTokensAtOnce, static_cast<int32_t>(tiers.size()) - at);
    for (const Component c : {Component::kKey, Component::kValue}) {
      std::vector<float>& to = x[static_cast<int32_t>(c)];
      to.resize(int64_t{count} * dim);
      work.tokens->read(c, kv_head, first + at, count, to.data());
      const Basis* rotated = basis(c, work.layer.layer, kv_head);
      if (rotated != nullptr) rotated->apply(to.data(), count);
    }
    std::vector<int32_t> rows[2];
    for (int32_t i = 0; i < count; ++i) {
      if (is_kept(tiers[at + i])) rows[side_of(tiers[at + i])].push_back(i);
    }
    for (int32_t side = 0; side < 2; ++side) {
      TokenBatch batch;
      batch.k = x[0].data();
      batch.v = x[1].data();
      batch.rows = rows[side].data();
      batch.count = static_cast<int32_t>(rows[side].size());
      batch.dtype = DType::kFloat32;
      if (Status s = put(side, batch); !s) return s;
    }
  }
  return Status::ok();
}

// Whether the formats can hold the tokens, by writing them to a page that nobody reads.
Status TiersRows::check(const BodyWork& work, int32_t kv_head,
                        const std::vector<BodyTier>& tiers) const {
  const RowClass& c = row_class(work.layer.layer, kv_head);
  std::vector<uint8_t> bytes(sizes_.page_bytes + kPageAlignment);
  const auto address = reinterpret_cast<uintptr_t>(bytes.data());
  uint8_t* scratch = bytes.data() + (kPageAlignment - address % kPageAlignment) % kPageAlignment;
  return encode(work, kv_head, tiers, [&](int32_t side, TokenBatch batch) {
    const int32_t all = batch.count, per_page = c.layout[side].tokens;
    Status s;
    for (int32_t done = 0; s && done < all; done += batch.count, batch.rows += batch.count) {
      batch.count = std::min(per_page, all - done);
      s = append_tokens(page_at(c, side, scratch), 0, batch);
    }
    return s;
  });
}

Result<std::unique_ptr<BodyPlan>> TiersRows::plan(const std::vector<BodyWork>& works) {
  auto plan = std::make_unique<TiersPlan>();
  for (const BodyWork& work : works) {
    LayerPlan layer;
    for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
      RowDraft draft;
      draft.row = row_state(work.layer, h);
      const RowClass& c = row_class(work.layer.layer, h);
      for (int32_t p = body_first(work.layer.at); p < work.body_end; ++p) {
        const BodyTier tier = decide_tier(c.alphas, work.tokens->importance(h, p), p, &draft.row);
        if (is_kept(tier)) ++draft.row.tokens[side_of(tier)];
        draft.tiers.push_back(tier);
      }
      if (Status s = check(work, h, draft.tiers); !s) {
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

void TiersRows::write_map(const HostLayer& layer, int32_t kv_head, int32_t first,
                          const RowDraft& draft) {
  row_state(layer, kv_head) = draft.row;
  for (size_t i = 0; i < draft.tiers.size(); ++i) {
    set_tier(map_of(layer, kv_head), first + static_cast<int32_t>(i), draft.tiers[i]);
  }
}

void TiersRows::write(const std::vector<BodyWork>& works, const BodyPlan& plan) {
  const auto& drafts = static_cast<const TiersPlan&>(plan).rows;
  for (size_t i = 0; i < drafts.size(); ++i) {
    const BodyWork& work = works[i / shape_.num_kv_heads];
    const auto h = static_cast<int32_t>(i % shape_.num_kv_heads);
    TiersRow at = row_state(work.layer, h);
    (void)encode(work, h, drafts[i].tiers, [&](int32_t side, TokenBatch batch) {
      const int32_t all = batch.count;
      for (int32_t done = 0; done < all; done += batch.count, batch.rows += batch.count) {
        const PageRun run = page_run(work.layer, h, side, at.tokens[side], all - done);
        batch.count = run.count;
        (void)append_tokens(run.page, run.slot, batch);
        at.tokens[side] += run.count;
      }
      return Status::ok();
    });
    write_map(work.layer, h, body_first(work.layer.at), drafts[i]);
  }
}

}  // namespace tierkv::store
