// SPDX-License-Identifier: Apache-2.0
// Random caches for the attention tests: pages of quantised random tokens scattered over a pool,
// tables, queries.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tests/support/attention_reference.h"
#include "tierkv/attention.h"

namespace tierkv::test {

struct WorldShape {
  int32_t num_layers = 1;
  int32_t num_kv_heads = 2;
  int32_t group = 4;
  int32_t head_dim = 128;
  int64_t page_bytes = 0;  // 0: chosen for the formats
  bool page_records = true;
  std::vector<AttentionTier> tiers;
  // Formats of the classes of kv_heads behind the first, by tier. Heads are of random classes.
  std::vector<std::vector<TierFormat>> classes;
  // tokens[sequence][tier], of every kv_head; jittered by up to `jitter` tokens per row where it is
  // not 0
  std::vector<std::vector<int32_t>> tokens;
  int32_t jitter = 0;
  int32_t q_len = 1;
  DType dtype = DType::kFloat16;
  double query_scale = 1;
  double sm_scale = 0;  // 0: 1 / sqrt(head_dim)
  AttentionTail tail;   // but for `newest`
  std::vector<int32_t> newest;
  double value_scale = 1;
  double key_scale = 1;
  double sink_scale = 0;  // of the learned sinks, of which a few are none; 0: no sinks
  // Where not empty, the tokens of the one sequence, in the order of the tiers, and its queries, in
  // place of random ones: [num_kv_heads, tokens, head_dim] and [q_len, q_heads, head_dim].
  std::vector<float> keys, values, queries;
};

// Everything in host memory.
struct World {
  AttentionConfig config;
  std::vector<uint8_t> head_classes;  // [num_layers, num_kv_heads], of the config
  std::vector<uint8_t> pool_bytes;    // pages start at the first multiple of kPageAlignment
  std::vector<int32_t> slots;
  std::vector<SideCounts> tokens;
  std::vector<uint16_t> q;  // [sequences, q_len, q_heads, head_dim]
  std::vector<int32_t> newest;
  AttentionTail tail;        // of host memory
  std::vector<float> sinks;  // [q_heads] or empty
  PageTableShape table_shape;
  int32_t num_pages = 0;

  PageView pages();
  PageTableView table() const { return {table_shape, slots.data(), tokens.data(), nullptr}; }
  int32_t sequences() const { return table_shape.num_sequences; }
  // A call on layer 0, all sequences in order.
  AttendCall call();
};

// Unused bytes of the pool are 0xff: NaN wherever they are read as numbers.
World make_world(const WorldShape& shape, std::mt19937_64& rng);

// ||a - b|| / ||b||; NaN anywhere gives NaN.
double relative_error(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace tierkv::test
