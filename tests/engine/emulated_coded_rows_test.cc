// SPDX-License-Identifier: Apache-2.0
// Coded rows in device memory against those in host memory, by random calls of a store.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/support/coded_shadow.h"
#include "tests/engine/support/feed.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store {
namespace {

// A store with a shadow and random calls.
class World {
 public:
  World(const StoreConfig& config, std::mt19937* rng, test::Seen* seen)
      : config_(config), rng_(*rng), store_(config, rng, seen), engine_(store_.engine.get()) {}
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }

  // A sequence with a body, every kind of call once.
  void begin() {
    const Result<SequenceId> id = store_.add();
    ASSERT_TRUE(id);
    live_.push_back(*id);
    extend(300 + pick(0, 60));
    if (live_.empty()) return;
    attend();
    read();
    ASSERT_TRUE(engine_->truncate(*id, 200 + pick(0, 60)));
  }
  void step() {
    const int32_t kind = pick(0, 19);
    if (live_.empty() || (kind == 0 && live_.size() < 3)) {
      const Result<SequenceId> id = store_.add();
      if (id) live_.push_back(*id);
    } else if (kind < 13) {
      extend(pick(0, 1) == 0 ? pick(1, kMaxStepTokens) : pick(1, 150));
    } else if (kind < 15) {
      read();
    } else if (kind == 15) {
      attend();
    } else if (kind < 18) {
      const SequenceId from = live_[pick(0, static_cast<int32_t>(live_.size()) - 1)];
      const Result<SequenceId> to = engine_->fork(from);
      if (to) store_.rows->fork(from.slot, to->slot), live_.push_back(*to);
    } else {
      const size_t i = static_cast<size_t>(pick(0, static_cast<int32_t>(live_.size()) - 1));
      const int32_t tokens = *engine_->num_tokens(live_[i]);
      const bool release = pick(0, 3) == 0;
      const Status s = release ? engine_->release(live_[i])
                               : engine_->truncate(live_[i], pick(tokens / 2, tokens));
      ASSERT_TRUE(s) << s.message();
      if (release) live_.erase(live_.begin() + static_cast<int64_t>(i));
    }
  }

 private:
  void extend(int32_t tokens) {
    std::vector<SequenceId> ids;
    for (const SequenceId& id : live_) {
      if (ids.empty() || pick(0, 1) == 0) ids.push_back(id);
    }
    int32_t longest = 0;
    for (const SequenceId& id : ids) longest = std::max(longest, *engine_->num_tokens(id));
    tokens = std::min(tokens, config_.max_tokens - longest);
    if (tokens < 1) return release_all();
    const SequenceList list = {ids.data(), static_cast<int32_t>(ids.size())};
    const Status begun = engine_->begin(list, tokens);
    if (!begun) return release_all();
    const CacheLayout& shape = config_.layout;
    const int64_t elements =
        static_cast<int64_t>(ids.size()) * tokens * shape.num_kv_heads * shape.head_dim;
    std::normal_distribution<float> normal;
    // Blocks of many outliers have their elements as they are.
    const uint32_t apart = pick(0, 2) == 0 ? 5 : 997;
    for (int32_t l = 0; l < shape.num_layers; ++l) {
      std::vector<uint16_t> k, v;
      for (int64_t i = 0; i < elements; ++i) {
        const float outlier = rng_() % apart == 0 ? 40.0f : 1.0f;
        k.push_back(float_to_raw(shape.dtype, outlier * normal(rng_)));
        v.push_back(float_to_raw(shape.dtype, outlier * normal(rng_)));
      }
      std::vector<float> significance;
      for (int64_t i = 0; i < elements / shape.head_dim; ++i) {
        significance.push_back(rng_() % 20 == 0 ? 0.0f : std::exp2(3 * normal(rng_) - 6));
      }
      LayerAppend call;
      call.sequences = list;
      call.layer = l, call.tokens = tokens;
      call.k = k.data(), call.v = v.data();
      if (pick(0, 2) != 0) call.significance = significance.data(), call.stride = tokens;
      const Status s = engine_->append(call);
      if (!s) {
        EXPECT_TRUE(s.code() == StatusCode::kOutOfPages || s.code() == StatusCode::kOutOfRange)
            << s.message();
        return release_all();
      }
    }
  }
  void attend() {
    const CacheLayout& shape = config_.layout;
    if (shape.head_dim != 64 && shape.head_dim != 128) return;
    std::vector<int32_t> slots;
    for (const SequenceId& id : live_) {
      if (slots.empty() || pick(0, 2) > 0) slots.push_back(id.slot);
    }
    std::shuffle(slots.begin(), slots.end(), rng_);
    store_.rows->attend(slots, pick(0, shape.num_layers - 1), pick(0, 1) == 0 ? 1 : pick(2, 5));
  }
  void read() {
    const SequenceId id = live_[pick(0, static_cast<int32_t>(live_.size()) - 1)];
    const int32_t tokens = *engine_->num_tokens(id);
    if (tokens == 0) return;
    LayerRange range;
    range.sequence = id;
    range.layer = pick(0, config_.layout.num_layers - 1);
    range.first = pick(0, tokens - 1), range.end = pick(range.first + 1, tokens);
    std::vector<uint16_t> x[2];
    for (auto& of : x) {
      of.resize(static_cast<size_t>(tokens) * config_.layout.num_kv_heads *
                config_.layout.head_dim);
    }
    range.k = x[0].data(), range.v = x[1].data();
    ASSERT_TRUE(engine_->decode_range(range));
  }
  void release_all() {
    for (const SequenceId& id : live_) ASSERT_TRUE(engine_->release(id));
    live_.clear();
  }

