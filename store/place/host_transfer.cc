// SPDX-License-Identifier: Apache-2.0
// Sequences of a store in host memory as parts, and back. store/ENGINE.md, kStoreRow, has the bytes
// of a raw part.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "codec/format/sound_halves.h"
#include "codec/host/parallel.h"
#include "store/place/host_place.h"

namespace tierkv::store {
namespace {

bool is_sound(const CheckedBytes& checked, const uint8_t* range) {
  const uint8_t* const from = range + checked.first;
  const int32_t bytes = checked.end - checked.first;
  if (checked.check == RangeCheck::kFinite) return are_finite(from, bytes);
  return checked.check == RangeCheck::kNone || are_params(from, bytes);
}

bool copy_ranges(const PageRanges& ranges) {
  for (const PageRange& range : ranges) {
    if (range.from == nullptr) {
      std::fill_n(range.to, range.bytes, uint8_t{0});
      continue;
    }
    if (!is_sound(range.keys, range.from) || !is_sound(range.values, range.from)) return false;
    std::copy_n(range.from, range.bytes, range.to);
  }
  return true;
}

// each(component, position) of raw tokens, in the order of a raw part.
template <class Each>
void for_raw(const TokenLaws& laws, LayerTokens at, const Each& each) {
  const int32_t sinks = sink_count(laws, at), first = ring_first(laws, at);
  for (int32_t i = 0; i < sinks + ring_count(laws, at); ++i) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      each(c, i < sinks ? i : first + i - sinks);
    }
  }
}

// How many threads the tokens of all rows are worth.
int32_t threads_of(const CacheLayout& layout, const LayerTokens& at) {
  const int64_t rows = int64_t{layout.num_layers} * layout.num_kv_heads;
  return threads_for(rows * at.tokens * layout.head_dim);
}

}  // namespace

Status import_status(int32_t fault) {
  constexpr const char* kWhat[kImportFaults] = {"raw tokens: a value is not finite",
                                                "raw tokens: a score is impossible",
                                                "body: a number is none that an encoder writes"};
  if (fault == kNoImportFault) return Status::ok();
  return Status(StatusCode::kCorrupt, kWhat[fault % kImportFaults])
      .with_context("layer " + std::to_string(fault / kImportFaults));
}

int64_t HostPlace::raw_part_bytes(LayerTokens at) const {
  const TokenLaws& laws = layout_.laws;
  const int64_t ring = ring_count(laws, at), token_bytes = int64_t{4} * config_.layout.head_dim;
  return (sink_count(laws, at) + ring) * token_bytes + ring * int64_t{sizeof(RawScore)};
}

void HostPlace::export_raw(const LayerMove& move, int32_t kv_head, uint8_t* to) const {
  const uint8_t* row = raw_row(move, kv_head);
  for_raw(layout_.laws, move.from, [&](Component c, int32_t p) {
    read_raw(layout_, row, c, p, to);
    to += 2 * config_.layout.head_dim;
  });
  for (int32_t p = ring_first(layout_.laws, move.from); p < move.from.tokens; ++p) {
    const RawScore score = read_score(layout_, row, p);
    std::memcpy(to, &score, sizeof(score));
    to += sizeof(score);
  }
}

int32_t HostPlace::import_raw(const LayerMove& move, int32_t kv_head,
                              std::span<const uint8_t> raw) const {
  uint8_t* row = raw_row(move, kv_head);
  const uint8_t* from = raw.data();
  const int64_t bytes = int64_t{2} * config_.layout.head_dim;
  bool all_finite = true;
  for_raw(layout_.laws, move.from, [&](Component c, int32_t p) {
    all_finite &= are_finite(from, bytes);
    write_raw(layout_, row, c, p, from);
    from += bytes;
  });
  if (!all_finite) return import_fault(move.layer, ImportFault::kRawValue);
  for (int32_t p = ring_first(layout_.laws, move.from); p < move.from.tokens; ++p) {
    RawScore score;
    std::memcpy(&score, from, sizeof(score));
    if (!is_possible(score)) return import_fault(move.layer, ImportFault::kRawScore);
    write_score(layout_, row, p, score);
    from += sizeof(score);
  }
  return kNoImportFault;
}

SequenceSource HostPlace::describe(const LayerMoves& layers) const {
  SequenceSource source;
  for (const LayerMove& move : layers) {
    const HostLayer layer = layer_of(move);
    source.layers.push_back(move.from);
    source.shared.push_back(format_->export_shared(layer));
    for (int32_t h = 0; h < config_.layout.num_kv_heads; ++h) {
      source.part_bytes.push_back(raw_part_bytes(move.from));
      source.part_bytes.push_back(format_->body_bytes(layer, h));
    }
  }
  return source;
}

