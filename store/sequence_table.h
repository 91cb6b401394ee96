// Ids of sequences and what the host knows about each: both back ends check their calls against it.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/status.h"
#include "tierkv/store.h"

namespace tierkv {

enum class SequencePhase : int32_t { kFree = 0, kPrompt = 1, kLive = 2 };

class SequenceTable {
 public:
  explicit SequenceTable(const KvStoreConfig& config);

  // The least free slot; kOutOfRange when there is none. Nothing is claimed.
  Result<int32_t> free_slot() const;
  SequenceId claim(int32_t slot, SequencePhase phase);
  void release(int32_t slot) { ++entries_[slot].generation, entries_[slot].phase = {}; }
  void set_phase(int32_t slot, SequencePhase phase) { entries_[slot].phase = phase; }

  // kStaleSequence.
  Result<int32_t> slot_of(SequenceId id) const;
  // kInvalidArgument unless the sequence is in `phase`.
  Result<int32_t> slot_of(SequenceId id, SequencePhase phase) const;
  // The slots of a list without repetition; of any phase but kFree where `phase` is kFree.
  Result<std::vector<int32_t>> slots_of(SequenceList list, SequencePhase phase) const;

  SequencePhase phase(int32_t slot) const { return entries_[slot].phase; }
  int32_t open_count() const;

 private:
  struct Entry {
    uint32_t generation = 0;
    SequencePhase phase = SequencePhase::kFree;
  };
  std::vector<Entry> entries_;
};

}  // namespace tierkv
