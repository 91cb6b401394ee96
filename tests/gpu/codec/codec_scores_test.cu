// SPDX-License-Identifier: Apache-2.0
// Significance and log-sum-exp of prompts against the host in double. Tests named Small* are small
// enough for compute-sanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "codec/format/element.h"
#include "codec/policy/significance.h"
#include "tests/gpu/device_array.cuh"
#include "tierkv/significance.h"

namespace tierkv {
namespace {

using test::DeviceArray;

// Products of 16-bit values are exact in single precision; the sum of head_dim of them is off by at
// most head_dim 2^-22 times the sum of their magnitudes, here below 1e-4 after sm_scale for values
// around 1. A probability has twice that relative error (its own score and the log-sum-exp), ex2
// and the sum over queries add 1e-6. That is of wgmma and of mma.sync alike. A mean of fewer
// queries has no larger relative error: probabilities are not negative.
constexpr double kTolerance = 5e-4;

// By wgmma where this binary has it for the device, and by mma.sync.
std::vector<ScoreProducts> products_here() {
  SignificanceCall p;
  const float nothing = 0;
  p.num_q_heads = p.num_kv_heads = p.num_sequences = p.max_tokens = p.total_tokens = 1;
  p.head_dim = 64, p.sm_scale = 1;
  p.q_token_stride = p.q_head_stride = p.k_token_stride = p.k_head_stride = 64;
  const DeviceArray<uint16_t> x(std::vector<uint16_t>(64));
  const DeviceArray<int32_t> starts(std::vector<int32_t>{0, 1});
  const DeviceArray<float> lse(std::vector<float>{nothing});
  p.q = p.k = x.get(), p.starts = starts.get();
  p.products = ScoreProducts::kWgmma;
  const Status s = prompt_lse(p, lse.get(), nullptr);
  if (s.is_ok()) return {ScoreProducts::kWgmma, ScoreProducts::kMma};
  EXPECT_EQ(s.code(), StatusCode::kUnsupported) << s.message();
  return {ScoreProducts::kMma};
}

struct PromptCase {
  int32_t head_dim = 128, num_kv_heads = 2, group = 4;
  DType dtype = DType::kFloat16;
  std::vector<int32_t> lengths;
  bool is_head_major = false;
  int32_t query_stride = 1;
};

class GpuScores : public testing::TestWithParam<ScoreProducts> {
 protected:
  GpuScores()
      : seed_(std::random_device{}()),
        rng_(seed_),
        trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }

  void make(const PromptCase& c) {
    case_ = c;
    starts_ = {0};
    for (const int32_t n : c.lengths) starts_.push_back(starts_.back() + n);
    p_ = {};
    p_.num_sequences = static_cast<int32_t>(c.lengths.size());
    for (const int32_t n : c.lengths) p_.max_tokens = std::max(p_.max_tokens, n);
    p_.total_tokens = starts_.back();
    p_.num_kv_heads = c.num_kv_heads;
    p_.num_q_heads = c.num_kv_heads * c.group;
    p_.head_dim = c.head_dim;
    p_.dtype = c.dtype;
    p_.sm_scale = 1 / std::sqrt(c.head_dim);
    p_.products = GetParam();
    p_.query_stride = c.query_stride;
    const int64_t d = c.head_dim + 8;
    if (c.is_head_major) {
      p_.q_token_stride = p_.k_token_stride = d;
      p_.q_head_stride = p_.k_head_stride = d * p_.total_tokens;
    } else {
      p_.q_head_stride = p_.k_head_stride = d;
      p_.q_token_stride = d * p_.num_q_heads;
      p_.k_token_stride = d * p_.num_kv_heads;
    }
    q_ = random_rows(p_.num_q_heads);
    k_ = random_rows(p_.num_kv_heads);
  }

  void SetUp() override {
    const std::vector<ScoreProducts> here = products_here();
    if (std::find(here.begin(), here.end(), GetParam()) == here.end()) {
      GTEST_SKIP() << "this binary has no wgmma for the device";
    }
  }

