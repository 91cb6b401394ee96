// SPDX-License-Identifier: Apache-2.0
// What queries decide, between two stores that get the same calls.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/gpu/store/kv_store_twins.cuh"
#include "tierkv/container.h"
#include "tierkv/significance.h"

namespace tierkv::testing {

// Attention that counts its queries, before each two of 16 more tokens than `tokens`: what was
// counted decides those that leave the window. No significances: a token that has one is decided
// whatever was counted of it. Measured with two stores in host memory, in 60 seeds of each of
// three shapes: if one counts nothing, more rows than the bound are decided in another way in 59
// or 60 seeds (with significances in 24 to 38). If its queries are rounded in another way, 3 are
// at most, in a tie: the first score that a row averages has a ratio of 1, which is alpha_high.
inline void expect_counted(KvTwins* t, int32_t tokens) {
  t->leave_out_significances();
  t->add();
  const int32_t first = std::max(0, tokens - 100);
  t->extend({0}, tokens);
  int32_t others = 0;
  for (int32_t i = 0; i < 8 && !::testing::Test::HasFatalFailure(); ++i) {
    t->extend({0}, 2);
    others += t->adopt(0, 0, first, tokens + 2 * i + 2);
    t->attend({0}, 0, i % 2 == 0 ? 1 : 2, DType::kFloat16, true);
    t->attend({0}, 1, 1, DType::kBFloat16, true);
  }
  EXPECT_LE(others, 2 * t->device().config().layout.num_kv_heads);
  KvTwins::expect_ok(t->device().take_status());
}

// What an exported sequence says of its raw tokens, 4 bytes each: pairs of values, and what was
// counted.
inline std::vector<uint32_t> raw_words(const std::vector<uint8_t>& bytes) {
  const auto reader = ContainerReader::from_bytes(bytes, "sequence");
  std::vector<uint32_t> words;
  for (size_t c = 0; c < reader->chunks().size(); ++c) {
    if (reader->chunks()[c].key.kind != ChunkKind::kStoreRow) continue;
    std::vector<uint8_t> payload;
    EXPECT_TRUE(reader->read(static_cast<int64_t>(c), &payload));
    words.resize(words.size() + payload.size() / 4);
    std::memcpy(&*words.end() - payload.size() / 4, payload.data(), payload.size() / 4 * 4);
  }
  return words;
}

// More queries than a step has count: both stores then have the same sums, but for the rounding of
// probabilities.
inline void expect_many_counted(KvTwins* t, int32_t tokens, int32_t q_len) {
  t->leave_out_significances();
  t->add();
  t->extend({0}, tokens);
  const KvTwins::Live& one = t->live()[0];
  const std::vector<uint32_t> before = raw_words(*t->device().export_sequence(one.device));
  t->attend({0}, 0, q_len, DType::kFloat16, true);
  const std::vector<uint32_t> a = raw_words(*t->host().export_sequence(one.host));
  const std::vector<uint32_t> b = raw_words(*t->device().export_sequence(one.device));
  KvTwins::expect_ok(t->device().take_status());
  ASSERT_EQ(a.size(), b.size());
  int32_t counted = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    counted += b[i] != before[i] ? 1 : 0;
    if (a[i] == b[i]) continue;
    // A sum of probabilities, whose logits are as exact as the lse; as a float a count would be
    // subnormal, and counts are equal.
    const float x = bits_float(a[i]), y = bits_float(b[i]);
    for (const float sum : {x, y}) ASSERT_TRUE(sum == 0 || std::isnormal(sum)) << "word " << i;
    ASSERT_NEAR(x, y, 0.02f * std::fabs(x) + 1e-6f) << "word " << i;
  }
  EXPECT_GE(counted, 2 * std::min(tokens - 4, 50));  // sums and counts of one head at least
}

struct QueryBuffers {
  Buffer q, starts, lse, scores;
};

// Finds the significances of the two sequences of a call, which has no queries yet, by the public
// calls.
inline float* found_before(KvTwins* t, const LayerAppend& a, const std::vector<uint16_t>& q,
                           int32_t query_stride, QueryBuffers* b) {
  const CacheLayout& l = t->device().config().layout;
  const int32_t n = a.tokens;
  SignificanceCall p;
  p.q = t->put(&b->q, q), p.k = a.k;
  p.starts = t->put(&b->starts, std::vector<int32_t>{0, n, 2 * n});
  p.q_head_stride = p.k_head_stride = l.head_dim;
  p.q_token_stride = int64_t{l.num_q_heads} * l.head_dim;
  p.k_token_stride = int64_t{l.num_kv_heads} * l.head_dim;
  p.num_sequences = 2, p.max_tokens = n, p.total_tokens = 2 * n;
  p.num_q_heads = l.num_q_heads, p.num_kv_heads = l.num_kv_heads, p.head_dim = l.head_dim;
  p.dtype = l.dtype, p.sm_scale = l.sm_scale, p.query_stride = query_stride;
  const size_t values = static_cast<size_t>(2) * l.num_kv_heads * n;
  float* const lse =
      t->put(&b->lse, std::vector<float>(static_cast<size_t>(2) * l.num_q_heads * n, NAN));
  KvTwins::expect_ok(prompt_lse(p, lse, t->stream()));
  KvTwins::expect_ok(prompt_significance(
      p, lse, t->put(&b->scores, std::vector<float>(values, NAN)), t->stream()));
  EXPECT_EQ(cudaStreamSynchronize(t->stream()), cudaSuccess);
  const std::vector<float> found = b->scores.read<float>(values);  // [num_kv_heads, 2, n]
  std::vector<float> ordered(values);
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t h = 0; h < l.num_kv_heads; ++h) {
      std::copy_n(found.begin() + (2 * h + i) * n, n,
                  ordered.begin() + (i * l.num_kv_heads + h) * n);
    }
  }
  return t->put(&b->scores, ordered);
}

// Sequences whose queries come along hold what they hold whose significances were found before.
// On the device alone, two sequences a call. Returns whether it differs from what they hold that
// come without.
inline bool expect_queries(KvTwins* t, int32_t tokens, int32_t query_stride) {
  t->leave_out_significances();
  const CacheLayout& l = t->device().config().layout;
  const TwinTokens x = t->draw(2, tokens);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> q(static_cast<size_t>(2) * tokens * l.num_q_heads * l.head_dim);
  for (uint16_t& e : q) e = float_to_raw(l.dtype, normal(t->rng()));
  QueryBuffers buffers;
  std::vector<std::vector<uint8_t>> held[3];
  for (const int32_t way : {0, 1, 2}) {
    SequenceId ids[2];
    for (SequenceId& id : ids) id = *t->device().add_sequence();
    KvTwins::expect_ok(t->device().begin({ids, 2}, tokens));
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      LayerAppend a = t->call({ids, 2}, layer, tokens, x, t);
      if (way == 0) a.q = t->put(&buffers.q, q), a.query_stride = query_stride;
      if (way == 1) a.significance = found_before(t, a, q, query_stride, &buffers);
      KvTwins::expect_ok(t->device().append(a));
    }
    for (const SequenceId id : ids) {
      held[way].push_back(*t->device().export_sequence(id));
      KvTwins::expect_ok(t->device().release(id));
    }
  }
  KvTwins::expect_ok(t->device().take_status());
  EXPECT_EQ(held[0], held[1]);
  return held[0] != held[2];
}

}  // namespace tierkv::testing
