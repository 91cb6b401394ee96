// SPDX-License-Identifier: Apache-2.0
// Sequences of a store in host memory as parts, and back.
//
// The raw part of a row is, little-endian, for each raw token in order of positions (sinks, then
// the ring) its key and its value as fp16; then for each token of the ring sum (u32) and count
// (i32) of its RawScore.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "codec/format/element.h"
#include "codec/format/sound_halves.h"
#include "codec/host/parallel.h"
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

int64_t HostPlace::raw_part_bytes(LayerTokens at) const {
  const TokenLaws& laws = layout_.laws;
  const int64_t ring = ring_count(laws, at), token_bytes = int64_t{4} * config_.layout.head_dim;
  return (sink_count(laws, at) + ring) * token_bytes + ring * int64_t{sizeof(RawScore)};
}

void HostPlace::export_raw(const LayerMove& move, int32_t kv_head, uint8_t* to) const {
  const uint8_t* row = raw_row(move, kv_head);
  const int32_t sinks = sink_count(layout_.laws, move.from), dim = config_.layout.head_dim;
  const int32_t first = ring_first(layout_.laws, move.from);
  uint16_t token[kMaxHeadDim];
  for (int32_t i = 0; i < sinks + ring_count(layout_.laws, move.from); ++i) {
    const int32_t p = i < sinks ? i : first + i - sinks;
    for (const Component c : {Component::kKey, Component::kValue}) {
      read_raw(raw_, row, c, p, token);
      std::memcpy(to, token, dim * sizeof(uint16_t));
      to += dim * sizeof(uint16_t);
    }
  }
  for (int32_t p = first; p < move.from.tokens; ++p, to += sizeof(RawScore)) {
    const RawScore score = read_score(raw_, row, p);
    std::memcpy(to, &score, sizeof(score));
  }
}

Status HostPlace::import_raw(const LayerMove& move, int32_t kv_head,
                             std::span<const uint8_t> raw) const {
  if (static_cast<int64_t>(raw.size()) != raw_part_bytes(move.from)) return corrupt("wrong size");
  uint8_t* row = raw_row(move, kv_head);
  const uint8_t* from = raw.data();
  const int32_t sinks = sink_count(layout_.laws, move.from), dim = config_.layout.head_dim;
  const int32_t first = ring_first(layout_.laws, move.from);
  uint16_t token[kMaxHeadDim];
  for (int32_t i = 0; i < sinks + ring_count(layout_.laws, move.from); ++i) {
    const int32_t p = i < sinks ? i : first + i - sinks;
    for (const Component c : {Component::kKey, Component::kValue}) {
      const auto bytes = static_cast<int64_t>(dim * sizeof(uint16_t));
      if (!are_finite(from, bytes)) return corrupt("a value is not finite");
      std::memcpy(token, from, dim * sizeof(uint16_t));
      from += bytes;
      write_raw(raw_, row, c, p, token);
    }
  }
  const int32_t lowest = can_prune(config_) ? RawScore::kPruned : RawScore::kDecided;
  for (int32_t p = first; p < move.from.tokens; ++p, from += sizeof(RawScore)) {
    RawScore score;
    std::memcpy(&score, from, sizeof(score));
    if (!is_valid(score) || score.count < lowest) return corrupt("a score is impossible");
    write_score(raw_, row, p, score);
  }
  return Status::ok();
}

Result<SequenceSource> HostPlace::export_parts(const LayerMoves& layers) {
  SequenceSource source;
  const int32_t heads = config_.layout.num_kv_heads;
  for (const LayerMove& move : layers) {
    source.layers.push_back(move.from);
    source.shared.push_back(format_->export_shared(layer_of(move)));
    for (int32_t h = 0; h < heads; ++h) {
      source.raw_bytes.push_back(raw_part_bytes(move.from));
      source.body_bytes.push_back(format_->body_bytes(layer_of(move), h));
    }
  }
  source.write = [this, layers, heads](int64_t row, uint8_t* raw, uint8_t* body) {
    const LayerMove& move = layers[row / heads];
    const auto h = static_cast<int32_t>(row % heads);
    export_raw(move, h, raw);
    format_->export_body(layer_of(move), h, body);
    return Status::ok();
  };
  return source;
}