  // lse and significance as the kernels make them, outputs poisoned before.
  void run() {
    const DeviceArray<uint16_t> q(q_), k(k_);
    const DeviceArray<int32_t> starts(starts_);
    const DeviceArray<float> lse(std::vector<float>(count(p_.num_q_heads), NAN));
    const DeviceArray<float> significance(std::vector<float>(count(p_.num_kv_heads), NAN));
    p_.q = q.get(), p_.k = k.get(), p_.starts = starts.get();
    const Status first = prompt_lse(p_, lse.get(), nullptr);
    ASSERT_TRUE(first) << first.message();
    const Status second = prompt_significance(p_, lse.get(), significance.get(), nullptr);
    ASSERT_TRUE(second) << second.message();
    lse_ = lse.read();
    significance_ = significance.read();
  }

  void compare() {
    for (int32_t s = 0; s < p_.num_sequences; ++s) {
      for (int32_t head = 0; head < p_.num_kv_heads; ++head) {
        compare_row(s, head);
        if (HasFatalFailure()) return;
      }
    }
  }

  float element(const std::vector<uint16_t>& x, bool is_query, int32_t token, int32_t head,
                int32_t d) const {
    return raw_to_float(case_.dtype, x[index(is_query, token, head, d)]);
  }
  int64_t index(bool is_query, int32_t token, int32_t head, int32_t d) const {
    return token * (is_query ? p_.q_token_stride : p_.k_token_stride) +
           head * (is_query ? p_.q_head_stride : p_.k_head_stride) + d;
  }
  size_t count(int32_t heads) const { return static_cast<size_t>(heads) * p_.total_tokens; }

  uint32_t seed_;
  std::mt19937 rng_;
  testing::ScopedTrace trace_;
  PromptCase case_;
  SignificanceCall p_;
  std::vector<int32_t> starts_;
  std::vector<uint16_t> q_, k_;
  std::vector<float> lse_, significance_;

 private:
  std::vector<uint16_t> random_rows(int32_t heads) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> x(static_cast<size_t>(p_.total_tokens) * heads * (case_.head_dim + 8) +
                            8);
    for (uint16_t& bits : x) bits = float_to_raw(case_.dtype, normal(rng_));
    return x;
  }

  void compare_row(int32_t sequence, int32_t kv_head) {
    const int32_t first = starts_[sequence], n = starts_[sequence + 1] - first;
    const int32_t d = case_.head_dim, group = case_.group;
    std::vector<int32_t> counted;
    for (int32_t j = 0; j < n; ++j) {
      if ((n - 1 - j) % case_.query_stride == 0) counted.push_back(j);
    }
    const auto queries = static_cast<int32_t>(counted.size());
    std::vector<float> q, k;
    for (int32_t t = 0; t < n; ++t) {
      for (int32_t i = 0; i < d; ++i) k.push_back(element(k_, false, first + t, kv_head, i));
    }
    for (int32_t h = 0; h < group; ++h) {
      for (const int32_t j : counted) {
        for (int32_t i = 0; i < d; ++i) {
          q.push_back(element(q_, true, first + j, kv_head * group + h, i));
        }
      }
    }
    AttentionRow row;
    row.q = q.data(), row.k = k.data();
    row.q_positions = counted.data();
    row.group_size = group, row.num_queries = queries, row.num_tokens = n, row.head_dim = d;
    row.sm_scale = p_.sm_scale;
    std::vector<double> expected(n);
    ASSERT_TRUE(exact_significance(row, expected.data(), nullptr));
    for (int32_t t = 0; t < n; ++t) {
      const float got = significance_[count(kv_head) + first + t];
      ASSERT_NEAR(got, expected[t], kTolerance * expected[t]) << "token " << t << " of " << n;
      ASSERT_EQ(got > 0, t < n - 1) << "no counted query behind token " << t;
    }
    for (int32_t h = 0; h < group && n > 0; ++h) {
      const float* lse = lse_.data() + count(kv_head * group + h) + first;
      const int32_t index = uniform(0, queries - 1), j = counted[index];
      double sum = 0;
      for (int32_t t = 0; t <= j; ++t) {
        double s = 0;
        for (int32_t i = 0; i < d; ++i) {
          s += static_cast<double>(q[(static_cast<size_t>(h) * queries + index) * d + i]) *
               k[static_cast<size_t>(t) * d + i];
        }
        sum += std::exp(s * p_.sm_scale);
      }
      ASSERT_NEAR(lse[j], std::log(sum), kTolerance) << "query " << j << " of " << n;
      for (int32_t t = 0; t < n; ++t) {
        ASSERT_EQ(std::isnan(lse[t]), (n - 1 - t) % case_.query_stride != 0) << "query " << t;
      }
    }
  }
};

