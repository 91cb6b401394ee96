// SPDX-License-Identifier: Apache-2.0
// A store in host memory beside its model: random calls, each checked.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "allocator/invariants.h"
#include "store/engine/engine.h"
#include "store/place/host_place.h"
#include "tests/engine/support/store_configs.h"
#include "tests/engine/support/store_model.h"

namespace tierkv {

// A store with its parts in reach.
struct OpenStore {
  store::HostPlace* place = nullptr;
  std::unique_ptr<KvStore> engine;

  explicit OpenStore(const StoreConfig& config);
};

// Tokens of the sequences of a call, all layers.
struct Chunks {
  int32_t count = 0, tokens = 0;
  std::vector<uint16_t> k, v;       // [layers, count, tokens, kv_heads, head_dim]
  std::vector<float> significance;  // [layers, count, kv_heads, tokens]; empty: none
};

class StoreWorld {
 public:
  StoreWorld(const StoreConfig& config, uint32_t seed);

  // One random call or round of calls.
  void step();
  // Everything that is held, against the model; laws of pages.
  void check_all();

  OpenStore& open_store() { return store_; }
  int64_t out_of_pages() const { return out_of_pages_; }
  int64_t calls() const { return calls_; }
  // Seen by check_all(): body tokens that are coded.
  int64_t coded_tokens() const { return coded_tokens_; }

 private:
  struct Live {
    SequenceId id;
    model::Sequence layers;
  };
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(rng_) < p; }
  void expect_ok(const Status& s) {
    ++calls_;
    EXPECT_TRUE(s) << status_name(s.code()) << ": " << s.message();
  }
  // Whether it is kOutOfPages; anything else must be ok.
  bool is_short(const Status& s);

  void add();
  void extend();
  // The sequences at these places of live_ get the chunk, or give it up.
  void append_all(const std::vector<int32_t>& places, const Chunks& chunks);
  void give_up(const std::vector<int32_t>& places, int32_t tokens_before);
  void attend(int32_t layer, const std::vector<int32_t>& places);
  void fork();
  void truncate();
  void release(int32_t place);
  void move();  // export, release, import
  void refuse();
  void check_range(const Live& live, int32_t layer, int32_t first, int32_t end);
  void check_answers(const LayerAttend& call, const std::vector<int32_t>& places);
  Chunks make_chunks(int32_t count, int32_t tokens);

  StoreConfig config_;
  std::mt19937 rng_;
  OpenStore store_;
  model::CodedModel model_;
  std::vector<Live> live_;
  std::vector<uint16_t> pool_;  // random elements of the config's type
  InvariantChecker invariants_;
  int64_t out_of_pages_ = 0, calls_ = 0, coded_tokens_ = 0;
};

}  // namespace tierkv
