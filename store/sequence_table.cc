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
  return "sequence " + std::to_string(id.slot) + "." + std::to_string(id.generation);
}

}  // namespace

SequenceTable::SequenceTable(const KvStoreConfig& config) : entries_(config.max_sequences) {}

Result<int32_t> SequenceTable::free_slot() const {
  for (size_t slot = 0; slot < entries_.size(); ++slot) {
    if (entries_[slot].phase == SequencePhase::kFree) return static_cast<int32_t>(slot);
  }
  return Status(StatusCode::kOutOfRange,
                "all " + std::to_string(entries_.size()) + " sequences are open");
}

SequenceId SequenceTable::claim(int32_t slot, SequencePhase phase) {
  entries_[slot].phase = phase;
  return {slot, entries_[slot].generation};
}

Result<int32_t> SequenceTable::slot_of(SequenceId id) const {
  const bool known = id.slot >= 0 && id.slot < static_cast<int32_t>(entries_.size());
  if (!known || entries_[id.slot].generation != id.generation ||
      entries_[id.slot].phase == SequencePhase::kFree) {
    return Status(StatusCode::kStaleSequence, name_of(id) + " is not open");
  }
  return id.slot;
}

Result<int32_t> SequenceTable::slot_of(SequenceId id, SequencePhase phase) const {
  const Result<int32_t> slot = slot_of(id);
  if (!slot) return slot;
  if (entries_[*slot].phase != phase) {
    return invalid(name_of(id) + (phase == SequencePhase::kLive ? " is still in its prompt"
                                                                : " is past its prompt"));
  }
  return slot;
}

Result<std::vector<int32_t>> SequenceTable::slots_of(SequenceList list, SequencePhase phase) const {
  if (list.count < 1 || list.count > static_cast<int32_t>(entries_.size())) {
    return invalid("sequences: count must be 1 to max_sequences");
  }
  if (list.ids == nullptr) return invalid("sequences: ids is null");
  std::vector<int32_t> slots;
  for (int32_t i = 0; i < list.count; ++i) {
    const Result<int32_t> slot =
        phase == SequencePhase::kFree ? slot_of(list.ids[i]) : slot_of(list.ids[i], phase);
    if (!slot) return slot.status();
    slots.push_back(*slot);
  }
  std::vector<int32_t> sorted = slots;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return invalid("sequences: slot " + std::to_string(*twice) + " is named twice");
  }
  return slots;
}

int32_t SequenceTable::open_count() const {
  return static_cast<int32_t>(std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) {
    return e.phase != SequencePhase::kFree;
  }));
}

}  // namespace tierkv
