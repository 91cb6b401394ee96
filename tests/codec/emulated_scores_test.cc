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
  KeyParts parts;

  int32_t group() const { return p.num_q_heads / p.num_kv_heads; }
};

Prompts make_prompts(std::mt19937& rng, int32_t head_dim, int32_t group, DType dtype,
                     const std::vector<int32_t>& lengths) {
  Prompts x;
  SignificanceCall& p = x.p;
  for (const int32_t n : lengths) {
    x.starts.push_back(x.starts.back() + n);
    p.max_tokens = std::max(p.max_tokens, n);
  }
  p.num_sequences = static_cast<int32_t>(lengths.size());
  p.query_stride = 1;
  p.total_tokens = x.starts.back();
  p.num_kv_heads = 1, p.num_q_heads = group;
  p.head_dim = head_dim, p.dtype = dtype;
  p.sm_scale = 1 / std::sqrt(head_dim);
  p.q_head_stride = p.k_head_stride = p.k_token_stride = head_dim + 8;
  p.q_token_stride = p.q_head_stride * group;
  std::normal_distribution<float> normal;
  const auto fill = [&](std::vector<uint16_t>* to, int64_t stride) {
    to->resize(static_cast<size_t>(p.total_tokens * stride) + 8);
    for (uint16_t& bits : *to) bits = float_to_raw(dtype, normal(rng));
  };
  fill(&x.q, p.q_token_stride);
  fill(&x.k, p.k_token_stride);
  x.lse.assign(static_cast<size_t>(group) * p.total_tokens, kBefore);
  x.significance.assign(p.total_tokens, NAN);
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
  const KeyParts parts = split_keys(p, kRows);
  x->parts = parts;
  const ScoreTask lse = {p, nullptr, x->lse.data(), parts};
  launch(mma_lse<kHeadDim, kDtype>, lse,
         {p.num_kv_heads, p.num_sequences, parts.query_tiles * parts.count}, kMathThreads);
  const int32_t queries = sample_tokens(p.max_tokens, p.query_stride).count;
  launch(join_lse, lse, {(queries - 1) / kJoinThreads + 1, p.num_sequences, p.num_q_heads},
         kJoinThreads);
  launch(mma_significance<kHeadDim, kDtype>, {p, x->lse.data(), x->significance.data(), {}},
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

HostRow host_row(const Prompts& x, int32_t sequence) {
  const SignificanceCall& p = x.p;
  const int32_t first = x.starts[sequence], n = x.starts[sequence + 1] - first, dims = p.head_dim;
  HostRow out;
  for (int32_t j = 0; j < n; ++j) {
    if ((n - 1 - j) % p.query_stride == 0) out.positions.push_back(j);
  }
  for (int32_t t = 0; t < n; ++t) {
    for (int32_t d = 0; d < dims; ++d) {
      out.k.push_back(raw_to_float(p.dtype, x.k[(first + t) * p.k_token_stride + d]));
    }
  }
  for (int32_t h = 0; h < x.group(); ++h) {
    for (const int32_t j : out.positions) {
      const int64_t at = (first + j) * p.q_token_stride + h * p.q_head_stride;
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

void compare(const Prompts& x, int32_t sequence) {
  const HostRow host = host_row(x, sequence);
  const int32_t first = x.starts[sequence], n = host.row.num_tokens, dims = x.p.head_dim;
  std::vector<double> expected(n);
  ASSERT_TRUE(exact_significance(host.row, expected.data(), nullptr));
  const double error = kTolerance + 2 * logit_error(host, x.p.sm_scale);
  for (int32_t t = 0; t < n; ++t) {
    // Probabilities below the normal numbers of fp32 are 0 there.
    ASSERT_NEAR(x.significance[first + t], expected[t], error * expected[t] + FLT_MIN)
        << "token " << t << " of " << n;
    ASSERT_TRUE(t < n - 1 || expected[t] == 0) << "no counted query behind token " << t;
  }
  const int32_t queries = host.row.num_queries;
  std::vector<bool> counted(n);
  for (const int32_t j : host.positions) counted[j] = true;
  for (int32_t h = 0; h < x.group(); ++h) {
    const float* lse = x.lse.data() + h * x.p.total_tokens + first;
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
    for (int32_t j = n - 1, query = j; j >= 0; --j) {
      if (counted[j]) query = j;
      if (query == j) continue;
      const bool is_used = query - j <= query / x.parts.keys;
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
    compare(*x, s);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

class EmulatedScores : public ::testing::Test {
 protected:
  // Random where 0.
  struct Case {
    int32_t head_dim, stride, group;
    std::vector<int32_t> lengths;
    float growth = 1.0f;  // of keys, from each tile of 128 tokens to the next
  };
  // Returns how many parts the keys of a query have at most.
  int32_t check(const Case& c) {
    int32_t parts = 0;
    check(c, &parts);
    return parts;
  }
  int32_t below(int32_t end) { return static_cast<int32_t>(rng_() % end); }

 private:
  void check(const Case& c, int32_t* parts) {
    const int32_t group = c.group > 0 ? c.group : static_cast<int32_t>(1 + rng_() % 5);
    const DType dtype = rng_() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    SCOPED_TRACE("seed " + std::to_string(seed_) + " head_dim " + std::to_string(c.head_dim) +
                 " group " + std::to_string(group) + " stride " + std::to_string(c.stride) + " " +
                 dtype_name(dtype));
    Prompts x = make_prompts(rng_, c.head_dim, group, dtype, c.lengths);
    x.p.query_stride = c.stride;
    grow(c.growth, &x);
    ASSERT_TRUE(x.p.validate().is_ok());
    score_and_compare(&x);
    *parts = x.parts.count;
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

// Keys in parts of one tile and of two: sequences around their ends, those of other tiles of
// queries and one query alone.
TEST_F(EmulatedScores, KeysInPartsAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    EXPECT_EQ(check({head_dim, 16, 0, {128, 129, 1, 0, 385 + below(30)}}), 4);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(check({64, 3, 0, {255, 257, 641 + below(30)}}), 3);
  EXPECT_EQ(check({64, 2, 11, {129, 2, 257 + below(20)}}), 2);
  EXPECT_EQ(check({64, kMaxQueryStride, 1, {513, 1}}), 5);
  EXPECT_EQ(check({64, 1, 1, {300}}), 1);
}

TEST(KeyParts, CoverAllKeysWithNoMoreThanAStride) {
  SignificanceCall p;
  p.num_q_heads = 32, p.num_kv_heads = 8, p.max_tokens = 8192;
  const auto expect = [&](int32_t stride, KeyParts expected) {
    p.query_stride = stride;
    const KeyParts parts = split_keys(p, 256);
    EXPECT_EQ(parts.query_tiles, expected.query_tiles) << stride;
    EXPECT_EQ(parts.count, expected.count) << stride;
    EXPECT_EQ(parts.keys, expected.keys) << stride;
  };
  expect(1, {128, 1, 8192});
  expect(16, {8, 7, 1280});
  expect(64, {2, 16, 512});
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (int32_t i = 0; i < 1000; ++i) {
    const auto group = static_cast<int32_t>(1 + rng() % kMaxScoreGroup);
    p.num_kv_heads = static_cast<int32_t>(1 + rng() % 40), p.num_q_heads = p.num_kv_heads * group;
    p.max_tokens = static_cast<int32_t>(1 + (rng() % 2000000 >> rng() % 20));
    p.query_stride = static_cast<int32_t>(1 + (rng() % kMaxQueryStride >> rng() % 12));
    const int32_t rows = rng() % 2 == 0 ? 128 : 256;
    const KeyParts parts = split_keys(p, rows);
    const int32_t queries = sample_tokens(p.max_tokens, p.query_stride).count;
    ASSERT_GE(int64_t{parts.query_tiles} * (rows / group), queries);
    ASSERT_LT(int64_t{parts.query_tiles - 1} * (rows / group), queries);
    ASSERT_GE(int64_t{parts.count} * parts.keys, p.max_tokens);
    ASSERT_LT(int64_t{parts.count - 1} * parts.keys, p.max_tokens);
    ASSERT_LE(parts.count, std::min(p.query_stride, 16));
    ASSERT_EQ(parts.keys % kColumns, 0);
  }
}

}  // namespace
}  // namespace tierkv
