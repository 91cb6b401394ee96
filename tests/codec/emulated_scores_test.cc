// SPDX-License-Identifier: Apache-2.0
// The kernels of a prompt's significance and log-sum-exp by mma.sync, on the host, against the
// reference in double.
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/format/element.h"
#include "codec/gpu/score_mma.cuh"
#include "codec/policy/significance.h"
#include "tierkv/significance.h"

namespace tierkv {

__align__(128) uint8_t score_stages[MmaShape<256>::kSharedBytes];

namespace {

// Derived in tests/gpu/codec/codec_scores_test.cu.
constexpr double kTolerance = 5e-4;

constexpr float kBefore = -7.5f;  // what the log-sum-exp of each query holds

struct Prompts {
  SignificanceCall p;
  std::vector<int32_t> starts = {0};
  std::vector<uint16_t> q, k;
  std::vector<float> lse, significance;
  QueryLine line;
  int32_t tile_queries = 0;

  int32_t group() const { return p.num_q_heads / p.num_kv_heads; }
};

Prompts make_prompts(std::mt19937& rng, int32_t head_dim, int32_t kv_heads, int32_t group,
                     DType dtype, const std::vector<int32_t>& lengths) {
  Prompts x;
  SignificanceCall& p = x.p;
  for (const int32_t n : lengths) {
    x.starts.push_back(x.starts.back() + n);
    p.max_tokens = std::max(p.max_tokens, n);
  }
  p.num_sequences = static_cast<int32_t>(lengths.size());
  p.query_stride = 1;
  p.total_tokens = x.starts.back();
  p.num_kv_heads = kv_heads, p.num_q_heads = kv_heads * group;
  p.head_dim = head_dim, p.dtype = dtype;
  p.sm_scale = 1 / std::sqrt(head_dim);
  p.q_head_stride = p.k_head_stride = head_dim + 8;
  p.k_token_stride = p.k_head_stride * kv_heads;
  p.q_token_stride = p.q_head_stride * p.num_q_heads;
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<uint16_t>* to, int64_t stride) {
    to->resize(static_cast<size_t>(p.total_tokens * stride) + 8);
    for (uint16_t& bits : *to) bits = float_to_raw(dtype, normal(rng));
  };
  fill(&x.q, p.q_token_stride);
  fill(&x.k, p.k_token_stride);
  x.lse.assign(static_cast<size_t>(p.num_q_heads) * p.total_tokens, kBefore);
  x.significance.assign(static_cast<size_t>(kv_heads) * p.total_tokens, NAN);
  p.q = x.q.data(), p.k = x.k.data();
  if (p.num_sequences > 1) p.starts = x.starts.data();
  return x;
}

template <class Kernel>
void launch(Kernel kernel, const ScoreTask& task, emulator::Index grid, int32_t threads) {
  emulator::Index at;
  for (at.z = 0; at.z < grid.z; ++at.z) {
    for (at.y = 0; at.y < grid.y; ++at.y) {
      for (at.x = 0; at.x < grid.x; ++at.x) {
        std::fill(std::begin(score_stages), std::end(score_stages), uint8_t{0xff});
        emulator::cta().run(
            at, threads, [&] { kernel(task); }, grid);
      }
    }
  }
}
template <int32_t kHeadDim, DType kDtype>
void score(Prompts* x) {
  constexpr int32_t kRows = MmaShape<kHeadDim>::kRows;
  const SignificanceCall& p = x->p;
  const QueryLine line = share_out(p, kRows, 132);
  x->line = line;
  x->tile_queries = kRows / x->group();
  const ScoreTask lse = {p, nullptr, x->lse.data(), line};
  launch(mma_scores<LseTaker<kHeadDim>, kDtype>, lse,
         {line.share == 0 ? p.num_kv_heads : 1, p.num_sequences, line.ctas}, kMathThreads);
  const int32_t queries = sample_tokens(p.max_tokens, p.query_stride).count;
  launch(join_lse, lse, {(queries - 1) / kJoinThreads + 1, p.num_sequences, p.num_q_heads},
         kJoinThreads);
  launch(mma_scores<SignificanceTaker<kHeadDim>, kDtype>,
         {p, x->lse.data(), x->significance.data(), {}},
         {p.num_kv_heads, p.num_sequences, (p.max_tokens - 1) / kRows + 1}, kMathThreads);
}
template <DType kDtype>
void score_dtype(Prompts* x) {
  switch (x->p.head_dim) {
    case 64:
      return score<64, kDtype>(x);
    case 96:
      return score<96, kDtype>(x);
    case 128:
      return score<128, kDtype>(x);
    default:
      return score<256, kDtype>(x);
  }
}

// Keys and the counted queries of a sequence in single precision, and where the queries are.
struct HostRow {
  std::vector<float> q, k;
  std::vector<int32_t> positions;
  AttentionRow row;
};

HostRow host_row(const Prompts& x, int32_t sequence, int32_t kv_head) {
  const SignificanceCall& p = x.p;
  const int32_t first = x.starts[sequence], n = x.starts[sequence + 1] - first, dims = p.head_dim;
  HostRow out;
  for (int32_t j = 0; j < n; ++j) {
    if ((n - 1 - j) % p.query_stride == 0) out.positions.push_back(j);
  }
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t d = 0; d < dims; ++d) {
      out.k.push_back(raw_to_float(
          p.dtype, x.k[(first + t) * p.k_token_stride + kv_head * p.k_head_stride + d]));
    }
  }
  for (int32_t h = 0; h < x.group(); ++h) {
    for (const int32_t j : out.positions) {
      const int64_t at =
          (first + j) * p.q_token_stride + (kv_head * x.group() + h) * p.q_head_stride;
      for (int32_t d = 0; d < dims; ++d) out.q.push_back(raw_to_float(p.dtype, x.q[at + d]));
    }
  }
  out.row.q = out.q.data(), out.row.k = out.k.data();
  out.row.q_positions = out.positions.data();
  out.row.num_queries = static_cast<int32_t>(out.positions.size()), out.row.num_tokens = n;
  out.row.group_size = x.group(), out.row.head_dim = dims;
  out.row.sm_scale = p.sm_scale;
  return out;
}

