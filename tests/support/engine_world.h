// SPDX-License-Identifier: Apache-2.0
// A batch of sequences in an engine's blocks with ragged queries, and exact attention over their
// keys and values.
#pragma once

#include <cmath>
#include <vector>

#include "tests/support/block_world.h"
#include "tierkv/engine.h"

namespace tierkv::test {

struct EngineShape {
  BlockShape blocks;
  int32_t group = 4;
  int32_t max_queries = 1;
  std::vector<int32_t> queries;    // of each sequence; fewer than its tokens, or as many
  std::vector<int32_t> sequences;  // of the batch; empty: all in order
  bool lse_by_heads = false;       // [num_q_heads, num_tokens] instead of [num_tokens, num_q_heads]
};

struct EngineWorld {
  EngineShape shape;
  BlockWorld w;
  EngineConfig config;
  std::vector<int32_t> starts;  // [sequences + 1]
  std::vector<int32_t> lens;
  std::vector<uint16_t> q, out;
  std::vector<float> lse;

  EngineWorld(const EngineShape& s, std::mt19937& rng) : shape(s), w(s.blocks, rng) {
    config.num_kv_heads = s.blocks.num_kv_heads;
    config.num_q_heads = s.blocks.num_kv_heads * s.group;
    config.head_dim = s.blocks.head_dim;
    config.format = w.format;
    config.rotate = s.blocks.rotate;
    config.dtype = s.blocks.dtype;
    config.sm_scale = 1 / std::sqrt(static_cast<double>(s.blocks.head_dim));
    config.block_tokens = s.blocks.block_tokens;
    config.max_sequences = static_cast<int32_t>(std::max(s.queries.size(), s.sequences.size()));
    config.max_queries = s.max_queries;
    config.max_blocks = w.columns;
    starts = {0};
    for (const int32_t n : s.queries) starts.push_back(starts.back() + n);
    lens = s.blocks.tokens;
    std::normal_distribution<float> normal;
    q.resize(num_tokens() * config.num_q_heads * config.head_dim);
    for (uint16_t& x : q) x = float_to_raw(config.dtype, normal(rng));
    out.assign(q.size(), 0x7fff);
    lse.assign(num_tokens() * config.num_q_heads, -77);
  }

  int64_t num_tokens() const { return starts.back(); }
  EngineLayer layer() const {
    return {w.cache.base, w.cache.block_stride, w.cache.num_blocks, w.cache.key_reflection};
  }
  EngineBatch batch() const {
    EngineBatch b;
    b.block_table = w.table.data();
    b.table_columns = w.columns;
    b.num_sequences = static_cast<int32_t>(lens.size());
    b.seq_lens = lens.data();
    b.sequences = shape.sequences.empty() ? nullptr : shape.sequences.data();
    b.count = static_cast<int32_t>(shape.sequences.empty() ? lens.size() : shape.sequences.size());
    b.query_start_loc = starts.data();
    b.queries = shape.max_queries;
    b.block_stride = w.cache.block_stride;
    b.num_blocks = w.cache.num_blocks;
    return b;
  }
  EngineAttend call() {
    EngineAttend c;
    c.batch = batch();
    c.layer = layer();
    c.q = q.data();
    c.out = out.data();
    c.lse = lse.data();
    if (shape.lse_by_heads) c.lse_strides = {1, num_tokens()};
    c.num_tokens = num_tokens();
    c.errors = w.errors.data();
    return c;
  }
  double lse_at(int64_t token, int32_t head) const {
    return shape.lse_by_heads ? lse[head * num_tokens() + token]
                              : lse[token * config.num_q_heads + head];
  }
  double value(const std::vector<uint16_t>& x, int64_t i) const {
    return raw_to_float(config.dtype, x[i]);
  }

  struct Exact {
    std::vector<double> out;
    double lse;
  };
  // Query `token` of q, which sequence s has at place j, over its tokens [from, its own].
  Exact exact(int32_t s, int32_t j, int32_t head, int32_t from = 0) const {
    const int32_t dim = config.head_dim, kv_head = head / shape.group;
    const int64_t token = starts[s] + j;
    const int32_t end = lens[s] - (starts[s + 1] - starts[s]) + j + 1;
    std::vector<double> logits;
    double largest = -INFINITY, sum = 0;
    for (int32_t t = from; t < end; ++t) {
      double dot = 0;
      for (int32_t d = 0; d < dim; ++d) {
        dot += value(q, (token * config.num_q_heads + head) * dim + d) *
               value(w.k, (w.first[s] + t) * w.head_elements() + kv_head * dim + d);
      }
      logits.push_back(dot * config.sm_scale);
      largest = std::max(largest, logits.back());
    }
    Exact e{std::vector<double>(dim, 0.0), -INFINITY};
    for (const double l : logits) sum += std::exp(l - largest);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double p = std::exp(logits[i] - largest) / sum;
      for (int32_t d = 0; d < dim; ++d) {
        e.out[d] +=
            p * value(w.v, (w.first[s] + from + static_cast<int64_t>(i)) * w.head_elements() +
                               kv_head * dim + d);
      }
    }
    if (sum > 0) e.lse = largest + std::log(sum);
    return e;
  }
};

}  // namespace tierkv::test
