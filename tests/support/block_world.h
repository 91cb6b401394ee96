// SPDX-License-Identifier: Apache-2.0
// Random caches of an engine with block tables: keys and values of sequences, their blocks in
// random order, and the slots of their tokens.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "codec/format/block_cache.h"
#include "codec/format/element.h"

namespace tierkv::test {

struct BlockShape {
  std::string format = "k4v4";
  int32_t head_dim = 128;
  int32_t num_kv_heads = 2;
  int32_t block_tokens = 64;
  bool rotate = true;
  bool has_reflections = true;
  int32_t layers_apart = 1;  // blocks of so many layers lie side by side
  DType dtype = DType::kFloat16;
  std::vector<int32_t> tokens;  // of each sequence
};

struct BlockWorld {
  BlockShape shape;
  TierFormat format;
  BlockCache cache;
  std::vector<uint8_t> bytes;      // poisoned: NaN wherever they are read as numbers
  std::vector<float> reflections;  // [kv_heads, head_dim], of the means of keys
  std::vector<uint16_t> k, v;      // [all tokens, kv_heads, head_dim] of dtype
  std::vector<int32_t> first;      // token of each sequence's first one in k and v
  std::vector<int32_t> table;      // [sequences, columns]
  std::vector<int32_t> errors = std::vector<int32_t>(kEngineErrors, 0);
  int32_t columns = 0;

  BlockWorld(const BlockWorld&) = delete;
  BlockWorld& operator=(const BlockWorld&) = delete;
  BlockWorld(const BlockShape& s, std::mt19937& rng)
      : shape(s), format(*parse_tier_format(s.format)) {
    PageShape page = *page_shape(format, s.head_dim);
    page.tokens = s.block_tokens;
    page.records = false;
    cache.layout = page_layout(page);
    cache.page_bytes =
        (cache.layout.used_bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
    cache.block_stride = int64_t{s.layers_apart} * s.num_kv_heads * cache.page_bytes;
    cache.num_kv_heads = s.num_kv_heads;
    cache.rule[0] = format.k.step_rule;
    cache.rule[1] = format.v.step_rule;
    cache.raw_dtype = s.dtype;
    if (s.rotate) cache.rotation = hadamard_rotation(s.head_dim);
    fill_blocks(rng);
    fill_tokens(rng);
  }

  int64_t slot(int32_t sequence, int32_t token) const {
    return int64_t{table[sequence * columns + token / shape.block_tokens]} * shape.block_tokens +
           token % shape.block_tokens;
  }
  int64_t head_elements() const { return int64_t{shape.num_kv_heads} * shape.head_dim; }
  const uint16_t* key(int64_t token) const { return k.data() + token * head_elements(); }

  // Tokens of k and v, which are given by row and slot.
  struct Tokens {
    std::vector<uint16_t> k, v;
    std::vector<int64_t> slots;
  };
  void add(Tokens* to, int32_t sequence, int32_t token) const {
    const int64_t from = (first[sequence] + token) * head_elements();
    to->k.insert(to->k.end(), k.begin() + from, k.begin() + from + head_elements());
    to->v.insert(to->v.end(), v.begin() + from, v.begin() + from + head_elements());
    to->slots.push_back(slot(sequence, token));
  }
  SlotEncode encode(const Tokens& t) {
    SlotEncode e;
    e.cache = cache;
    e.k = t.k.data();
    e.v = t.v.data();
    e.k_strides = e.v_strides = {head_elements(), shape.head_dim};
    e.dtype = shape.dtype;
    e.slots = t.slots.data();
    e.count = static_cast<int64_t>(t.slots.size());
    e.errors = errors.data();
    return e;
  }
  // All tokens of all sequences.
  void encode_all() {
    Tokens all;
    for (size_t s = 0; s < shape.tokens.size(); ++s) {
      for (int32_t t = 0; t < shape.tokens[s]; ++t) add(&all, static_cast<int32_t>(s), t);
    }
    ASSERT_TRUE(encode_slots_host(encode(all)));
  }
  // A copy of the cache's bytes to be written by something else.
  std::vector<uint8_t> other_bytes() const { return bytes; }
  BlockCache other_cache(std::vector<uint8_t>* other) const {
    BlockCache c = cache;
    c.base = aligned(other);
    return c;
  }

 private:
  static uint8_t* aligned(std::vector<uint8_t>* x) {
    const auto at = reinterpret_cast<uintptr_t>(x->data());
    return x->data() + (kPageAlignment - at % kPageAlignment) % kPageAlignment;
  }

  void fill_blocks(std::mt19937& rng) {
    int32_t used = 0;
    for (const int32_t n : shape.tokens) {
      columns = std::max(columns, (n + shape.block_tokens - 1) / shape.block_tokens);
      used += (n + shape.block_tokens - 1) / shape.block_tokens;
    }
    columns += 1;
    cache.num_blocks = used + 2;  // some belong to nobody
    bytes.assign(cache.num_blocks * cache.block_stride + kPageAlignment, 0xff);
    cache.base = aligned(&bytes);
    std::vector<int32_t> free(cache.num_blocks);
    std::iota(free.begin(), free.end(), 0);
    std::shuffle(free.begin(), free.end(), rng);
    table.assign(shape.tokens.size() * columns, -7);  // read by nobody
    for (size_t s = 0; s < shape.tokens.size(); ++s) {
      for (int32_t c = 0; c * shape.block_tokens < shape.tokens[s]; ++c) {
        table[s * columns + c] = free.back();
        free.pop_back();
      }
    }
  }

  void fill_tokens(std::mt19937& rng) {
    std::normal_distribution<float> normal;
    std::vector<float> means(head_elements());
    for (float& m : means) m = 2 * normal(rng);
    if (rng() % 4 == 0) std::fill(means.begin(), means.begin() + shape.head_dim, 0.0f);
    reflections.resize(head_elements());
    ASSERT_TRUE(key_reflections(cache.rotation, means.data(), shape.num_kv_heads, shape.head_dim,
                                reflections.data()));
    if (shape.has_reflections) cache.key_reflection = reflections.data();
    int32_t tokens = 0;
    for (const int32_t n : shape.tokens) {
      first.push_back(tokens);
      tokens += n;
    }
    for (std::vector<uint16_t>* x : {&k, &v}) {
      x->resize(tokens * head_elements());
      for (size_t i = 0; i < x->size(); ++i) {
        const float mean = x == &k ? means[i % head_elements()] : 0;
        (*x)[i] = float_to_raw(shape.dtype, mean + normal(rng));
      }
    }
  }
};

}  // namespace tierkv::test
