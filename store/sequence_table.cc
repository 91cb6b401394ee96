#include "store/sequence_table.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

std::string name_of(SequenceId id) {
  return "sequence " + std::to_string(number_of(id)) + " (slot " + std::to_string(id.slot) +
         ", generation " + std::to_string(id.generation) + ")";
}

}  // namespace

SequenceTable::SequenceTable(const KvStoreConfig& config)
    : config_(&config),
      entries_(config.max_sequences),
      infos_(config.max_sequences),
      layer_tokens_(static_cast<size_t>(config.max_sequences) * config.layout.num_layers) {}

Result<int32_t> SequenceTable::free_slot() const {
  for (size_t slot = 0; slot < entries_.size(); ++slot) {
    if (entries_[slot].phase == SequencePhase::kFree) return static_cast<int32_t>(slot);
  }
  return Status(StatusCode::kOutOfRange,
                "all " + std::to_string(entries_.size()) + " sequences are open");
}

SequenceId SequenceTable::claim(int32_t slot, SequencePhase phase, const SequenceInfo& info) {
  entries_[slot].phase = phase;
  infos_[slot] = info;
  set_complete(slot);
  return {slot, entries_[slot].generation};
}

void SequenceTable::set_complete(int32_t slot) {
  for (int32_t layer = 0; layer < config_->layout.num_layers; ++layer) {
    set_layer_tokens(slot, layer, infos_[slot].num_tokens);
  }
}

int32_t SequenceTable::open_count() const {
  return static_cast<int32_t>(std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) {
    return e.phase != SequencePhase::kFree;
  }));
}

Result<int32_t> SequenceTable::slot_of(SequenceId id) const {
  const bool known = id.slot >= 0 && id.slot < static_cast<int32_t>(entries_.size());
  if (!known || entries_[id.slot].generation != id.generation ||
      entries_[id.slot].phase == SequencePhase::kFree) {
    return Status(StatusCode::kStaleSequence, name_of(id) + " is not open");
  }
  return id.slot;
}

Result<int32_t> SequenceTable::complete_slot_of(SequenceId id) const {
  const Result<int32_t> slot = slot_of(id);
  if (!slot) return slot;
  if (Status s = require_complete(*slot); !s) return s;
  return slot;
}

Result<int32_t> SequenceTable::complete_live_slot_of(SequenceId id) const {
  const Result<int32_t> slot = slot_of(id);
  if (!slot) return slot;
  if (Status s = require_phase(*slot, SequencePhase::kLive); !s) return s;
  if (Status s = require_complete(*slot); !s) return s;
  return slot;
}

Status SequenceTable::require_phase(int32_t slot, SequencePhase phase) const {
  if (entries_[slot].phase == phase) return Status::ok();
  return invalid(
      "sequence " + std::to_string(slot) +
      (phase == SequencePhase::kLive ? " is still in its prompt" : " is past its prompt"));
}

Status SequenceTable::require_complete(int32_t slot) const {
  for (int32_t layer = 0; layer < config_->layout.num_layers; ++layer) {
    if (layer_tokens(slot, layer) != infos_[slot].num_tokens) {
      return invalid("layer " + std::to_string(layer) + " lacks tokens of sequence " +
                     std::to_string(slot));
    }
  }
  return Status::ok();
}

Status SequenceTable::require_layer(const Slots& slots, int32_t layer) const {
  if (layer < 0 || layer >= config_->layout.num_layers) return invalid("layer is out of range");
  for (const int32_t slot : slots) {
    if (layer_tokens(slot, layer) != infos_[slot].num_tokens) {
      return invalid("the layer lacks tokens of sequence " + std::to_string(slot));
    }
  }
  return Status::ok();
}

Status SequenceTable::require_room(const Slots& slots, int32_t tokens) const {
  for (const int32_t slot : slots) {
    if (Status s = require_complete(slot); !s) return s;
  }
  for (const int32_t slot : slots) {
    if (tokens > config_->max_tokens - infos_[slot].num_tokens) {
      return Status(StatusCode::kOutOfRange,
                    "sequence " + std::to_string(slot) + " would exceed max_tokens");
    }
  }
  return Status::ok();
}

Status SequenceTable::require_stride(const Slots& slots, int64_t stride) const {
  for (const int32_t slot : slots) {
    if (stride < infos_[slot].num_tokens) return invalid("stride is below the tokens");
  }
  return Status::ok();
}

Status SequenceTable::require_queries(const Slots& slots, int32_t q_len) const {
  if (q_len < 1) return invalid("q_len must be positive");
  if (q_len > kMaxQueryTokens) {
    return Status(StatusCode::kUnsupported,
                  "q_len " + std::to_string(q_len) + "; attention needs 1 to 8");
  }
  TierPolicy policy = config_->policy;
  if (config_->coded.enabled) policy.sink_tokens = 0;  // they leave the window, too
  for (const int32_t slot : slots) {
    if (q_len == 1) break;
    const std::string of_sequence = " of sequence " + std::to_string(slot);
    if (q_len > infos_[slot].num_tokens) return invalid("q_len exceeds the tokens" + of_sequence);
    if (!window_holds_newest(policy, infos_[slot], q_len - 1)) {
      return invalid("q_len reaches tokens" + of_sequence + " that have left the window");
    }
  }
  return Status::ok();
}

