// SPDX-License-Identifier: Apache-2.0
#include "store/rows/channel/channel_rows.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {
namespace {

// Pages are about this long: half of one a layer is open.
constexpr int64_t kPageTarget = 16384;

}  // namespace

ChannelRows::ChannelRows(const StoreConfig& config)
    : config_(config), is_raw_layer_(config.layout.num_layers) {
  for (const int32_t layer : config.raw_layers) is_raw_layer_[layer] = 1;
}

Status ChannelRows::prepare() {
  const auto& format = std::get<ChannelFormat>(config_.format);
  TierFormat tier = token_wise_tier(format.k_bits, format.v_bits);
  tier.k.unit = Unit::kChannel;
  tier.k.group = format.block_tokens;
  const Result<ChannelLayout> layout = make_channel_layout(tier, config_.layout.head_dim);
  if (!layout) return layout.status().with_context("format");
  layout_ = *layout;
  body_ = {layout_, config_.layout.num_kv_heads, 0};
  sizes_.unit_tokens = layout_.tokens;
  sizes_.ring_tokens =
      static_cast<int32_t>(round_up(config_.window_tokens + layout_.tokens - 1, kTileTokens));
  const int64_t largest = config_.raw_layers.empty() ? layout_.bytes : body_.raw_bytes();
  const int64_t blocks = std::max<int64_t>(1, kPageTarget / layout_.bytes);
  sizes_.page_bytes =
      config_.page_bytes != 0
          ? config_.page_bytes
          : std::max<int64_t>(blocks * layout_.bytes, round_up(largest, kPageAlignment));
  if (largest > sizes_.page_bytes)
    return invalid("page_bytes: a block takes " + std::to_string(largest));
  const Result<int32_t> slots = fit_table(config_.page_bytes == 0, &sizes_.page_bytes, [&] {
    // After a truncation inside the body all tokens may lie in it.
    const int32_t tokens = config_.max_tokens + config_.window_tokens;
    int64_t most_pages = 0;
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
      most_pages = std::max(most_pages, layer_pages(l, tokens, true));
    }
    return most_pages;
  });
  if (!slots) return slots.status();
  body_.page_bytes = sizes_.page_bytes;
  sizes_.most_pages = INT32_MAX / (sizes_.page_bytes / ChannelBody::kBlockUnit);
  sizes_.table.num_sides = 1;
  sizes_.table.tokens_per_page[0] = static_cast<int32_t>(sizes_.page_bytes / ChannelBody::kUnit);
  sizes_.table.table_slots[0] = *slots;
  return Status::ok();
}

int64_t ChannelRows::layer_pages(int32_t layer, int32_t tokens, bool) const {
  const int64_t blocks =
      int64_t{blocks_of(most(0, tokens - config_.window_tokens))} * config_.layout.num_kv_heads;
  const int64_t per_page = sizes_.page_bytes / block_bytes(layer);
  return (blocks + per_page - 1) / per_page;
}

uint8_t* ChannelRows::block_at(const HostLayer& layer, int32_t kv_head, int32_t block) const {
  const ChannelBody::BlockPlace at = body_.place_of(is_raw(layer.layer), kv_head, block);
  const int32_t row = pages_.row(layer.slot, layer.layer, 0);
  return pages_.bytes(pages_.page(row, 0, at.page)) + at.byte;
}

void ChannelRows::encode(int32_t layer, const float* k, const float* v, uint8_t* block) const {
  if (!is_raw(layer)) return encode_channel_block(layout_, k, v, block);
  const int32_t dim = config_.layout.head_dim;
  write_raw_tiles(Component::kKey, layout_.tokens, dim, k, block);
  write_raw_tiles(Component::kValue, layout_.tokens, dim, v, block + body_.raw_bytes() / 2);
}

void ChannelRows::decode(int32_t layer, const uint8_t* block, float* k, float* v) const {
  const int32_t dim = config_.layout.head_dim;
  if (is_raw(layer)) {
    read_raw_tiles(Component::kKey, layout_.tokens, dim, block, k);
    read_raw_tiles(Component::kValue, layout_.tokens, dim, block + body_.raw_bytes() / 2, v);
    return;
  }
  for (int32_t t = 0; t < layout_.tokens; ++t) {
    for (int32_t d = 0; d < dim; ++d) {
      *k++ = channel_value(layout_, block, Component::kKey, t, d);
      *v++ = channel_value(layout_, block, Component::kValue, t, d);
    }
  }
}