Result<SequenceSource> HostPlace::export_parts(const LayerMoves& layers) {
  SequenceSource source = describe(layers);
  source.write = [this, layers, sizes = source.part_bytes](const std::vector<uint8_t*>& parts,
                                                           std::vector<uint64_t>* checksums) {
    const int64_t heads = config_.layout.num_kv_heads, rows = heads * config_.layout.num_layers;
    parallel_for(rows, threads_of(config_.layout, layers[0].from), [&](int64_t row) {
      const LayerMove& move = layers[row / heads];
      const auto h = static_cast<int32_t>(row % heads);
      const ExportedBody body = format_->export_body(layer_of(move), h);
      export_raw(move, h, parts[2 * row]);
      uint8_t* to = std::copy(body.head.begin(), body.head.end(), parts[2 * row + 1]);
      for (const PageRange& range : body.pages) to = std::copy_n(range.from, range.bytes, to);
      for (int64_t part = 2 * row; part < 2 * row + 2; ++part) {
        const auto padded = static_cast<int64_t>(align_chunk(sizes[part]));
        std::fill(parts[part] + sizes[part], parts[part] + padded, uint8_t{0});
        (*checksums)[part] = xxh3(parts[part], static_cast<size_t>(padded));
      }
    });
    return Status::ok();
  };
  return source;
}

Result<std::vector<HostPlace::LayerImport>> HostPlace::plan_imports(int32_t slot,
                                                                    const SequenceParts& parts,
                                                                    bool decodes_later) const {
  const int32_t heads = config_.layout.num_kv_heads;
  std::vector<LayerImport> imports(config_.layout.num_layers);
  int32_t left = config_.layout.num_layers;  // without a plan
  const auto plan_layer = [&](int64_t l, bool later) {
    const auto layer = static_cast<int32_t>(l);
    const LayerTokens at = parts.layers[l];
    for (int32_t h = 0; h < heads; ++h) {
      if (static_cast<int64_t>(parts.raw[l * heads + h].size()) != raw_part_bytes(at)) {
        return Status(StatusCode::kCorrupt, "raw tokens: wrong size");
      }
    }
    imports[l].layer = layer_of({slot, layer, {}, {}});
    std::memset(imports[l].layer.state, 0, layout_.layer_bytes - layout_.raw_bytes);
    Result<std::unique_ptr<BodyPlan>> plan =
        format_->plan_import({imports[l].layer, at.body_end, parts.shared[l],
                              std::span(parts.bodies).subspan(l * heads, heads), later});
    if (plan) imports[l].plan = std::move(*plan);
    return plan.status();
  };
  // What bodies begin with is read before threads would have started.
  for (int64_t l = 0; decodes_later && l < config_.layout.num_layers; ++l) {
    if (Status s = plan_layer(l, true); !s) return s;
    left -= imports[l].plan != nullptr ? 1 : 0;
  }
  const int32_t threads = std::min(left, threads_of(config_.layout, parts.layers[0]));
  Status s = try_parallel_for(config_.layout.num_layers, threads, [&](int64_t l) {
    return imports[l].plan != nullptr ? Status::ok() : plan_layer(l, false);
  });
  if (!s) return s;
  return imports;
}

Status HostPlace::import_parts(int32_t slot, const SequenceParts& parts) {
  Status s = without_bad_alloc([&] { return import_opened(slot, parts); });
  if (s) return s;
  (void)release(slot);
  return parts.why_failed(s);
}

// A thread takes a layer at a time. Bytes are verified when they are copied, so they come out of
// memory once.
Status HostPlace::import_opened(int32_t slot, const SequenceParts& parts) {
  const int32_t heads = config_.layout.num_kv_heads;
  OpReport report;
  if (Status s = run(PageOp::open({&slot, 1}, &report)); !s) return s;
  const Result<std::vector<LayerImport>> imports = plan_imports(slot, parts, false);
  if (!imports) return imports.status();
  std::vector<HostLayer> layers;
  std::vector<LayerPlan> plans;
  for (const LayerImport& import : *imports) {
    layers.push_back(import.layer);
    plans.push_back(import.plan->layers[0]);
  }
  if (Status s = take_pages(layers, plans); !s) return s;
  const auto bring = [&](int64_t l) {
    const HostLayer& layer = layers[l];
    if (Status s = parts.check(l * heads, heads); !s) return s;
    std::memset(layer.raw, 0, static_cast<size_t>(layout_.raw_bytes));
    const LayerMove move = {slot, layer.layer, parts.layers[l], {}};
    int32_t fault = kNoImportFault;
    for (int32_t h = 0; h < heads; ++h) {
      fault = least(fault, import_raw(move, h, parts.raw[l * heads + h]));
    }
    if (fault == kNoImportFault && !copy_ranges(format_->place(layer, *(*imports)[l].plan, 0))) {
      fault = import_fault(layer.layer, ImportFault::kBody);
    }
    if (fault != kNoImportFault) return import_status(fault);
    format_->clear_behind(layer);
    return Status::ok();
  };
  Status s = try_parallel_for(config_.layout.num_layers,
                              threads_of(config_.layout, parts.layers[0]), bring);
  if (!s) return s;
  // What serves all sequences must not change for one that is refused.
  for (const LayerImport& import : *imports) format_->finish(*import.plan);
  return s;
}

}  // namespace tierkv::store
