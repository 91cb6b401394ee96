// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/attention_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace tierkv::analysis {
namespace {

// Blocks in any order, in two states that are merged, against softmax written out.
TEST(BlockAttention, MatchesSoftmaxWrittenOut) {
  const uint32_t seed = std::random_device{}();
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal(0, 2);
  const int32_t d = 48, tokens = 150;
  QueryTile tile;
  tile.heads = 3;
  tile.head_dim = d;
  tile.sm_scale = 0.3;
  tile.positions = {0, 17, 100, 149};
  tile.q.resize(tile.count() * d);
  std::vector<float> k(tokens * d), v(tokens * d);
  for (double& x : tile.q) x = normal(rng);
  for (float& x : k) x = static_cast<float>(normal(rng));
  for (float& x : v) x = static_cast<float>(normal(rng));

  BlockAttention block(tile);
  SoftmaxState a(tile.count(), d), b(tile.count(), d);
  for (const int32_t first : {128, 0, 64}) {
    const int32_t n = std::min(64, tokens - first);
    Visibility visible[64];
    for (int32_t t = 0; t < n; ++t) visible[t].first = first + t;
    block.load(k.data() + first * d, v.data() + first * d, n);
    block.add_to(first == 64 ? &b : &a, visible);
  }
  a.merge(b);
  std::vector<double> out(d, NAN);
  for (int64_t q = 0; q < tile.count(); ++q) {
    const int64_t p = tile.positions[q % 4];
    std::vector<double> expected(d, 0), w(p + 1);
    double sum = 0;
    for (int64_t t = 0; t <= p; ++t) {
      double dot = 0;
      for (int32_t i = 0; i < d; ++i) dot += tile.q[q * d + i] * k[t * d + i];
      sum += w[t] = std::exp(tile.sm_scale * dot);
    }
    for (int64_t t = 0; t <= p; ++t) {
      for (int32_t i = 0; i < d; ++i) expected[i] += w[t] / sum * v[t * d + i];
    }
    a.output(q, out.data());
    // Double throughout; logits reach about 100, so weights carry a relative error of 100 * 2^-52.
    for (int32_t i = 0; i < d; ++i) ASSERT_NEAR(out[i], expected[i], 1e-10) << "seed " << seed;
  }
}

TEST(BlockAttention, NothingSeenIsZero) {
  SoftmaxState s(1, 4), other(1, 4);
  s.merge(other);
  double out[4] = {1, 1, 1, 1};
  s.output(0, out);
  for (const double v : out) EXPECT_EQ(v, 0);
}

}  // namespace
}  // namespace tierkv::analysis
