// SPDX-License-Identifier: Apache-2.0
// Sequences of a store in host memory as parts, and back.
//
// The raw part of a row is, little-endian, for each raw token in order of positions (sinks, then
// the ring) its key and its value as fp16; then for each token of the ring sum (u32) and count
// (i32) of its RawScore.
#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "codec/format/byte_cursor.h"
#include "store/place/host_place.h"

namespace tierkv::store {
namespace {

Status corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "raw tokens: " + why);
}

bool can_prune(const StoreConfig& config) {
  const auto* tiers = std::get_if<TiersFormat>(&config.format);
  return tiers != nullptr && std::any_of(tiers->classes.begin(), tiers->classes.end(),
                                         [](const TierClass& c) { return c.alpha_low > 0; });
}

bool is_valid(RawScore score) {
  return score.count < 0 || (score.count <= kMostCounted && is_finite(score.sum) && score.sum >= 0);
}

}  // namespace

std::vector<uint8_t> HostPlace::raw_part(const LayerMove& move, int32_t kv_head) const {
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  const uint8_t* row = raw_row(move, kv_head);
  const int32_t sinks = sink_count(layout_.laws, move.from);
  const int32_t first = ring_first(layout_.laws, move.from);
  std::vector<uint16_t> token(config_.layout.head_dim);
  for (int32_t i = 0; i < sinks + ring_count(layout_.laws, move.from); ++i) {
    const int32_t p = i < sinks ? i : first + i - sinks;
    for (const Component c : {Component::kKey, Component::kValue}) {
      read_raw(raw_, row, c, p, token.data());
      out.bytes(token.data(), token.size() * sizeof(uint16_t));
    }
  }
  for (int32_t p = first; p < move.from.tokens; ++p) {
    const RawScore score = read_score(raw_, row, p);
    out.u32(float_bits(score.sum));
    out.i32(score.count);
  }
  return bytes;
}

Status HostPlace::write_raw_part(const LayerMove& move, int32_t kv_head,
                                 const std::vector<uint8_t>& raw) {
  ByteReader in(raw);
  uint8_t* row = raw_row(move, kv_head);
  const int32_t sinks = sink_count(layout_.laws, move.from);
  const int32_t first = ring_first(layout_.laws, move.from);
  const int64_t tokens = sinks + ring_count(layout_.laws, move.from);
  const int64_t bytes =
      tokens * config_.layout.head_dim * 4 + int64_t{8} * (move.from.tokens - first);
  if (static_cast<int64_t>(raw.size()) != bytes) return corrupt("wrong size");
  std::vector<uint16_t> token(config_.layout.head_dim);
  for (int64_t i = 0; i < tokens; ++i) {
    const auto p = static_cast<int32_t>(i < sinks ? i : first + i - sinks);
    for (const Component c : {Component::kKey, Component::kValue}) {
      for (uint16_t& x : token) {
        x = in.u16();
        if (!is_finite(half_to_float(x))) return corrupt("a value is not finite");
      }
      write_raw(raw_, row, c, p, token.data());
    }
  }
  for (int32_t p = first; p < move.from.tokens; ++p) {
    const uint32_t bits = in.u32();
    const RawScore score = {bits_float(bits), in.i32()};
    const int32_t lowest = can_prune(config_) ? RawScore::kPruned : RawScore::kDecided;
    if (!is_valid(score) || score.count < lowest) return corrupt("a score is impossible");
    write_score(raw_, row, p, score);
  }
  return Status::ok();
}

Result<SequenceParts> HostPlace::export_parts(const LayerMoves& layers) {
  SequenceParts parts;
  for (const LayerMove& move : layers) {
    parts.layers.push_back(move.from);
    parts.shared.push_back(format_->export_shared(layer_of(move)));
    for (int32_t h = 0; h < config_.layout.num_kv_heads; ++h) {
      parts.raw.push_back(raw_part(move, h));
      parts.bodies.push_back(format_->export_body(layer_of(move), h));
    }
  }
  return parts;
}

Status HostPlace::import_parts(int32_t slot, const SequenceParts& parts) {
  return import_parts(slot, parts, [this](const auto& layers, const std::vector<LayerPlan>& plans) {
    return take_pages(layers, plans);
  });
}

Status HostPlace::import_parts(int32_t slot, const SequenceParts& parts, const TakePages& take) {
  const int32_t heads = config_.layout.num_kv_heads;
  std::vector<HostLayer> layers;
  std::vector<ImportWork> works;
  Status s = open(slot);
  for (int32_t l = 0; s && l < config_.layout.num_layers; ++l) {
    ImportWork work;
    work.layer = layer_of({slot, l, {}, {}});
    layers.push_back(work.layer);
    work.body_end = parts.layers[l].body_end;
    work.shared = parts.shared[l];
    const auto first = parts.bodies.begin() + l * heads;
    work.bodies.assign(first, first + heads);
    works.push_back(std::move(work));
    const LayerMove at = {slot, l, parts.layers[l], {}};
    for (int32_t h = 0; s && h < heads; ++h) {
      s = write_raw_part(at, h, parts.raw[l * heads + h])
              .with_context("layer " + std::to_string(l) + ", kv_head " + std::to_string(h));
    }
  }
  if (s) {
    Result<std::unique_ptr<BodyPlan>> plan = format_->plan_import(works);
    s = plan ? take(layers, (*plan)->layers) : plan.status();
    if (s) format_->write(layers, **plan);
  }
  if (!s) (void)release(slot);
  return s;
}

}  // namespace tierkv::store
