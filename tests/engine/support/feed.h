// SPDX-License-Identifier: Apache-2.0
// The tokens of one sequence, given to stores in chunks of any length.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "codec/format/element.h"
#include "tests/engine/support/store_world.h"

namespace tierkv {

struct Feed {
  CacheLayout layout;
  int32_t tokens = 0;
  std::vector<uint16_t> k, v, q;    // [layers, tokens, heads, head_dim]
  std::vector<float> significance;  // [layers, kv_heads, tokens]

  Feed(const CacheLayout& shape, int32_t count, std::mt19937* rng) : layout(shape), tokens(count) {
    std::normal_distribution<float> normal;
    const int64_t rows = int64_t{shape.num_layers} * count;
    const auto fill = [&](int32_t heads, std::vector<uint16_t>* x) {
      for (int64_t i = 0; i < rows * heads * shape.head_dim; ++i) {
        x->push_back(float_to_raw(shape.dtype, normal(*rng)));
      }
    };
    fill(shape.num_kv_heads, &k);
    fill(shape.num_kv_heads, &v);
    fill(shape.num_q_heads, &q);
    std::uniform_real_distribution<float> uniform(0, 0.01f);
    for (int64_t i = 0; i < rows * shape.num_kv_heads; ++i) significance.push_back(uniform(*rng));
  }

  // Tokens first .. first + count - 1 of a layer.
  LayerAppend call(const SequenceId& id, int32_t layer, int32_t first, int32_t count) const {
    const int64_t at = (int64_t{layer} * tokens + first) * layout.head_dim;
    LayerAppend append;
    append.sequences = {&id, 1};
    append.layer = layer;
    append.tokens = count;
    append.k = k.data() + at * layout.num_kv_heads;
    append.v = v.data() + at * layout.num_kv_heads;
    return append;
  }
  Status give(KvStore* engine, const SequenceId& id, int32_t first, int32_t count) const {
    Status s = engine->begin({&id, 1}, count);
    for (int32_t l = 0; s && l < layout.num_layers; ++l)
      s = engine->append(call(id, l, first, count));
    return s;
  }
};

// A store with one sequence.
struct OneSequence {
  OpenStore store;
  SequenceId id;

  explicit OneSequence(const StoreConfig& config)
      : store(config), id(*store.engine->add_sequence()) {}
  // That has the first tokens of the feed.
  OneSequence(const StoreConfig& config, const Feed& feed, int32_t tokens) : OneSequence(config) {
    const Status s = feed.give(store.engine.get(), id, 0, tokens);
    EXPECT_TRUE(s) << s.message();
  }
  // The moves of a sequence that got these tokens as one chunk.
  store::LayerMoves layers(int32_t tokens) const {
    store::LayerMoves moves;
    const store::LayerTokens at = store::after_append(store.place->laws(), {}, tokens);
    for (int32_t l = 0; l < store.engine->config().layout.num_layers; ++l) {
      moves.push_back({id.slot, l, at, at});
    }
    return moves;
  }
  std::vector<uint8_t> bytes() {
    Result<std::vector<uint8_t>> exported = store.engine->export_sequence(id);
    EXPECT_TRUE(exported) << exported.status().message();
    return std::move(*exported);
  }
};

}  // namespace tierkv