// What fp32 sums of a logit's products may be off by. Large ones alone go past kTolerance.
double logit_error(const HostRow& host, float sm_scale) {
  const int32_t dims = host.row.head_dim;
  double largest_q = 0, largest_k = 0;
  const auto norm = [&](const float* x) {
    double sum = 0;
    for (int32_t d = 0; d < dims; ++d) sum += double{x[d]} * x[d];
    return std::sqrt(sum);
  };
  for (size_t i = 0; i < host.q.size(); i += dims)
    largest_q = std::max(largest_q, norm(&host.q[i]));
  for (size_t i = 0; i < host.k.size(); i += dims)
    largest_k = std::max(largest_k, norm(&host.k[i]));
  return dims * 0x1p-23 * largest_q * largest_k * double{sm_scale};
}

void compare(const Prompts& x, int32_t sequence, int32_t kv_head) {
  const HostRow host = host_row(x, sequence, kv_head);
  const int32_t first = x.starts[sequence], n = host.row.num_tokens, dims = x.p.head_dim;
  std::vector<double> expected(n);
  ASSERT_TRUE(exact_significance(host.row, expected.data(), nullptr));
  const double error = kTolerance + 2 * logit_error(host, x.p.sm_scale);
  const float* significance = x.significance.data() + kv_head * x.p.total_tokens + first;
  for (int32_t t = 0; t < n; ++t) {
    // Probabilities below the normal numbers of fp32 are 0 there.
    ASSERT_NEAR(significance[t], expected[t], error * expected[t] + FLT_MIN)
        << "token " << t << " of " << n;
    ASSERT_TRUE(t < n - 1 || expected[t] == 0) << "no counted query behind token " << t;
  }
  const int32_t queries = host.row.num_queries;
  std::vector<bool> counted(n);
  for (const int32_t j : host.positions) counted[j] = true;
  for (int32_t h = 0; h < x.group(); ++h) {
    const float* lse = x.lse.data() + (kv_head * x.group() + h) * x.p.total_tokens + first;
    for (int32_t i = 0; i < queries; ++i) {
      const int32_t j = host.positions[i];
      const float* q = host.q.data() + (h * queries + i) * dims;
      double sum = 0;
      for (int32_t t = 0; t <= j; ++t) {
        double s = 0;
        for (int32_t d = 0; d < dims; ++d) s += double{q[d]} * host.k[t * dims + d];
        sum += std::exp(s * x.p.sm_scale);
      }
      ASSERT_NEAR(lse[j], std::log(sum), error) << "head " << h << " query " << j << " of " << n;
    }
    // An entry before that of a counted query is used where the query's keys have so many parts.
    const int64_t of_head = x.line.begin_of(tiles_of_queries(queries, x.tile_queries));
    for (int32_t j = n - 1, query = j, i = queries - 1; j >= 0; --j) {
      if (counted[j]) query = j, i = sample_tokens(n, x.p.query_stride).index_from(j);
      if (query == j) continue;
      const int64_t keys = kv_head * of_head + x.line.keys_of(i / x.tile_queries);
      const bool is_used = query - j <= x.line.part_of(keys, query);
      ASSERT_TRUE(is_used ? std::isnan(lse[j]) : lse[j] == kBefore)
          << "query " << j << ": " << lse[j];
    }
  }
}

