// SPDX-License-Identifier: Apache-2.0
// Bodies of tiers as bytes, and back.
//
// A body is, little-endian: tokens of its geometric mean (i32), their sum of logarithms (i64, units
// of 2^-24); the tier of each position from the sinks on (u8); then the tokens of the high tier and
// those of the low one, as pages have them: of each page the tiles with tokens, their key codes,
// key metadata, value codes and value metadata. Slots without a token are 0.
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
#include "codec/format/fragment_order.h"
#include "codec/host/page_codec_checks.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

constexpr uint32_t kVersion = 1;

Status corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "body: " + why);
}

bool is_finite_half(uint16_t x) {
  return (x & 0x7c00u) != 0x7c00u;
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

// Whether an encoder may have written the elements of raw tokens, or scales and zero points.
bool are_sound(const uint8_t* bytes, int32_t count, bool are_params) {
  bool sound = true;
  for (int32_t i = 0; i < count / 2; ++i) {
    uint16_t x;
    std::memcpy(&x, bytes + 2 * i, 2);
    sound &= is_finite_half(x) && !(are_params && i % 2 == 0 && x >= 0x8000u);
  }
  return sound;
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
  CacheBasis basis;
  basis.num_layers = config_.layout.num_layers;
  basis.num_kv_heads = config_.layout.num_kv_heads;
  basis.keys = keys_;
  basis.values = values_;
  out.u64(keys_.empty() && values_.empty() ? 0 : basis.identity());
  return bytes;
}

std::vector<uint8_t> TiersRows::export_body(const HostLayer& layer, int32_t kv_head) const {
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  const TiersRow& row = row_state(layer, kv_head);
  const RowClass& c = row_class(layer.layer, kv_head);
  const uint8_t* map = map_of(layer, kv_head);
  out.i32(row.mean.seen);
  out.i64(row.mean.logs);
  for (int32_t p = config_.sink_tokens; p < layer.at.body_end; ++p) {
    out.u8(static_cast<uint32_t>(tier_at(map, p)));
  }
  for (int32_t side = 0; side < 2; ++side) {
    const PageLayout& layout = c.layout[side];
    for (int32_t t = 0; t < row.tokens[side]; t += layout.tokens) {
      const PageRun run = page_run(layer, kv_head, side, t, row.tokens[side] - t);
      for_parts(layout, tile_count(run.count), [&](Component, bool, PagePart part) {
        out.bytes(run.page.bytes + part.byte, static_cast<size_t>(part.bytes));
      });
    }
  }
  return bytes;
}

Status TiersRows::import_row(const ImportWork& work, int32_t kv_head, RowDraft* draft) const {
  ByteReader in(work.bodies[kv_head]);
  const RowClass& c = row_class(work.layer.layer, kv_head);
  draft->row.mean.seen = in.i32();
  draft->row.mean.logs = in.i64();
  if (!draft->row.mean.is_sound()) return corrupt("its mean is impossible");
  for (int32_t p = config_.sink_tokens; p < work.body_end; ++p) {
    const auto tier = static_cast<BodyTier>(in.u8());
    const bool known = tier == BodyTier::kHigh || tier == BodyTier::kLow ||
                       (tier == BodyTier::kPruned && c.alphas.low > 0);
    if (!in.ok() || !known) return corrupt("a token has no tier");
    if (is_kept(tier)) ++draft->row.tokens[side_of(tier)];
    draft->tiers.push_back(tier);
  }
  for (int32_t side = 0; side < 2; ++side) {
    const PageLayout& layout = c.layout[side];
    for (int32_t left = draft->row.tokens[side]; left > 0;) {
      const PageRun run = stage(c, side, left, &draft->sides[side]);
      bool sound = true;
      for_parts(layout, tile_count(run.count), [&](Component part, bool are_params, PagePart of) {
        const uint8_t* from = in.take(static_cast<uint64_t>(of.bytes));
        if (from == nullptr) return;
        std::memcpy(run.page.bytes + of.byte, from, static_cast<size_t>(of.bytes));
        if (are_params || layout.tile(part).type.is_raw()) {
          sound &= are_sound(from, of.bytes, are_params);
        }
      });
      if (!in.ok()) return corrupt("it ends too early");
      if (!sound) return corrupt("a number is none that an encoder writes");
      for (int32_t slot = run.count; slot % kTileTokens != 0; ++slot) {
        store_token(run.page, slot, TokenCodes{});
      }
      left -= run.count;
    }
  }
  return in.at_end() ? Status::ok() : corrupt("wrong size");
}

Result<std::unique_ptr<BodyPlan>> TiersRows::plan_import(const std::vector<ImportWork>& works) {
  auto plan = std::make_unique<TiersPlan>();
  for (const ImportWork& work : works) {
    const std::string layer_name = "layer " + std::to_string(work.layer.layer);
    if (!work.shared.empty()) return corrupt("it has a shared part").with_context(layer_name);
    LayerPlan layer;
    for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
      RowDraft draft = draft_behind({}, config_.sink_tokens);
      if (Status s = import_row(work, h, &draft); !s) {
        return s.with_context(layer_name + ", kv_head " + std::to_string(h));
      }
      layer.tokens.push_back(units_of(work.layer.layer, h, draft.row));
      plan->rows.push_back(std::move(draft));
    }
    plan->layers.push_back(std::move(layer));
  }
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

}  // namespace tierkv::store