TEST_P(GpuScores, SmallPromptsAreTheHosts) {
  PromptCase c;
  c.num_kv_heads = 1;
  c.lengths = {0, 1, 70, 140};
  make(c);
  run();
  compare();
}

TEST_P(GpuScores, EveryHeadDimGroupAndTypeIsTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 3, 4, 8, 11, 16}) {
      PromptCase c;
      c.head_dim = head_dim;
      c.group = group;
      c.dtype = uniform(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
      c.is_head_major = uniform(0, 1) == 1;
      c.lengths = {uniform(2, 127), 0, 129, 1, uniform(255, 258), uniform(300, 420)};
      std::shuffle(c.lengths.begin(), c.lengths.end(), rng_);
      SCOPED_TRACE(testing::Message() << "d " << head_dim << " group " << group);
      make(c);
      run();
      compare();
      if (HasFailure()) return;
    }
  }
}

TEST_P(GpuScores, SmallSampledPromptsAreTheHosts) {
  PromptCase c;
  c.num_kv_heads = 1;
  c.query_stride = 16;
  c.lengths = {0, 1, 2, 15, 16, 17, 140};
  make(c);
  run();
  compare();
}

TEST_P(GpuScores, SampledQueriesOfEveryHeadDimAndGroupAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 2, 3, 4, 8, 11, 16}) {
      PromptCase c;
      c.head_dim = head_dim;
      c.group = group;
      c.query_stride = std::vector<int32_t>{2, 7, 16}[uniform(0, 2)];
      c.dtype = uniform(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
      c.is_head_major = uniform(0, 1) == 1;
      c.lengths = {1, 2, 15, 16, 17, 0, uniform(255, 258), uniform(300, 900)};
      std::shuffle(c.lengths.begin(), c.lengths.end(), rng_);
      SCOPED_TRACE(testing::Message()
                   << "d " << head_dim << " group " << group << " stride " << c.query_stride);
      make(c);
      run();
      compare();
      if (HasFailure()) return;
    }
  }
}

// Keys that several CTAs share out: sequences around the ends of their parts, a query alone, and
// one counted query behind many keys.
TEST_P(GpuScores, KeysInPartsAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t group : {1, 3, 4, 16}) {
      PromptCase c;
      c.head_dim = head_dim;
      c.group = group;
      c.num_kv_heads = uniform(1, 3);
      c.query_stride = std::vector<int32_t>{2, 5, 16, kMaxQueryStride}[uniform(0, 3)];
      c.dtype = uniform(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
      c.is_head_major = uniform(0, 1) == 1;
      const int32_t end = 128 * uniform(1, 7);
      c.lengths = {1, end - 1, end, end + 1, 0, 2 * end, uniform(897, 1100)};
      std::shuffle(c.lengths.begin(), c.lengths.end(), rng_);
      SCOPED_TRACE(testing::Message() << "d " << head_dim << " group " << group << " stride "
                                      << c.query_stride << " end " << end);
      make(c);
      run();
      compare();
      if (HasFailure()) return;
    }
  }
}

// More counted queries than a stationary tile has rows, and more keys than the ring of stages.
TEST_P(GpuScores, ALongSampledPromptIsTheHosts) {
  PromptCase c;
  c.num_kv_heads = 3;
  c.query_stride = 16;
  c.lengths = {uniform(4200, 4600), 900};
  make(c);
  run();
  compare();
}

// Longer than the ring of stages, several times around.
TEST_P(GpuScores, ALongPromptIsTheHosts) {
  PromptCase c;
  c.num_kv_heads = 1;
  c.lengths = {2100};
  make(c);
  run();
  compare();
}

TEST_P(GpuScores, RunsRepeatBitForBit) {
  for (const int32_t stride : {1, 16}) {
    PromptCase c;
    c.query_stride = stride;
    c.lengths = {700, 33};
    make(c);
    run();
    const std::vector<float> lse = lse_, significance = significance_;
    run();
    EXPECT_EQ(memcmp(lse.data(), lse_.data(), lse.size() * 4), 0);
    EXPECT_EQ(memcmp(significance.data(), significance_.data(), significance.size() * 4), 0);
  }
}