Result<std::unique_ptr<BodyPlan>> ChannelRows::plan(const std::vector<BodyWork>& works) {
  auto plan = std::make_unique<ChannelPlan>();
  const int32_t dim = config_.layout.head_dim, heads = config_.layout.num_kv_heads;
  std::vector<float> x[2];
  for (std::vector<float>& to : x) to.resize(static_cast<size_t>(layout_.tokens) * dim);
  for (const BodyWork& work : works) {
    const int32_t layer = work.layer.layer, end = blocks_of(work.body_end);
    const int32_t first = blocks_of(work.layer.at.body_end), count = end - first;
    const int32_t bytes = block_bytes(layer);
    LayerDraft draft = {first, end, std::vector<uint8_t>(int64_t{count} * heads * bytes), {}};
    for (int32_t h = 0; h < heads; ++h) {
      draft.from.push_back(draft.made.data() + int64_t{h} * count * bytes);
    }
    for (int32_t i = 0; i < count * heads; ++i) {
      const int32_t from = (first + i % count) * layout_.tokens;
      const int32_t skip = most(0, config_.sink_tokens - from);
      for (const Component c : {Component::kKey, Component::kValue}) {
        float* to = x[static_cast<int32_t>(c)].data();
        work.tokens[i / count].read(c, from + skip, layout_.tokens - skip,
                                    to + int64_t{skip} * dim);
        for (int32_t t = 0; t < skip; ++t) {
          std::copy_n(to + int64_t{skip} * dim, dim, to + int64_t{t} * dim);
        }
      }
      encode(layer, x[0].data(), x[1].data(), draft.made.data() + int64_t{i} * bytes);
    }
    plan->layers.push_back({counts_of(layer, end)});
    plan->layers.back().ranges.reserve(int64_t{count} * heads);
    plan->drafts.push_back(std::move(draft));
  }
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

// Codes of any bits are values where the parameters are finite.
PageRanges ChannelRows::place(const HostLayer& layer, BodyPlan& plan, size_t work) {
  const LayerDraft& draft = static_cast<ChannelPlan&>(plan).drafts[work];
  const int32_t bytes = block_bytes(layer.layer), values = layout_.v_metadata;
  PageRange range = {nullptr, nullptr, bytes, {0, bytes, RangeCheck::kFinite}};
  if (!is_raw(layer.layer)) {
    range.keys = {layout_.k_metadata, layout_.v_codes, RangeCheck::kFinite};
    range.values = {values, values + 4 * layout_.tokens, RangeCheck::kFinite};
  }
  PageRanges ranges = std::move(plan.layers[work].ranges);
  for (int32_t h = 0; h < config_.layout.num_kv_heads; ++h) {
    range.from = draft.from[h];
    for (int32_t b = draft.first; b < draft.end; ++b, range.from += bytes) {
      range.to = block_at(layer, h, b);
      ranges.push_back(range);
    }
  }
  return ranges;
}

void ChannelRows::read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end,
                       float* k, float* v, uint8_t* /*pruned*/) const {
  const int32_t dim = config_.layout.head_dim, tokens = layout_.tokens;
  std::vector<float> keys(static_cast<size_t>(tokens) * dim), values(keys.size());
  for (int32_t b = first / tokens; b * tokens < end; ++b) {
    decode(layer.layer, block_at(layer, kv_head, b), keys.data(), values.data());
    const int32_t from = most(first, b * tokens), to = least(end, (b + 1) * tokens);
    const int64_t skip = int64_t{from - b * tokens} * dim, at = int64_t{from - first} * dim;
    std::copy_n(keys.data() + skip, int64_t{to - from} * dim, k + at);
    std::copy_n(values.data() + skip, int64_t{to - from} * dim, v + at);
  }
}

std::vector<uint8_t> ChannelRows::identity() const {
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  const auto& format = std::get<ChannelFormat>(config_.format);
  for (const int32_t x : {format.k_bits, format.v_bits, format.block_tokens}) out.i32(x);
  return bytes;
}

// Blocks as they lie on pages.
ExportedBody ChannelRows::export_body(const HostLayer& layer, int32_t kv_head) const {
  ExportedBody body;
  for (int32_t b = 0; b < blocks_of(layer.at.body_end); ++b) {
    body.add(block_at(layer, kv_head, b), block_bytes(layer.layer));
  }
  return body;
}

Result<std::unique_ptr<BodyPlan>> ChannelRows::plan_import(const ImportWork& work) {
  auto plan = std::make_unique<ChannelPlan>();
  const int32_t layer = work.layer.layer, end = blocks_of(work.body_end);
  LayerDraft& draft = plan->drafts.emplace_back();
  draft.end = end;
  if (!work.shared.empty()) return corrupt_body("it has codebooks");
  for (const std::span<const uint8_t>& body : work.bodies) {
    if (static_cast<int64_t>(body.size()) != int64_t{end} * block_bytes(layer)) {
      return corrupt_body("wrong size");
    }
    draft.from.push_back(body.data());
  }
  plan->layers.push_back({counts_of(layer, end)});
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

}  // namespace tierkv::store
