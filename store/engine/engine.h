// SPDX-License-Identifier: Apache-2.0
// Every call of a store, once for all formats and places: admit, let the place do it, commit.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "store/engine/sequences.h"
#include "store/place/place.h"
#include "tierkv/allocator.h"
#include "tierkv/kv_store.h"

namespace tierkv::store {

class Engine {
 public:
  Engine(const StoreConfig& of_config, std::unique_ptr<Place> of_place)
      : config(of_config),
        place(std::move(of_place)),
        sequences(config, place->laws()),
        identity(place->identity()) {}
  // The config is valid.
  static std::unique_ptr<KvStore> make(const StoreConfig& config, std::unique_ptr<Place> place);

  StoreConfig config;
  std::unique_ptr<Place> place;
  Sequences sequences;
  std::vector<uint8_t> identity;
  LayerMoves moves;  // of the call under way
};

// With what it takes from its profile.
StoreConfig resolve(const StoreConfig& config);

// What the config makes of the memory: kOutOfRange where it is too little.
struct StoreLayout : RawRows {
  int64_t raw_bytes = 0;    // of a (sequence, layer): raw rows
  int64_t layer_bytes = 0;  // with the format's state
  int64_t slot_bytes = 0;   // of a sequence
  AllocatorShape allocator;
  int64_t page_bytes = 0;
};
class RowFormat;
Result<StoreLayout> store_layout(const StoreConfig& config, const RowFormat& format);

}  // namespace tierkv::store