void score_and_compare(Prompts* x) {
  if (x->p.dtype == DType::kFloat16) {
    score_dtype<DType::kFloat16>(x);
  } else {
    score_dtype<DType::kBFloat16>(x);
  }
  for (int32_t s = 0; s < x->p.num_sequences; ++s) {
    for (int32_t h = 0; h < x->p.num_kv_heads; ++h) {
      compare(*x, s, h);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

class EmulatedScores : public ::testing::Test {
 protected:
  // Random where 0.
  struct Case {
    int32_t head_dim, stride, group;
    std::vector<int32_t> lengths;
    float growth = 1.0f;  // of keys, from each tile of 128 tokens to the next
    int32_t kv_heads = 1;
  };
  // Returns how many CTAs share out the longest sequence.
  int32_t check(const Case& c) {
    int32_t ctas = 0;
    check(c, &ctas);
    return ctas;
  }
  int32_t below(int32_t end) { return static_cast<int32_t>(rng_() % end); }

 private:
  void check(const Case& c, int32_t* ctas) {
    const int32_t group = c.group > 0 ? c.group : static_cast<int32_t>(1 + rng_() % 5);
    const DType dtype = rng_() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    SCOPED_TRACE("seed " + std::to_string(seed_) + " head_dim " + std::to_string(c.head_dim) +
                 " group " + std::to_string(group) + " stride " + std::to_string(c.stride) + " " +
                 dtype_name(dtype));
    Prompts x = make_prompts(rng_, c.head_dim, c.kv_heads, group, dtype, c.lengths);
    x.p.query_stride = c.stride;
    grow(c.growth, &x);
    ASSERT_TRUE(x.p.validate().is_ok());
    score_and_compare(&x);
    *ctas = x.line.ctas;
  }

  static void grow(float growth, Prompts* x) {
    for (size_t s = 0; growth != 1.0f && s + 1 < x->starts.size(); ++s) {
      for (int32_t t = x->starts[s]; t < x->starts[s + 1]; ++t) {
        const float factor = std::pow(growth, static_cast<float>((t - x->starts[s]) / kColumns));
        for (int32_t d = 0; d < x->p.head_dim; ++d) {
          uint16_t& k = x->k[t * x->p.k_token_stride + d];
          k = float_to_raw(x->p.dtype, factor * raw_to_float(x->p.dtype, k));
        }
      }
    }
  }

  uint32_t seed_ = std::random_device{}();
  std::mt19937 rng_{seed_};
};

// The largest logits of a tile lie about 40 and then 400 above those of the one before: sums that
// stay relative to the first tile's would be infinite.
TEST_F(EmulatedScores, LaterTilesDecide) {
  check({64, 1, 2, {257 + below(60), 130}, 11.0f});
  check({64, 16, 2, {300 + below(80)}, 11.0f});
  check({128, 3, 1, {257 + below(60)}, 1 / 11.0f});
}

TEST_F(EmulatedScores, EveryHeadDimIsTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256})
    check({head_dim, 1, 0, {70, 0, 1, 257 + below(60)}});
}

// Sequences around a stride, and one with several tiles of keys.
TEST_F(EmulatedScores, SampledQueriesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    const int32_t stride = head_dim == 128 ? 2 : 16, group = 1 + below(3);
    check({head_dim, stride, group, {1, 2, 15, 16, 17, 0, 250 + below(100)}});
    if (HasFatalFailure()) return;
  }
}

