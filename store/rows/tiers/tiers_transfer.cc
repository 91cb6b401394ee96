// SPDX-License-Identifier: Apache-2.0
// Bodies of tiers as bytes, and back.
//
// A body is, little-endian: tokens of its geometric mean (i32), 0 (u32), their sum of logarithms
// (i64, units of 2^-24); the map of tiers, 2 bits a position, zeros for sinks and behind the body,
// up to a multiple of 16; then the tokens of the high tier and those of the low one, as pages have
// them: of each page the tiles with tokens, their key codes, key metadata, value codes and value
// metadata. Slots without a token are 0.
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
#include "codec/format/fragment_order.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

constexpr uint32_t kVersion = 2;
constexpr int64_t kMeanBytes = 16;

uint32_t map_word(const uint8_t* map, int32_t word) {
  uint32_t x;
  std::memcpy(&x, map + int64_t{word} * 4, sizeof(x));
  return x;
}

// The bytes of the first tiles of a page: codes and metadata of keys, then of values.
struct PagePart {
  int32_t byte, bytes;
};
template <class Each>
void for_parts(const PageLayout& layout, int32_t tiles, const Each& each) {
  for (const Component c : {Component::kKey, Component::kValue}) {
    each(c, false, PagePart{layout.tile_codes_byte(c, 0), tiles * layout.tile(c).bytes()});
    each(c, true,
         PagePart{layout.tile_metadata_byte(c, 0), tiles * tile_metadata_bytes(layout.groups(c))});
  }
}

// Bytes of a side's tiles with tokens.
int64_t tile_bytes(const PageLayout& layout, int32_t tokens) {
  int64_t of_tile = 0;
  for_parts(layout, 1, [&](Component, bool, PagePart part) { of_tile += part.bytes; });
  return of_tile * tile_count(tokens);
}

}  // namespace

std::vector<uint8_t> TiersRows::identity() const {
  const auto& format = std::get<TiersFormat>(config_.format);
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  out.u32(kVersion);
  out.u32(static_cast<uint32_t>(format.classes.size()));
  for (const TierClass& c : format.classes) {
    out.text(to_string(c.high));
    out.text(to_string(c.low));
    out.f64(c.alpha_high);
    out.f64(c.alpha_low);
  }
  for (const uint8_t c : class_of_head_) out.u8(c);
  out.u64(static_cast<uint64_t>(sizes_.page_bytes));  // a side's bytes come page by page
  CacheBasis basis;
  basis.num_layers = config_.layout.num_layers;
  basis.num_kv_heads = config_.layout.num_kv_heads;
  basis.keys = keys_;
  basis.values = values_;
  out.u64(keys_.empty() && values_.empty() ? 0 : basis.identity());
  return bytes;
}

int64_t TiersRows::body_bytes(const HostLayer& layer, int32_t kv_head) const {
  const RowClass& c = row_class(layer.layer, kv_head);
  const TiersRow& row = row_state(layer, kv_head);
  int64_t bytes = kMeanBytes + bytes_of_map(body_first(layer.at));
  for (int32_t side = 0; side < 2; ++side) bytes += tile_bytes(c.layout[side], row.tokens[side]);
  return bytes;
}

ExportedBody TiersRows::export_body(const HostLayer& layer, int32_t kv_head) const {
  const TiersRow& row = row_state(layer, kv_head);
  const RowClass& c = row_class(layer.layer, kv_head);
  const uint8_t* map = map_of(layer, kv_head);
  ExportedBody body;
  ByteWriter head(&body.head);
  head.i32(row.mean.seen);
  head.u32(0);
  head.i64(row.mean.logs);
  const int32_t sinks = config_.sink_tokens, end = body_first(layer.at);
  for (int32_t w = 0; w < bytes_of_map(end) / 4; ++w) {
    const int32_t first = w * kWordPositions;
    head.u32(map_word(map, w) & word_mask(sinks - first, end - first));
  }
  for (int32_t side = 0; side < 2; ++side) {
    const PageLayout& layout = c.layout[side];
    for (int32_t t = 0; t < row.tokens[side]; t += layout.tokens) {
      const PageRun run = page_run(layer, kv_head, side, t, row.tokens[side] - t);
      for_parts(layout, tile_count(run.count), [&](Component, bool, PagePart part) {
        body.add(run.page.bytes + part.byte, part.bytes);
      });
    }
  }
  return body;
}

