// SPDX-License-Identifier: Apache-2.0
// How tokens that leave the window become blocks on pages.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/same_log.h"
#include "store/place/place.h"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {

Result<std::unique_ptr<BodyPlan>> CodedRows::plan(const std::vector<BodyWork>& works) {
  auto plan = std::make_unique<CodedPlan>();
  for (const BodyWork& work : works) {
    LayerDraft draft;
    if (Status s = this->draft(work, plan.get(), &draft); !s) {
      return s.with_context(name_of(work.layer.id()) + ", layer " +
                            std::to_string(work.layer.layer));
    }
    add_layer_plan(work.layer, &draft, plan.get());
    plan->drafts.push_back(std::move(draft));
  }
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

Status CodedRows::draft(const BodyWork& work, CodedPlan* plan, LayerDraft* draft) const {
  const int32_t layer = work.layer.layer, heads = shape_.num_kv_heads;
  draft->first_block = work.layer.at.body_end / kBlockTokens;
  draft->end_block = block_count(work.body_end);
  draft->fixed = is_fixed(work.layer);
  for (int32_t h = 0; h < heads; ++h) {
    draft->rows.push_back(*state_at<CodedRowState>(work.layer, shape_.row_byte(h)));
    const auto* means = state_at<uint16_t>(work.layer, shape_.means_byte(h));
    draft->means.emplace_back(means, means + shape_.head_dim);
  }
  if (!is_raw_layer(layer) && !draft->fixed) {
    const bool ready = find_books(layer, *plan) != nullptr && !needs_tokens(layer);
    if (ready || work.body_end >= kSampleBlocks * kBlockTokens) {
      if (Status s = fix(work, plan, draft); !s) return s;
    }
  }
  return draft_blocks(work, draft->fixed ? find_books(layer, *plan) : nullptr, draft);
}

Status CodedRows::draft_blocks(const BodyWork& work, const LayerBooks* books,
                               LayerDraft* draft) const {
  std::vector<WeightedRow> rows;
  for (int32_t h = 0; books != nullptr && h < shape_.num_kv_heads; ++h) {
    rows.push_back(row_of(work.layer.layer, h, draft->rows[h], draft->means[h].data()));
  }
  BlockTokens tokens;
  BlockCodes codes;
  for (int32_t b = draft->first_block; b < draft->end_block; ++b) {
    for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
      gather(work, h, b, &draft->rows[h], &tokens);
      if (books == nullptr) {
        draft->blocks.push_back(raw_block(tokens, Component::kKey));
        draft->blocks.push_back(raw_block(tokens, Component::kValue));
        continue;
      }
      Status s = quantize(rows[h], tokens, &codes);
      if (s) s = prepend(work, h, b, &codes);
      if (s) s = encode(*books, h, shape_.tokens_of(b, work.body_end), codes, draft);
      if (!s) return s.with_context("kv_head " + std::to_string(h));
    }
  }
  return Status::ok();
}

// All blocks so far are coded, those that were raw too.
Status CodedRows::fix(const BodyWork& work, CodedPlan* plan, LayerDraft* draft) const {
  const int32_t layer = work.layer.layer, blocks = least(kSampleBlocks, draft->end_block);
  const bool make_books = find_books(layer, *plan) == nullptr;
  std::vector<BlockTokens> tokens(static_cast<size_t>(shape_.num_kv_heads) * blocks);
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    CodedRowState state = draft->rows[h];
    for (int32_t b = 0; b < blocks; ++b) gather(work, h, b, &state, &tokens[h * blocks + b]);
  }
  std::vector<WeightedRow> rows;
  LayerBooks books;
  if (Status s = fit_layer(layer, tokens, &rows, make_books ? &books : nullptr); !s) return s;
  if (make_books) plan->made[layer] = std::move(books);
  for (size_t h = 0; h < rows.size(); ++h) {
    draft->rows[h].key_step = rows[h].key_step;
    draft->rows[h].value_step = rows[h].value_step;
    draft->means[h] = std::move(rows[h].key_mean);
  }
  draft->fixed = true;
  draft->first_block = 0;
  return Status::ok();
}