TEST_F(EmulatedScores, SampledQueriesOfEveryGroupAreTheHosts) {
  for (const int32_t group : {1, 2, 3, 4, 5, 8, 11, 16}) {
    check({64, group % 2 == 0 ? 16 : 3, group, {33 + below(40)}});
    if (HasFatalFailure()) return;
  }
}

// More counted queries than a stationary tile has rows.
TEST_F(EmulatedScores, AStrideThatSpansTilesOfQueriesIsTheHosts) {
  check({256, 4, 1, {129 * 4 + below(8)}});
  check({64, 7, 2, {kMaxQueryStride / 16 + below(8), 5}});
}

// CTAs that take a part of a tile, and the end of one tile and the begin of the next: sequences
// around their ends, those of other tiles of queries and one query alone.
TEST_F(EmulatedScores, SharedOutQueriesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    EXPECT_GT(check({head_dim, 16, 0, {128, 129, 1, 0, 513 + below(30)}}), 1);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(check({64, 3, 1, {255, 257, 641 + below(30)}}), 1);
  EXPECT_GT(check({64, 2, 11, {129, 2, 257 + below(20)}, 1.0f, 2}), 1);
  EXPECT_GT(check({64, kMaxQueryStride, 1, {513, 1}}), 1);
  EXPECT_EQ(check({64, 1, 1, {300}, 1.0f, 2}), 2);
}

// Every counted query's keys are taken once, in parts that it can keep.
TEST(QueryLine, CoversAllKeysWithNoMorePartsThanAStride) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  SignificanceCall p;
  for (int32_t i = 0; i < 1000; ++i) {
    const auto group = static_cast<int32_t>(1 + rng() % kMaxScoreGroup);
    p.num_kv_heads = static_cast<int32_t>(1 + rng() % 40), p.num_q_heads = p.num_kv_heads * group;
    p.max_tokens = static_cast<int32_t>(1 + (rng() % 2000000 >> rng() % 20));
    p.query_stride = static_cast<int32_t>(1 + (rng() % kMaxQueryStride >> rng() % 12));
    const int32_t rows = rng() % 2 == 0 ? 128 : 256, of_tile = rows / group;
    const auto sms = static_cast<int32_t>(1 + rng() % 200);
    p.num_sequences = static_cast<int32_t>(1 + (rng() % 1000 >> rng() % 10));
    const QueryLine line = share_out(p, rows, sms);
    const TokenSample counted = sample_tokens(p.max_tokens, p.query_stride);
    const int32_t tiles = tiles_of_queries(counted.count, of_tile);
    ASSERT_GE(int64_t{tiles} * of_tile, counted.count);
    ASSERT_EQ(line.tile_tokens, std::min(of_tile, counted.count) * p.query_stride);
    if (p.query_stride == 1) {
      ASSERT_EQ(line.share, 0);
      ASSERT_EQ(line.ctas, tiles);
      continue;
    }
    ASSERT_GE(line.ctas * line.share, p.num_kv_heads * line.begin_of(tiles));
    ASSERT_LE(line.ctas, 2 * sms);
    for (int32_t j = 0; j < 20; ++j) {
      const auto index = static_cast<int32_t>(rng() % static_cast<uint32_t>(counted.count));
      const int32_t query = counted.position(index), tile = index / of_tile;
      ASSERT_LE(query + 1, line.begin_of(tile + 1) - line.keys_of(tile));
      const int64_t keys =
          static_cast<int64_t>(rng() % p.num_kv_heads) * line.begin_of(tiles) + line.keys_of(tile);
      const int32_t parts = line.part_of(keys, query) + 1;
      ASSERT_LE(parts, p.query_stride);
      ASSERT_LE(parts - 1, query);
      ASSERT_EQ(line.part_of(keys, 0), 0);
    }
  }
}

}  // namespace
}  // namespace tierkv