Result<Slots> SequenceTable::slots_of(SequenceList list) const {
  if (list.count < 1 || list.count > static_cast<int32_t>(entries_.size())) {
    return invalid("sequences: count must be 1 to max_sequences");
  }
  if (list.ids == nullptr) return invalid("sequences: ids is null");
  Slots slots;
  for (int32_t i = 0; i < list.count; ++i) {
    const Result<int32_t> slot = slot_of(list.ids[i]);
    if (!slot) return slot.status();
    slots.push_back(*slot);
  }
  Slots sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return invalid("sequences: slot " + std::to_string(*twice) + " is named twice");
  }
  return slots;
}

Result<Slots> SequenceTable::slots_of(SequenceList list, SequencePhase phase) const {
  const Result<Slots> slots = slots_of(list);
  if (!slots) return slots;
  for (const int32_t slot : *slots) {
    if (Status s = require_phase(slot, phase); !s) return s;
  }
  return slots;
}

Result<Slots> SequenceTable::admit_begin_prompt(SequenceList list, int32_t tokens) const {
  const Result<Slots> slots = slots_of(list, SequencePhase::kPrompt);
  if (!slots) return slots;
  if (tokens < 1) return invalid("tokens must be positive");
  if (Status s = require_room(*slots, tokens); !s) return s;
  return slots;
}

Result<Slots> SequenceTable::admit_end_prompt(SequenceList list) const {
  const Result<Slots> slots = slots_of(list, SequencePhase::kPrompt);
  if (!slots) return slots;
  if (Status s = require_room(*slots, 0); !s) return s;
  return slots;
}

Result<Slots> SequenceTable::admit_begin_step(SequenceList list, int32_t tokens) const {
  const Result<Slots> slots = slots_of(list, SequencePhase::kLive);
  if (!slots) return slots;
  if (tokens < 1 || tokens > kMaxStepTokens) return invalid("tokens must be 1 to 8");
  if (Status s = require_room(*slots, tokens); !s) return s;
  return slots;
}

Result<Slots> SequenceTable::admit_append(const AppendCall& call) const {
  const Result<Slots> slots = slots_of(call.sequences);
  if (!slots) return slots;
  if (call.layer < 0 || call.layer >= config_->layout.num_layers) {
    return invalid("layer is out of range");
  }
  if (call.tokens < 1) return invalid("tokens must be positive");
  if (call.k == nullptr || call.v == nullptr) return invalid("k or v is null");
  for (const int32_t slot : *slots) {
    if (phase(slot) != phase(slots->front())) return invalid("prompts and steps in one call");
    if (layer_tokens(slot, call.layer) != infos_[slot].num_tokens - call.tokens) {
      return invalid("the layer does not lack " + std::to_string(call.tokens) +
                     " tokens of sequence " + std::to_string(slot));
    }
  }
  return slots;
}

Result<Slots> SequenceTable::admit_scores(const PromptScores& scores) const {
  const Result<Slots> slots = slots_of(scores.sequences, SequencePhase::kPrompt);
  if (!slots) return slots;
  if (Status s = require_layer(*slots, scores.layer); !s) return s;
  if (scores.significance == nullptr) return invalid("significance is null");
  if (Status s = require_stride(*slots, scores.stride); !s) return s;
  return slots;
}

Result<Slots> SequenceTable::admit_update(const ScoreUpdate& update) const {
  const Result<Slots> slots = slots_of(update.sequences, SequencePhase::kLive);
  if (!slots) return slots;
  if (Status s = require_layer(*slots, update.layer); !s) return s;
  if (update.probabilities == nullptr) return invalid("probabilities is null");
  for (const int32_t slot : *slots) {
    if (update.back < 0 || update.back >= infos_[slot].num_tokens) {
      return invalid("back is out of range");
    }
  }
  if (Status s = require_stride(*slots, update.stride); !s) return s;
  return slots;
}

Result<Slots> SequenceTable::admit_attend(const AttendRequest& request) const {
  const Result<Slots> slots = request.count_query
                                  ? slots_of(request.sequences, SequencePhase::kLive)
                                  : slots_of(request.sequences);
  if (!slots) return slots;
  if (Status s = require_layer(*slots, request.layer); !s) return s;
  if (request.q == nullptr || request.out == nullptr) return invalid("q or out is null");
  if (request.dtype != DType::kFloat16 && request.dtype != DType::kBFloat16) {
    return Status(StatusCode::kUnsupported,
                  std::string("dtype ") + dtype_name(request.dtype) + " of q and out");
  }
  if (Status s = require_queries(*slots, request.q_len); !s) return s;
  if (request.probabilities == nullptr) return slots;
  if (Status s = require_stride(*slots, request.stride); !s) return s;
  return slots;
}

}  // namespace tierkv