Status HostPlace::import_parts(int32_t slot, const SequenceParts& parts) {
  ImportSteps steps;
  steps.take = [this](const auto& layers, const std::vector<LayerPlan>& plans) {
    return take_pages(layers, plans);
  };
  Status s = without_bad_alloc([&] { return import_parts(slot, parts, steps); });
  if (!s) (void)release(slot);
  return s;
}

// A thread plans a layer at a time and then brings a row, or a layer where rows are not written
// alone. Plans read little of it; its bytes are verified when they are copied, so they come out of
// memory once. The last row of a layer tells that the layer is written.
Status HostPlace::import_parts(int32_t slot, const SequenceParts& parts, const ImportSteps& steps) {
  const int32_t heads = config_.layout.num_kv_heads, num_layers = config_.layout.num_layers;
  int64_t bytes = 0;
  for (const auto* all : {&parts.raw, &parts.bodies}) {
    for (const std::span<const uint8_t>& part : *all) bytes += static_cast<int64_t>(part.size());
  }
  const auto for_all = [&](int32_t count, const auto& each) {
    return try_parallel_for(count, threads_for(bytes),
                            [&](int64_t i) { return each(static_cast<int32_t>(i)); });
  };
  const auto verify = [&](int64_t first, int64_t count) {
    return parts.verify ? parts.verify(first, count) : Status::ok();
  };
  std::vector<HostLayer> layers(num_layers);
  std::vector<std::unique_ptr<BodyPlan>> plans(num_layers);
  const bool rows_alone = format_->writes_rows();
  const int32_t at_once = rows_alone ? 1 : heads, units = num_layers * heads / at_once;
  const auto for_rows = [&](int32_t unit, const auto& each) {
    Status s = verify(int64_t{unit} * at_once, at_once);
    for (int32_t row = unit * at_once; s && row < (unit + 1) * at_once; ++row) {
      const int32_t l = row / heads, h = row % heads;
      s = each(l, h);
      if (!s) s = s.with_context("layer " + std::to_string(l) + ", kv_head " + std::to_string(h));
    }
    return s;
  };
  const auto bring_raw = [&](int32_t l, int32_t h) {
    return import_raw({slot, l, parts.layers[l], {}}, h, parts.raw[l * heads + h]);
  };
  const auto plan_layer = [&](int32_t l) {
    layers[l] = layer_of({slot, l, {}, {}});
    std::memset(layers[l].raw, 0, static_cast<size_t>(layout_.layer_bytes));
    Result<std::unique_ptr<BodyPlan>> plan = format_->plan_import(
        {{layers[l], parts.layers[l].body_end, parts.shared[l],
          std::span(parts.bodies).subspan(l * heads, heads), steps.decodes_later}});
    if (plan) plans[l] = std::move(*plan);
    return plan.status();
  };
  OpReport report;
  Status s = run(PageOp::open({&slot, 1}, &report));
  if (s) s = for_all(num_layers, plan_layer);
  // What serves all sequences must not change for one that is refused.
  const bool raw_first = s && std::any_of(plans.begin(), plans.end(),
                                          [](const auto& plan) { return plan->changes_all; });
  if (raw_first) s = for_all(units, [&](int32_t unit) { return for_rows(unit, bring_raw); });
  if (s) {
    std::vector<LayerPlan> all;
    for (const auto& plan : plans) all.push_back(plan->layers[0]);
    s = steps.take(layers, all);
  }
  if (s) {
    std::vector<std::atomic<int32_t>> written(num_layers);
    s = for_all(units, [&](int32_t unit) {
      const int32_t l = unit * at_once / heads;
      const Status sound = for_rows(unit, [&](int32_t, int32_t h) {
        const Status raw = raw_first ? Status::ok() : bring_raw(l, h);
        return raw && rows_alone ? format_->write_row(layers[l], *plans[l], h) : raw;
      });
      if (!sound || (written[l] += at_once) < heads) return sound;
      if (!rows_alone) format_->write({layers[l]}, *plans[l]);
      return steps.written ? steps.written(l) : sound;
    });
  }
  if (s) return s;
  const Status sound = verify(0, int64_t{num_layers} * heads);
  return sound ? s : sound;
}

}  // namespace tierkv::store
