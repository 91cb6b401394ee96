// SPDX-License-Identifier: Apache-2.0
// A store of tiers in host memory beside its model: random calls, each checked.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "allocator/invariants.h"
#include "tests/engine/support/store_world.h"
#include "tests/engine/support/tiers_model.h"

namespace tierkv {

// Three classes, one of which prunes; a profile's key means; a raw layer where `raw` says so.
StoreConfig tiers_config(int32_t head_dim, int32_t pages, bool raw, std::mt19937* rng);

// Random tokens of one call.
struct TiersChunk {
  int32_t tokens = 0;
  std::vector<uint16_t> k, v;       // [layers, tokens, kv_heads, head_dim]
  std::vector<float> significance;  // [layers, kv_heads, tokens]; empty: none
};
TiersChunk tiers_chunk(const StoreConfig& config, int32_t tokens, bool significance,
                       std::mt19937* rng);

class TiersWorld {
 public:
  TiersWorld(const StoreConfig& config, uint32_t seed)
      : config_(config), rng_(seed), store_(config_), model_(config_) {}

  void step();
  // All that is held, and the laws of pages.
  void check_all();

  int64_t out_of_pages() const { return out_of_pages_; }
  int64_t pruned() const { return pruned_; }

 private:
  struct Live {
    SequenceId id;
    model::TiersSequence layers;
  };
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
  Live& any() { return live_[pick(0, static_cast<int32_t>(live_.size()) - 1)]; }
  bool is_short(const Status& s);

  void extend(Live* live);
  void attend(Live* live, int32_t layer);
  void fork();
  void truncate(Live* live);
  void release(size_t place);
  void move(Live* live);  // export, release, import
  void check_layer(const Live& live, int32_t layer);

  StoreConfig config_;
  std::mt19937 rng_;
  OpenStore store_;
  model::TiersModel model_;
  std::vector<Live> live_;
  InvariantChecker invariants_;
  int64_t out_of_pages_ = 0, pruned_ = 0;
};

}  // namespace tierkv
