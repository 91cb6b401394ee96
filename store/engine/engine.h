// SPDX-License-Identifier: Apache-2.0
// Every call of a store, once for all formats and places: admit, let the place do it, commit.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "store/engine/sequences.h"
#include "store/place/place.h"
#include "tierkv/allocator.h"
#include "tierkv/kv_store.h"

namespace tierkv::store {

class Engine {
 public:
  // The config is valid and outlived by the engine's own copy.
  Engine(const StoreConfig& config, const TokenLaws& laws);
  // Before all other calls.
  void set_place(std::unique_ptr<Place> place) { place_ = std::move(place); }

  const StoreConfig& config() const { return config_; }
  const TokenLaws& laws() const { return laws_; }
  const Place& place() const { return *place_; }

  Result<SequenceId> add_sequence();
  Status begin(SequenceList sequences, int32_t tokens);
  Status append(const LayerAppend& call);
  Status attend(const LayerAttend& call);
  Status decode_range(const LayerRange& range);
  Status note_replay(SequenceList sequences, int32_t tokens);
  Status take_status() { return place_->take_status(); }
  Result<SequenceId> fork(SequenceId source);
  Status truncate(SequenceId sequence, int32_t tokens);
  Status release(SequenceId sequence);
  Result<int32_t> num_tokens(SequenceId sequence) const;
  Result<int64_t> bytes_held(SequenceId sequence) const;
  Result<StoreUsage> usage() const;
  Result<std::vector<uint8_t>> export_sequence(SequenceId sequence);
  Status export_sequence(SequenceId sequence, const ExportTarget& target);
  Result<SequenceId> import_sequence(const uint8_t* bytes, size_t size);

 private:
  StoreConfig config_;
  TokenLaws laws_;
  Sequences sequences_;
  std::unique_ptr<Place> place_;
  LayerMoves moves_;  // of the call under way
};

// With what it takes from its profile.
StoreConfig resolve(const StoreConfig& config);

// What the config makes of the memory: kOutOfRange where it is too little.
struct StoreLayout {
  TokenLaws laws;
  RawLayout raw;
  int64_t raw_bytes = 0;    // of a (sequence, layer): raw rows
  int64_t layer_bytes = 0;  // with the format's state
  int64_t slot_bytes = 0;   // of a sequence
  AllocatorShape allocator;
  int64_t page_bytes = 0;
};
class RowFormat;
Result<StoreLayout> store_layout(const StoreConfig& config, const RowFormat& format);

}  // namespace tierkv::store
