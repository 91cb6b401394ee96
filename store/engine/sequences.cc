// SPDX-License-Identifier: Apache-2.0
#include "store/engine/sequences.h"

#include <algorithm>

#include "codec/format/element.h"
#include "codec/format/errors.h"

namespace tierkv::store {
namespace {

Status require_dtype(DType dtype) {
  if (is_raw_dtype(dtype)) return Status::ok();
  return Status(StatusCode::kUnsupported, std::string("dtype: ") + dtype_name(dtype));
}

}  // namespace

Sequences::Sequences(const StoreConfig& config, const TokenLaws& laws)
    : config_(&config),
      laws_(laws),
      entries_(config.max_sequences),
      layers_(static_cast<size_t>(config.max_sequences) * config.layout.num_layers),
      last_call_(config.max_sequences) {
  slots_.reserve(config.max_sequences);
}

Result<int32_t> Sequences::free_slot() const {
  for (size_t slot = 0; slot < entries_.size(); ++slot) {
    if (!entries_[slot].is_open) return static_cast<int32_t>(slot);
  }
  return Status(StatusCode::kOutOfRange,
                "all " + std::to_string(entries_.size()) + " sequences are open");
}

SequenceId Sequences::claim(int32_t slot) {
  entries_[slot].is_open = true;
  entries_[slot].tokens = 0;
  std::fill_n(layers_.begin() + index_of(slot, 0), config_->layout.num_layers, LayerTokens{});
  ++open_;
  return {slot, entries_[slot].generation};
}

void Sequences::release(int32_t slot) {
  entries_[slot].is_open = false;
  ++entries_[slot].generation;
  --open_;
}

Result<int32_t> Sequences::slot_of(SequenceId id) const {
  const bool known = id.slot >= 0 && id.slot < static_cast<int32_t>(entries_.size());
  if (!known || entries_[id.slot].generation != id.generation || !entries_[id.slot].is_open) {
    return Status(StatusCode::kStaleSequence, name_of(id) + " is not open");
  }
  return id.slot;
}

Result<int32_t> Sequences::complete_slot_of(SequenceId id) const {
  const Result<int32_t> slot = slot_of(id);
  if (!slot) return slot;
  if (Status s = require_complete(*slot); !s) return s;
  return slot;
}

Status Sequences::require_complete(int32_t slot) const {
  for (int32_t l = 0; l < config_->layout.num_layers; ++l) {
    if (layer(slot, l).tokens == entries_[slot].tokens) continue;
    return lacks_tokens(slot, l);
  }
  return Status::ok();
}

Status Sequences::lacks_tokens(int32_t slot, int32_t l) const {
  return invalid("layer " + std::to_string(l) + " lacks " +
                 std::to_string(entries_[slot].tokens - layer(slot, l).tokens) + " tokens of " +
                 name_of(id_at(slot)));
}

Status Sequences::require_layer(int32_t l) const {
  return l >= 0 && l < config_->layout.num_layers ? Status::ok() : invalid("layer is out of range");
}

Status Sequences::find_slots(SequenceList list) const {
  if (list.count < 1 || list.count > static_cast<int32_t>(entries_.size())) {
    return invalid("sequences: count must be 1 to max_sequences");
  }
  if (list.ids == nullptr) return invalid("sequences: ids is null");
  ++call_;
  slots_.clear();
  for (int32_t i = 0; i < list.count; ++i) {
    const Result<int32_t> slot = slot_of(list.ids[i]);
    if (!slot) return slot.status();
    if (last_call_[*slot] == call_) {
      return invalid("sequences: " + name_of(list.ids[i]) + " is named twice");
    }
    last_call_[*slot] = call_;
    slots_.push_back(*slot);
  }
  return Status::ok();
}

Status Sequences::admit_begin(SequenceList list, int32_t tokens, LayerMoves* moves) const {
  if (Status s = find_slots(list); !s) return s;
  if (tokens < 1) return invalid("tokens must be positive");
  for (const int32_t slot : slots_) {
    if (Status s = require_complete(slot); !s) return s;
    if (tokens > config_->max_tokens - entries_[slot].tokens) {
      return Status(StatusCode::kOutOfRange,
                    name_of(id_at(slot)) + ": " + std::to_string(tokens) + " tokens behind " +
                        std::to_string(entries_[slot].tokens) + " are more than max_tokens, " +
                        std::to_string(config_->max_tokens));
    }
  }
  moves->clear();
  for (const int32_t slot : slots_) {
    for (int32_t l = 0; l < config_->layout.num_layers; ++l) {
      const LayerTokens from = layer(slot, l);
      const int32_t end = body_end_at(laws_, from.body_end, from.tokens + tokens);
      moves->push_back(move_of(slot, l, {from.tokens, end}));
    }
  }
  return Status::ok();
}

Status Sequences::admit_append(const LayerAppend& call, LayerMoves* moves) const {
  if (Status s = find_slots(call.sequences); !s) return s;
  if (Status s = require_layer(call.layer); !s) return s;
  if (call.tokens < 1) return invalid("tokens must be positive");
  if (call.k == nullptr || call.v == nullptr) return invalid("k or v is null");
  if (call.significance != nullptr && call.q != nullptr) {
    return invalid("significance and q: give one of them");
  }
  if (call.query_stride < 1 || call.query_stride > kMaxQueryStride) {
    return invalid("query_stride must be 1 to " + std::to_string(kMaxQueryStride));
  }
  if (call.significance != nullptr && call.stride < call.tokens) {
    return invalid("stride is below the tokens");
  }
  moves->clear();
  for (const int32_t slot : slots_) {
    const LayerTokens from = layer(slot, call.layer);
    if (entries_[slot].tokens - from.tokens != call.tokens) {
      return invalid("tokens: " + std::to_string(call.tokens) + ", but begin() announced " +
                     std::to_string(entries_[slot].tokens - from.tokens) + " more for layer " +
                     std::to_string(call.layer) + " of " + name_of(id_at(slot)));
    }
    moves->push_back(move_of(slot, call.layer, after_append(laws_, from, call.tokens)));
  }
  return Status::ok();
}

Status Sequences::admit_attend(const LayerAttend& call, LayerMoves* moves) const {
  if (Status s = find_slots(call.sequences); !s) return s;
  if (Status s = require_layer(call.layer); !s) return s;
  if (call.q == nullptr || call.out == nullptr) return invalid("q or out is null");
  if (call.q_len < 1) return invalid("q_len must be positive");
  if (Status s = require_dtype(call.dtype); !s) return s;
  moves->clear();
  for (const int32_t slot : slots_) {
    const LayerTokens at = layer(slot, call.layer);
    if (at.tokens != entries_[slot].tokens) return lacks_tokens(slot, call.layer);
    if (call.q_len > at.tokens) {
      return invalid("q_len exceeds the tokens of " + name_of(id_at(slot)));
    }
    if (call.probabilities != nullptr && call.stride < at.tokens) {
      return invalid("stride is below the tokens");
    }
    moves->push_back(move_of(slot, call.layer, at));
  }
  return Status::ok();
}

Result<LayerMove> Sequences::admit_range(const LayerRange& range) const {
  const Result<int32_t> slot = slot_of(range.sequence);
  if (!slot) return slot.status();
  if (Status s = require_layer(range.layer); !s) return s;
  const bool any = range.first < range.end;
  if (any && (range.k == nullptr || range.v == nullptr)) return invalid("k or v is null");
  if (Status s = require_dtype(range.dtype); !s) return s;
  const LayerTokens at = layer(*slot, range.layer);
  if (range.first < 0 || range.end < range.first || range.end > at.tokens) {
    return Status(StatusCode::kOutOfRange, "layer " + std::to_string(range.layer) + " holds " +
                                               std::to_string(at.tokens) + " tokens of " +
                                               name_of(range.sequence));
  }
  return move_of(*slot, range.layer, at);
}

Status Sequences::admit_truncate(SequenceId id, int32_t tokens, LayerMoves* moves) const {
  const Result<int32_t> slot = slot_of(id);
  if (!slot) return slot.status();
  *moves = layers_of(*slot);
  for (LayerMove& move : *moves) {
    if (tokens < 0 || tokens > move.from.tokens) {
      return invalid("tokens: layer " + std::to_string(move.layer) + " has " +
                     std::to_string(move.from.tokens) + " of " + name_of(id));
    }
    move.to = after_truncate(laws_, move.from, tokens);
  }
  return Status::ok();
}

void Sequences::commit(const LayerMoves& moves) {
  for (const LayerMove& move : moves) layers_[index_of(move.slot, move.layer)] = move.to;
}

void Sequences::promise(const LayerMoves& moves, int32_t tokens) {
  for (const LayerMove& move : moves) {
    if (move.layer == 0) entries_[move.slot].tokens += tokens;
  }
}

LayerMoves Sequences::layers_of(int32_t slot) const {
  LayerMoves moves;
  for (int32_t l = 0; l < config_->layout.num_layers; ++l) {
    moves.push_back(move_of(slot, l, layer(slot, l)));
  }
  return moves;
}

LayerMoves Sequences::all_layers() const {
  LayerMoves moves;
  for (size_t slot = 0; slot < entries_.size(); ++slot) {
    if (!entries_[slot].is_open) continue;
    const LayerMoves layers = layers_of(static_cast<int32_t>(slot));
    moves.insert(moves.end(), layers.begin(), layers.end());
  }
  return moves;
}

}  // namespace tierkv::store