// A bad query must not look as if it attended to nothing.
TEST_P(GpuScores, NonFiniteInputShows) {
  PromptCase c;
  c.lengths = {300};
  make(c);
  const int32_t bad = uniform(1, 299), head = uniform(0, 7);
  q_[index(true, bad, head, uniform(0, 127))] = float_to_half(NAN);
  run();
  for (int32_t t = 0; t < 299; ++t) {
    for (int32_t kv_head = 0; kv_head < 2; ++kv_head) {
      const bool is_hit = kv_head == head / 4 && t < bad;
      ASSERT_EQ(std::isfinite(significance_[count(kv_head) + t]), !is_hit) << "token " << t;
    }
  }
}

TEST_P(GpuScores, BadCallsAreRefused) {
  PromptCase c;
  c.lengths = {20};
  make(c);
  const DeviceArray<float> x(std::vector<float>(20 * 8));
  p_.q = p_.k = x.get();
  const DeviceArray<int32_t> starts(starts_);
  p_.starts = starts.get();
  const auto code = [&](const std::function<void(SignificanceCall*)>& spoil) {
    SignificanceCall p = p_;
    spoil(&p);
    return prompt_lse(p, x.get(), nullptr).code();
  };
  const auto invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](SignificanceCall* p) { p->q = nullptr; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->starts = nullptr, p->num_sequences = 2; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->starts = nullptr, p->max_tokens = 19; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->sm_scale = NAN; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->q_token_stride = 4; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->k_head_stride += 4; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->max_tokens = 21; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->max_tokens = 0; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->query_stride = 0; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->query_stride = kMaxQueryStride + 1; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->num_kv_heads = 3; }), invalid);
  EXPECT_EQ(code([](SignificanceCall* p) { p->head_dim = 80; }), StatusCode::kUnsupported);
  EXPECT_EQ(code([](SignificanceCall* p) { p->dtype = DType::kFloat32; }),
            StatusCode::kUnsupported);
  EXPECT_EQ(code([](SignificanceCall* p) { p->num_q_heads = 34; }), StatusCode::kUnsupported);
  EXPECT_EQ(prompt_lse(p_, nullptr, nullptr).code(), invalid);
  EXPECT_EQ(prompt_significance(p_, nullptr, x.get(), nullptr).code(), invalid);
}

INSTANTIATE_TEST_SUITE_P(Products, GpuScores,
                         testing::Values(ScoreProducts::kWgmma, ScoreProducts::kMma),
                         [](const auto& products) {
                           return products.param == ScoreProducts::kMma ? "Mma" : "Wgmma";
                         });

// The choice that is nobody's: wgmma where it is there, to the bit, and never nothing.
TEST(PromptScoreProducts, AnyIsTheFirstThatIsThere) {
  constexpr int32_t kTokens = 200, kDim = 64;
  std::mt19937 rng(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(kTokens * kDim);
  for (uint16_t& bits : x) bits = float_to_half(normal(rng));
  const DeviceArray<uint16_t> rows(x);
  SignificanceCall p;
  p.q = p.k = rows.get();  // no starts: one sequence
  p.q_token_stride = p.q_head_stride = p.k_token_stride = p.k_head_stride = kDim;
  p.num_sequences = p.num_q_heads = p.num_kv_heads = 1;
  p.max_tokens = p.total_tokens = kTokens;
  p.head_dim = kDim, p.sm_scale = 0.125, p.query_stride = 1;
  const auto lse_by = [&](ScoreProducts products) {
    p.products = products;
    const DeviceArray<float> lse(std::vector<float>(kTokens, NAN));
    const Status s = prompt_lse(p, lse.get(), nullptr);
    EXPECT_TRUE(s.is_ok()) << s.message();
    return lse.read();
  };
  const std::vector<float> any = lse_by(ScoreProducts::kAny);
  EXPECT_EQ(any, lse_by(products_here().front()));
  for (const float y : any) ASSERT_TRUE(std::isfinite(y));
}

}  // namespace
}  // namespace tierkv
