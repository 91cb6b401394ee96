// SPDX-License-Identifier: Apache-2.0
// Ids of sequences and how many tokens each of their layers has: what calls are admitted by. The
// admit functions check everything about a call but the values it brings, and change nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "store/engine/tokens.h"
#include "store/place/place.h"
#include "tierkv/kv_store.h"
#include "tierkv/status.h"

namespace tierkv::store {

class Sequences {
 public:
  // The config must outlive the table.
  Sequences(const StoreConfig& config, const TokenLaws& laws);

  // The least free slot; kOutOfRange when there is none. Nothing is claimed.
  Result<int32_t> free_slot() const;
  SequenceId claim(int32_t slot);  // empty
  void release(int32_t slot);

  // kStaleSequence.
  Result<int32_t> slot_of(SequenceId id) const;
  // Also kInvalidArgument unless all layers have all tokens.
  Result<int32_t> complete_slot_of(SequenceId id) const;

  // One move for each layer of each sequence, all those of a sequence together. `moves` is scratch
  // of the caller that keeps its memory.
  Status admit_begin(SequenceList list, int32_t tokens, LayerMoves* moves) const;
  // One move for each sequence; to == from in attend().
  Status admit_append(const LayerAppend& call, LayerMoves* moves) const;
  Status admit_attend(const LayerAttend& call, LayerMoves* moves) const;
  Result<LayerMove> admit_range(const LayerRange& range) const;
  Status admit_truncate(SequenceId id, int32_t tokens, LayerMoves* moves) const;

  void commit(const LayerMoves& moves);                   // counts of layers
  void promise(const LayerMoves& moves, int32_t tokens);  // what begin() announced
  void set_tokens(int32_t slot, int32_t tokens) { entries_[slot].tokens = tokens; }

  int32_t tokens(int32_t slot) const { return entries_[slot].tokens; }
  // All layers of a slot, with nothing to move.
  LayerMoves layers_of(int32_t slot) const;
  LayerMoves all_layers() const;
  int32_t open_count() const { return open_; }

 private:
  struct Entry {
    uint32_t generation = 0;
    bool is_open = false;
    int32_t tokens = 0;  // that all layers have or were promised
  };
  Status require_layer(int32_t layer) const;
  Status require_complete(int32_t slot) const;
  Status lacks_tokens(int32_t slot, int32_t layer) const;  // the failure
  SequenceId id_at(int32_t slot) const { return {slot, entries_[slot].generation}; }
  // Slots of the list in `slots_`, none twice.
  Status find_slots(SequenceList list) const;
  size_t index_of(int32_t slot, int32_t layer) const {
    return static_cast<size_t>(slot) * config_->layout.num_layers + layer;
  }
  LayerTokens layer(int32_t slot, int32_t l) const { return layers_[index_of(slot, l)]; }
  LayerMove move_of(int32_t slot, int32_t l, LayerTokens to) const {
    return {slot, l, layer(slot, l), to, entries_[slot].generation};
  }

  const StoreConfig* config_;
  TokenLaws laws_;
  std::vector<Entry> entries_;
  std::vector<LayerTokens> layers_;  // [max_sequences][num_layers]
  int32_t open_ = 0;
  mutable std::vector<int32_t> slots_;       // scratch
  mutable std::vector<uint64_t> last_call_;  // [max_sequences] that named it
  mutable uint64_t call_ = 0;
};

}  // namespace tierkv::store