Status CodedRows::fit_layer(int32_t layer, const std::vector<BlockTokens>& tokens,
                            std::vector<WeightedRow>* rows, LayerBooks* books) const {
  const size_t blocks = tokens.size() / shape_.num_kv_heads;
  std::vector<BlockCodes> samples(shape_.num_kv_heads);
  std::vector<RowCodes> sample[2];
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    const BlockTokens* own = tokens.data() + h * blocks;
    std::vector<float> keys;
    for (size_t b = 0; b < blocks; ++b) {
      keys.insert(keys.end(), own[b].x[0].begin(), own[b].x[0].end());
    }
    Result<WeightedRow> row = fit_row(layer, h, keys);
    Status s = row.status();
    for (size_t b = 0; s && books != nullptr && b < blocks; ++b) {
      BlockCodes codes;
      s = quantize(*row, own[b], &codes);
      for (int32_t c = 0; c < 2; ++c) {
        std::vector<int16_t>& all = samples[h].codes[c];
        all.insert(all.end(), codes.codes[c].begin(), codes.codes[c].end());
      }
    }
    if (!s) return s.with_context("kv_head " + std::to_string(h));
    for (int32_t c = 0; c < 2; ++c) {
      const auto count = static_cast<int64_t>(samples[h].codes[c].size()) / shape_.head_dim;
      sample[c].push_back({samples[h].codes[c].data(), count});
    }
    rows->push_back(std::move(*row));
  }
  if (books == nullptr) return Status::ok();
  Result<LayerBooks> made = make_layer_books(format_, shape_.head_dim, sample);
  if (made) *books = std::move(*made);
  return made.status();
}

Result<WeightedRow> CodedRows::fit_row(int32_t layer, int32_t kv_head,
                                       const std::vector<float>& keys) const {
  WeightedTokens tokens;
  tokens.x = keys.data();
  tokens.tokens = static_cast<int32_t>(keys.size()) / shape_.head_dim;
  tokens.first_position = shape_.first_of(0);
  return fit_weighted_row(fit_of(start(layer, kv_head)), shape_.head_dim, tokens, rope(layer));
}

void CodedRows::gather(const BodyWork& work, int32_t kv_head, int32_t block, CodedRowState* state,
                       BlockTokens* out) const {
  const int32_t dim = shape_.head_dim, on_pages = work.layer.at.body_end;
  const int32_t end = shape_.end_of(block, work.body_end);
  const bool fixed = is_fixed(work.layer);
  out->first = fixed ? most(shape_.first_of(block), on_pages) : shape_.first_of(block);
  out->count = end - out->first;
  out->importance.assign(out->count, 0);
  out->decided.assign(out->count, {});
  for (std::vector<float>& x : out->x) x.resize(static_cast<size_t>(out->count) * dim);
  const int32_t waited = most(0, least(end, on_pages) - out->first);  // in a raw block
  for (const Component c : {Component::kKey, Component::kValue}) {
    float* x = out->x[static_cast<int32_t>(c)].data();
    if (waited > 0) {
      const uint8_t* bytes = block_bytes(refs(work.layer, kv_head, c)[block]);
      read_raw_tiles(c, waited, dim, bytes + kBlockTokens, x);
      std::memcpy(out->importance.data(), bytes, waited);
    }
    work.tokens[kv_head].read(c, out->first + waited, out->count - waited,
                              x + int64_t{waited} * dim);
  }
  if (is_raw_layer(work.layer.layer)) return;
  for (int32_t p = out->first + waited; p < end;) {
    const int32_t next = least(end, (p / kTileTokens + 1) * kTileTokens);
    decide(work.tokens[kv_head], {p, next}, state, out);
    p = next;
  }
}

void CodedRows::decide(const RawTokens& tokens, Positions range, CodedRowState* state,
                       BlockTokens* out) const {
  Importance known[kTileTokens];
  for (int32_t p = range.first; p < range.end; ++p) {
    Importance& of = known[p - range.first] = tokens.importance(p);
    if (is_averaged(of)) state->mean.add(log_mean_of(of.value));
  }
  for (int32_t p = range.first; p < range.end; ++p) {
    DecidedExponents& decided = out->decided[p - out->first];
    decided = decide_exponents(known[p - range.first], p, state->mean);
    out->importance[p - out->first] = static_cast<int8_t>(decided.importance);
  }
}

Status CodedRows::prepend(const BodyWork& work, int32_t kv_head, int32_t block,
                          BlockCodes* codes) const {
  const Positions coded = {shape_.first_of(block), shape_.end_of(block, work.layer.at.body_end)};
  if (!is_fixed(work.layer) || coded.count() <= 0) return Status::ok();
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    std::vector<int16_t> old_codes(static_cast<size_t>(coded.count()) * shape_.head_dim);
    std::vector<int8_t> old_exponents(coded.count());
    const CodedBlockRef ref = refs(work.layer, kv_head, c)[block];
    const BlockTarget target = {old_codes.data(), old_exponents.data(), coded.count(),
                                shape_.head_dim};
    Status s = decode_block(block_bytes(ref), int64_t{ref.units} * kUnitBytes,
                            books_[work.layer.layer].family(c).books, target);
    if (!s) return s;
    codes->codes[i].insert(codes->codes[i].begin(), old_codes.begin(), old_codes.end());
    codes->exponents[i].insert(codes->exponents[i].begin(), old_exponents.begin(),
                               old_exponents.end());
  }
  return Status::ok();
}

