// Ids of sequences and what the host knows about each: both back ends admit their calls by it.
//
// admit_*() check everything about a call but the values it brings, and change nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "store/shared/sequence_info.h"
#include "tierkv/status.h"
#include "tierkv/store.h"

namespace tierkv {

enum class SequencePhase : int32_t { kFree = 0, kPrompt = 1, kLive = 2 };

using Slots = std::vector<int32_t>;

class SequenceTable {
 public:
  // The config must outlive the table.
  explicit SequenceTable(const KvStoreConfig& config);

  // The least free slot; kOutOfRange when there is none. Nothing is claimed.
  Result<int32_t> free_slot() const;
  // Complete, with info.num_tokens tokens.
  SequenceId claim(int32_t slot, SequencePhase phase, const SequenceInfo& info);
  void release(int32_t slot) { ++entries_[slot].generation, entries_[slot].phase = {}; }

  // kStaleSequence.
  Result<int32_t> slot_of(SequenceId id) const;
  // Also kInvalidArgument unless all layers have all tokens, and the sequence is past its prompt.
  Result<int32_t> complete_slot_of(SequenceId id) const;
  Result<int32_t> complete_live_slot_of(SequenceId id) const;

  Result<Slots> admit_begin_prompt(SequenceList list, int32_t tokens) const;
  Result<Slots> admit_end_prompt(SequenceList list) const;
  Result<Slots> admit_begin_step(SequenceList list, int32_t tokens) const;
  // All of one phase.
  Result<Slots> admit_append(const AppendCall& call) const;
  Result<Slots> admit_scores(const PromptScores& scores) const;
  Result<Slots> admit_update(const ScoreUpdate& update) const;
  Result<Slots> admit_attend(const AttendRequest& request) const;

  SequencePhase phase(int32_t slot) const { return entries_[slot].phase; }
  int32_t open_count() const;
  const SequenceInfo& info(int32_t slot) const { return infos_[slot]; }
  SequenceInfo* infos() { return infos_.data(); }  // [max_sequences]

  // What the calls do.
  void set_phase(int32_t slot, SequencePhase phase) { entries_[slot].phase = phase; }
  void set_info(int32_t slot, const SequenceInfo& info) { infos_[slot] = info; }
  int32_t layer_tokens(int32_t slot, int32_t layer) const {
    return layer_tokens_[static_cast<size_t>(slot) * config_->layout.num_layers + layer];
  }
  void set_layer_tokens(int32_t slot, int32_t layer, int32_t tokens) {
    layer_tokens_[static_cast<size_t>(slot) * config_->layout.num_layers + layer] = tokens;
  }
  void set_complete(int32_t slot);

 private:
  struct Entry {
    uint32_t generation = 0;
    SequencePhase phase = SequencePhase::kFree;
  };
  // Without repetition.
  Result<Slots> slots_of(SequenceList list) const;
  Result<Slots> slots_of(SequenceList list, SequencePhase phase) const;
  Status require_phase(int32_t slot, SequencePhase phase) const;
  Status require_complete(int32_t slot) const;
  Status require_layer(const Slots& slots, int32_t layer) const;
  Status require_room(const Slots& slots, int32_t tokens) const;
  Status require_stride(const Slots& slots, int64_t stride) const;
  Status require_queries(const Slots& slots, int32_t q_len) const;

  const KvStoreConfig* config_;
  std::vector<Entry> entries_;
  std::vector<SequenceInfo> infos_;
  std::vector<int32_t> layer_tokens_;  // [max_sequences][num_layers]
};

}  // namespace tierkv
