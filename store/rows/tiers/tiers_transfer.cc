// Bodies of tiers as bytes, and back.
//
// A body is, little-endian: tokens of its geometric mean (i32), their sum of logarithms (i64, units
// of 2^-24); the tier of each position from the sinks on (u8); of each token that is kept, in order
// of positions, its key, then its value: codes in the order of the dims, packed from the lowest bit
// of a byte on, or fp16 of raw layers; then scale and zero point (u16 each) of codes.
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
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

void pack_side(const TileLayout& tile, const TokenCodes::Side& side, ByteWriter* out) {
  const int32_t bits = tile.type.bits();
  uint32_t word = 0;
  for (int32_t d = 0, used = 0; d < tile.head_dim; ++d) {
    word |= static_cast<uint32_t>(side.codes[d]) << used;
    used += bits;
    for (; used >= 8; used -= 8, word >>= 8) out->u8(word & 255u);
  }
  if (tile.type.is_raw()) return;
  out->u16(side.params[0].scale);
  out->u16(side.params[0].zero_point);
}

// False for numbers that no encoder writes.
bool unpack_side(const TileLayout& tile, ByteReader* in, TokenCodes::Side* side) {
  const int32_t bits = tile.type.bits();
  bool sound = true;
  uint32_t word = 0;
  for (int32_t d = 0, have = 0; d < tile.head_dim; ++d) {
    for (; have < bits; have += 8) word |= static_cast<uint32_t>(in->u8()) << have;
    side->codes[d] = static_cast<uint16_t>(word & ((1u << bits) - 1));
    word >>= bits;
    have -= bits;
    if (tile.type.is_raw()) sound &= is_finite_half(side->codes[d]);
  }
  if (tile.type.is_raw()) return sound;
  side->params[0] = {in->u16(), in->u16()};
  return is_finite_half(side->params[0].scale) && side->params[0].scale < 0x8000u &&
         is_finite_half(side->params[0].zero_point);
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
  int32_t next[2] = {0, 0};
  for (int32_t p = config_.sink_tokens; p < layer.at.body_end; ++p) {
    const BodyTier tier = tier_at(map, p);
    if (!is_kept(tier)) continue;
    const int32_t side = side_of(tier);
    const PageRun run = page_run(layer, kv_head, side, next[side]++, 1);
    TokenCodes token;
    load_token(run.page, run.slot, &token);
    for (const Component part : {Component::kKey, Component::kValue}) {
      pack_side(c.layout[side].tile(part), token.of(part), &out);
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
  for (const BodyTier tier : draft->tiers) {
    if (!is_kept(tier)) continue;
    const int32_t side = side_of(tier);
    TokenCodes token{};
    for (const Component part : {Component::kKey, Component::kValue}) {
      const bool sound = unpack_side(c.layout[side].tile(part), &in, &token.of(part));
      if (!in.ok()) return corrupt("it ends too early");
      if (!sound) return corrupt("a number is none that an encoder writes");
    }
    const PageRun run = stage(c, side, 1, &draft->sides[side]);
    if (run.slot % kTileTokens == 0) clear_tile(run.page, run.slot / kTileTokens);
    store_token(run.page, run.slot, token);
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