Status CodedRows::quantize(const WeightedRow& row, const BlockTokens& tokens,
                           BlockCodes* out) const {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    WeightedTokens x;
    x.x = tokens.x[i].data();
    x.tokens = tokens.count;
    x.first_position = tokens.first;
    std::vector<int8_t>& exponents = out->exponents[i];
    exponents.resize(tokens.count);
    out->codes[i].resize(tokens.x[i].size());
    Status s = token_exponents(c, x, shape_.head_dim, tokens.importance.data(), exponents.data());
    for (int32_t t = 0; t < tokens.count; ++t) {
      if (i == 1 && tokens.decided[t].has_value) {
        exponents[t] = static_cast<int8_t>(tokens.decided[t].value);
      }
    }
    if (s) s = quantize_weighted(row, c, x, exponents.data(), out->codes[i].data());
    if (!s) {
      return s.with_context((i == 0 ? "keys of positions " : "values of positions ") +
                            std::to_string(tokens.first) + " to " +
                            std::to_string(tokens.first + tokens.count - 1));
    }
  }
  return Status::ok();
}

Status CodedRows::encode(const LayerBooks& books, int32_t kv_head, int32_t count,
                         const BlockCodes& codes, LayerDraft* draft) const {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    const BlockContent block = {codes.codes[i].data(), codes.exponents[i].data(), count,
                                shape_.head_dim};
    draft->blocks.emplace_back();
    if (Status s = encode_block(block, books.family(c).books,
                                books.book_of(c, kv_head, shape_.head_dim), &draft->blocks.back());
        !s) {
      return s;
    }
  }
  return Status::ok();
}

std::vector<uint8_t> CodedRows::raw_block(const BlockTokens& tokens, Component c) const {
  std::vector<uint8_t> bytes(shape_.raw_block_bytes(tokens.count));
  std::memcpy(bytes.data(), tokens.importance.data(), tokens.importance.size());
  write_raw_tiles(c, tokens.count, shape_.head_dim, tokens.x[static_cast<int32_t>(c)].data(),
                  bytes.data() + kBlockTokens);
  return bytes;
}

void CodedRows::add_layer_plan(const HostLayer& layer, LayerDraft* draft, CodedPlan* plan) const {
  for (const std::vector<uint8_t>& block : draft->blocks) {
    draft->units.push_back(static_cast<uint32_t>(block.size() / kUnitBytes));
  }
  const int32_t used = place_blocks(draft->units, units_before(layer, draft->first_block),
                                    shape_.page_units, [](size_t, int32_t, int32_t) {});
  LayerPlan result = {{SideCounts{{used}}}};
  if (draft->first_block < block_count(layer.at.body_end)) {
    result.kept = cut_counts(layer, draft->first_block * kBlockTokens);
  }
  result.ranges.reserve(draft->units.size());
  plan->layers.push_back(std::move(result));
}

// A raw block begins with exponents.
PageRanges CodedRows::place(const HostLayer& layer, BodyPlan& plan, size_t work) {
  LayerDraft& draft = static_cast<CodedPlan&>(plan).drafts[work];
  *state_at<int32_t>(layer, shape_.fixed_byte()) = draft.fixed ? 1 : 0;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    *state_at<CodedRowState>(layer, shape_.row_byte(h)) = draft.rows[h];
    std::copy(draft.means[h].begin(), draft.means[h].end(),
              state_at<uint16_t>(layer, shape_.means_byte(h)));
  }
  PageRanges ranges = std::move(plan.layers[work].ranges);
  auto* const ends = state_at<uint32_t>(layer, shape_.ends_byte());
  CodedBlockRef* const refs = this->refs(layer, 0, Component::kKey);
  std::vector<const uint8_t*>& brought = draft.brought;
  const int32_t row = pages_.row(layer.slot, layer.layer, 0), per_block = 2 * shape_.num_kv_heads;
  int32_t b = draft.first_block, within = 0;
  const auto place_block = [&](size_t i, int32_t page, int32_t unit) {
    const uint32_t units = draft.units[i];
    const auto first = static_cast<uint32_t>(pages_.page(row, 0, page)) * shape_.page_units;
    const CodedBlockRef ref = {first + unit, units};
    const int64_t bytes = int64_t{units} * kUnitBytes;
    const uint8_t* const from =
        brought.empty() ? draft.blocks[i].data()
                        : std::exchange(brought[within / 2], brought[within / 2] + bytes);
    refs[int64_t{within} * shape_.max_blocks + b] = ref;
    ranges.push_back({from, block_bytes(ref), bytes});
    if (!draft.fixed) {
      ranges.back().keys = {kBlockTokens, static_cast<int32_t>(bytes), RangeCheck::kFinite};
    }
    ends[b] = static_cast<uint32_t>(page * shape_.page_units + unit) + units;
    if (++within == per_block) ++b, within = 0;
  };
  place_blocks(draft.units, units_before(layer, draft.first_block), shape_.page_units, place_block);
  return ranges;
}

void CodedRows::finish(BodyPlan& plan) {
  for (auto& [layer, books] : static_cast<CodedPlan&>(plan).made)
    set_books(layer, std::move(books));
}

}  // namespace tierkv::store