  StoreConfig config_;
  std::mt19937& rng_;
  test::ShadowedStore store_;
  KvStore* engine_;
  std::vector<SequenceId> live_;
};

class EmulatedCodedRows : public RandomTest {
 protected:
  StoreConfig config(int32_t head_dim, int32_t unit, bool profile, int32_t layers = 2) {
    ConfigChoice choice;
    choice.head_dim = head_dim;
    choice.num_kv_heads = head_dim > 96 || layers > 2 ? 1 : 2;
    choice.num_layers = layers;
    choice.with_profile = profile;
    choice.max_tokens = 480;
    choice.max_sequences = 3;
    choice.pages = (rng_() % 3 == 0 ? 15 : 100) * layers;
    StoreConfig c = make_config(choice);
    c.sink_tokens = std::vector<int32_t>{0, 3, 4, 15, 16}[rng_() % 5];
    c.window_tokens = rng_() % 2 == 0 ? 8 : 30;
    if (rng_() % 3 == 0) c.raw_layers = {1};
    if (rng_() % 2 == 0) c.layout.dtype = DType::kBFloat16;
    auto& format = std::get<CodedFormat>(c.format);
    format.unit_tokens = unit;
    format.max_length = 8 + static_cast<int32_t>(rng_() % 3);
    format.streams_per_lane = 1 + static_cast<int32_t>(rng_() % 2);
    give_pages(choice.pages, &c);
    return c;
  }
  void run(const StoreConfig& config, int32_t steps) {
    SCOPED_TRACE("head_dim " + std::to_string(config.layout.head_dim) + " unit " +
                 std::to_string(std::get<CodedFormat>(config.format).unit_tokens) + " sinks " +
                 std::to_string(config.sink_tokens) + " window " +
                 std::to_string(config.window_tokens) +
                 (config.profile == nullptr ? "" : " profile"));
    World world(config, &rng_, &seen_);
    world.begin();
    for (int32_t i = 0; i < steps && !HasFailure(); ++i) world.step();
  }
  test::Seen seen_;
};

TEST_F(EmulatedCodedRows, WholeBlocksWithAProfile) {
  for (const int32_t head_dim : {64, 96, 128, 256}) run(config(head_dim, 64, true), 25);
  EXPECT_GT(seen_.blocks, 100);
  EXPECT_GT(seen_.answers, 0);
  EXPECT_GT(seen_.given_up, 0);
}

TEST_F(EmulatedCodedRows, BlocksThatAreContinued) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t unit : {16, 32}) run(config(head_dim, unit, true), 25);
  }
  EXPECT_GT(seen_.continued, 10);
  EXPECT_GT(seen_.captured, 0);
  EXPECT_GT(seen_.reads, 0);
  EXPECT_GT(seen_.restored, 0);
  EXPECT_GT(seen_.answers, 0);
}

// More layers than a warp has lanes.
TEST_F(EmulatedCodedRows, OfManyLayers) {
  run(config(64, 16, true, 33 + static_cast<int32_t>(rng_() % 38)), 8);
  EXPECT_GT(seen_.blocks, 0);
}

TEST_F(EmulatedCodedRows, StepsOutOfASequencesOwnTokens) {
  for (const int32_t head_dim : {64, 128}) {
    for (const int32_t unit : {16, 64}) run(config(head_dim, unit, false), 25);
  }
  EXPECT_GT(seen_.blocks, 100);
  EXPECT_GT(seen_.answers, 0);
}

}  // namespace
}  // namespace tierkv::store