Status TiersRows::import_row(const ImportWork& work, int32_t kv_head, RowDraft* draft) const {
  ByteReader in(work.bodies[kv_head].data(), work.bodies[kv_head].size());
  const RowClass& c = row_class(work.layer.layer, kv_head);
  draft->row.mean.seen = in.i32();
  const uint32_t zero = in.u32();
  draft->row.mean.logs = in.i64();
  if (zero != 0 || !draft->row.mean.is_sound()) return corrupt_body("its mean is impossible");
  const int32_t sinks = config_.sink_tokens, end = most(work.body_end, sinks);
  draft->position = end;
  draft->map = in.take(static_cast<uint64_t>(bytes_of_map(end)));
  if (draft->map == nullptr) return corrupt_body("it ends too early");
  int32_t pruned = 0;
  for (int32_t w = 0; w < bytes_of_map(end) / 4; ++w) {
    const int32_t first = w * kWordPositions;
    const uint32_t word = map_word(draft->map, w), mask = word_mask(sinks - first, end - first);
    if ((word & ~mask) != 0) return corrupt_body("a position without a token has a tier");
    draft->row.tokens[kHighSide] += std::popcount(positions_of(word, BodyTier::kHigh));
    draft->row.tokens[kLowSide] += std::popcount(positions_of(word, BodyTier::kLow));
    pruned += std::popcount(positions_of(word, BodyTier::kPruned));
  }
  const int32_t known = draft->row.tokens[kHighSide] + draft->row.tokens[kLowSide] + pruned;
  if (known != end - sinks || (pruned > 0 && c.alphas.low <= 0)) {
    return corrupt_body("a token has no tier");
  }
  if (draft->row.tokens[kLowSide] > 0 && c.alphas.high <= 0) {
    return corrupt_body("a token is in the low tier, where every token is high");
  }
  for (int32_t side = 0; side < 2; ++side) {
    StagedSide& staged = draft->sides[side];
    staged.end = draft->row.tokens[side];
    staged.tiles = in.take(static_cast<uint64_t>(tile_bytes(c.layout[side], staged.end)));
    if (!in.ok()) return corrupt_body("it ends too early");
  }
  return in.at_end() ? Status::ok() : corrupt_body("wrong size");
}

// Tiles without a token are 0.
void TiersRows::place_side(const HostLayer& layer, int32_t kv_head, int32_t side,
                           const StagedSide& staged, PageRanges* ranges) const {
  const PageLayout& layout = row_class(layer.layer, kv_head).layout[side];
  const uint8_t* from = staged.tiles;
  for (int32_t t = 0; t < staged.end; t += layout.tokens) {
    const PageRun run = page_run(layer, kv_head, side, t, staged.end - t);
    PageRange page = {from, run.page.bytes, layout.scores};
    const bool is_whole = tile_count(run.count) == layout.tiles();
    for_parts(layout, tile_count(run.count), [&](Component c, bool has_params, PagePart part) {
      PageRange range = {from, run.page.bytes + part.byte, part.bytes};
      const bool is_raw = layout.tile(c).type.is_raw();
      if (has_params != is_raw) {
        PageRange& of = is_whole ? page : range;
        CheckedBytes& checked = c == Component::kKey ? of.keys : of.values;
        const int32_t first = is_whole ? part.byte : 0;
        checked = {first, first + part.bytes, is_raw ? RangeCheck::kFinite : RangeCheck::kParams};
      }
      from += part.bytes;
      if (is_whole || part.bytes == 0) return;
      ranges->push_back(range);
      const int32_t whole = part.bytes / tile_count(run.count) * layout.tiles();
      ranges->push_back({nullptr, range.to + part.bytes, whole - part.bytes});
    });
    if (is_whole) ranges->push_back(page);
  }
}

void TiersRows::clear_behind(const HostLayer& layer) {
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    for (int32_t side = 0; side < 2; ++side) {
      clear_slots(layer, h, side, row_state(layer, h).tokens[side], INT32_MAX);
    }
  }
}

Result<std::unique_ptr<BodyPlan>> TiersRows::plan_import(const ImportWork& work) {
  auto plan = std::make_unique<TiersPlan>();
  LayerPlan layer;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    RowDraft& draft = plan->rows.emplace_back(draft_behind({}, config_.sink_tokens));
    const Status row =
        work.shared.empty() ? import_row(work, h, &draft) : corrupt_body("it has a shared part");
    if (!row) {
      return row.with_context("layer " + std::to_string(work.layer.layer) + ", kv_head " +
                              std::to_string(h));
    }
    layer.tokens.push_back(units_of(row_class(work.layer.layer, h), draft.row));
  }
  plan->layers.push_back(std::move(layer));
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

}  // namespace tierkv::store
