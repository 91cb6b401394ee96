// SPDX-License-Identifier: Apache-2.0
// Row-wise kernels against the host: the tiers of prompts and the codes of a global step. Tests
// named Small* are small enough for compute-sanitizer.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "bench/baselines/kernels/step_codes.h"
#include "bench/baselines/kernels/tier_plan.h"
#include "codec/format/element.h"
#include "tests/gpu/device_array.cuh"

namespace tierkv {
namespace {

using test::DeviceArray;

class GpuRows : public testing::Test {
 protected:
  GpuRows()
      : seed_(std::random_device{}()),
        rng_(seed_),
        trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)) {}

  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  std::vector<int32_t> lengths(int32_t longest) {
    std::vector<int32_t> n = {0, 1, 2, 63, 64, 65, 1023, 1024, 1025, uniform(3, longest)};
    for (int32_t& x : n) x = std::min(x, longest);
    std::shuffle(n.begin(), n.end(), rng_);
    return n;
  }

  uint32_t seed_;
  std::mt19937 rng_;
  testing::ScopedTrace trace_;
};

// ---- tiers ----

struct PlanArrays {
  std::vector<PlanRow> rows;
  std::vector<TierPolicy> policies;
  std::vector<float> significance;
  std::vector<int32_t> order;
  std::vector<TierCounts> counts;
  std::vector<StatusCode> status;

  template <class Find>
  TierPlan plan(Find&& find) {
    TierPlan p;
    p.rows = find(rows);
    p.policies = find(policies);
    p.significance = find(significance);
    p.order = find(order);
    p.counts = find(counts);
    p.status = find(status);
    p.num_rows = static_cast<int32_t>(rows.size());
    p.num_policies = static_cast<int32_t>(policies.size());
    return p;
  }
};

class GpuTierPlan : public GpuRows {
 protected:
  PlanArrays make(const std::vector<int32_t>& lengths) {
    PlanArrays a;
    a.policies = {{1.0, 0.0, 64, 0}, {1.0, 0.02, 0, 4}, {2.5, 0.5, 16, 2}, {0.0, 0.0, 8, 0}};
    for (const int32_t n : lengths) {
      PlanRow row;
      row.scalars = static_cast<int64_t>(a.significance.size());
      row.num_tokens = n;
      row.policy = uniform(0, 3);
      a.rows.push_back(row);
      const TierPolicy& policy = a.policies[row.policy];
      for (int32_t i = 0; i < n; ++i) {
        const double threshold =
            (uniform(0, 1) == 0 ? policy.alpha_high : policy.alpha_low) / (i + 1);
        // Often exactly at a threshold, as near as a float can be.
        a.significance.push_back(
            static_cast<float>(uniform(0, 2) == 0 ? threshold : threshold * uniform(0, 40) / 20));
      }
    }
    a.order.assign(a.significance.size() + 1, -5);
    a.counts.assign(lengths.size(), {{-1, -1, -1, -1}});
    a.status.assign(lengths.size(), StatusCode::kCorrupt);
    return a;
  }
  void compare(PlanArrays* a) {
    const DeviceArray<PlanRow> rows(a->rows);
    const DeviceArray<TierPolicy> policies(a->policies);
    const DeviceArray<float> significance(a->significance);
    const DeviceArray<int32_t> order(a->order);
    const DeviceArray<TierCounts> counts(a->counts);
    const DeviceArray<StatusCode> status(a->status);
    TierPlan p = a->plan([](auto& x) { return x.data(); });
    ASSERT_TRUE(plan_tiers_host(p));
    p.rows = rows.get(), p.policies = policies.get(), p.significance = significance.get();
    p.order = order.get(), p.counts = counts.get(), p.status = status.get();
    ASSERT_TRUE(plan_tiers(p, nullptr));
    EXPECT_EQ(order.read(), a->order);
    EXPECT_EQ(status.read(), a->status);
    const std::vector<TierCounts> got = counts.read();
    EXPECT_EQ(memcmp(got.data(), a->counts.data(), got.size() * sizeof(TierCounts)), 0);
  }
};

TEST_F(GpuTierPlan, SmallPlansAreTheHosts) {
  PlanArrays a = make(lengths(1100));
  compare(&a);
}

TEST_F(GpuTierPlan, PlansAreTheHosts) {
  for (int32_t n = 0; n < 20; ++n) {
    PlanArrays a = make(lengths(9000));
    compare(&a);
    if (HasFailure()) return;
    for (size_t i = 0; i < a.rows.size(); ++i) {
      const TierCounts& c = a.counts[i];
      ASSERT_EQ(std::accumulate(c.of, c.of + kNumTiers, 0), a.rows[i].num_tokens);
    }
  }
}

TEST_F(GpuTierPlan, SmallBadRowsAreReported) {
  PlanArrays a = make({70, 70, 70, 70, 70, 70});
  a.significance[70 + uniform(0, 69)] = NAN;
  a.significance[140 + uniform(0, 69)] = -1e-9f;
  a.rows[3].policy = 4;
  a.rows[4].num_tokens = -1;
  a.rows[5].scalars = -1;
  compare(&a);
  const auto bad = StatusCode::kInvalidArgument;
  EXPECT_EQ(a.status,
            (std::vector<StatusCode>{StatusCode::kOk, StatusCode::kNonFinite, bad, bad, bad, bad}));
}

// ---- global step ----

struct StepArrays {
  std::vector<uint32_t> x;  // elements of dtype
  std::vector<int16_t> codes;
  std::vector<StepRow> rows;
  std::vector<float> steps, means;
  std::vector<StatusCode> status;
  StepCodes shape;

  template <class Find>
  StepCodes call(Find&& find, bool has_means) {
    StepCodes s = shape;
    s.x = find(x);
    s.codes = find(codes);
    s.rows = find(rows);
    s.steps = find(steps);
    s.means = has_means ? find(means) : nullptr;
    s.status = find(status);
    s.num_rows = static_cast<int32_t>(rows.size());
    s.num_steps = static_cast<int32_t>(steps.size());
    return s;
  }
  void set(int64_t element, float value) {
    if (shape.dtype == DType::kFloat32) {
      memcpy(&x[element], &value, 4);
    } else {
      const uint16_t bits = float_to_raw(shape.dtype, value);
      memcpy(reinterpret_cast<uint16_t*>(x.data()) + element, &bits, 2);
    }
  }
};

class GpuStepCodes : public GpuRows {
 protected:
  StepArrays make(const std::vector<int32_t>& lengths, int32_t head_dim, DType dtype) {
    StepArrays a;
    a.shape.head_dim = head_dim;
    a.shape.dtype = dtype;
    a.shape.x_token_stride = head_dim + 8;
    a.shape.codes_token_stride = head_dim + 16;
    int64_t tokens = 0;
    for (const int32_t n : lengths) {
      a.rows.push_back({tokens * (head_dim + 8), tokens * (head_dim + 16), n, uniform(0, 2)});
      tokens += n;
      a.shape.max_tokens = std::max(a.shape.max_tokens, n);
    }
    for (int32_t i = 0; i < 3; ++i) a.steps.push_back(std::ldexp(1.0f + i * 0.37f, -2 - i));
    std::normal_distribution<float> normal;
    for (int32_t i = 0; i < 3 * head_dim; ++i) {
      a.means.push_back(half_to_float(float_to_half(normal(rng_))));
    }
    a.x.resize(tokens * (head_dim + 8) + 4);
    for (int64_t i = 0; i < tokens * (head_dim + 8); ++i) {
      // Multiples of half a step are ties.
      const float tie = a.steps[uniform(0, 2)] * 0.5f * static_cast<float>(uniform(-99, 99));
      a.set(i, uniform(0, 1) == 0 ? tie : 8 * normal(rng_));
    }
    a.codes.assign(tokens * (head_dim + 16) + 8, -12345);
    a.status.assign(lengths.size(), StatusCode::kCorrupt);
    return a;
  }
  void compare(StepArrays* a, bool has_means) {
    const DeviceArray<uint32_t> x(a->x);
    const DeviceArray<int16_t> codes(a->codes);
    const DeviceArray<StepRow> rows(a->rows);
    const DeviceArray<float> steps(a->steps), means(a->means);
    const DeviceArray<StatusCode> status(a->status);
    StepCodes s = a->call([](auto& v) { return v.data(); }, has_means);
    ASSERT_TRUE(step_codes_host(s));
    s.x = x.get(), s.codes = codes.get(), s.rows = rows.get(), s.steps = steps.get();
    s.means = has_means ? means.get() : nullptr;
    s.status = status.get();
    ASSERT_TRUE(step_codes(s, nullptr));
    EXPECT_EQ(status.read(), a->status);
    const std::vector<int16_t> got = codes.read();
    for (size_t i = 0; i < a->rows.size(); ++i) {
      if (a->status[i] != StatusCode::kOk) continue;
      const int64_t first = a->rows[i].output;
      const int64_t end = first + a->rows[i].num_tokens * a->shape.codes_token_stride;
      ASSERT_TRUE(std::equal(got.begin() + first, got.begin() + end, a->codes.begin() + first))
          << "row " << i;
    }
  }
};

TEST_F(GpuStepCodes, SmallCodesAreTheHosts) {
  StepArrays a = make({0, 1, 40, 130}, 128, DType::kFloat16);
  compare(&a, true);
}

TEST_F(GpuStepCodes, CodesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256, 8}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      StepArrays a = make(lengths(700), head_dim, dtype);
      compare(&a, uniform(0, 1) == 1);
      if (HasFailure()) return;
    }
  }
}

TEST_F(GpuStepCodes, SmallBadRowsAreReported) {
  StepArrays a = make(std::vector<int32_t>(9, 20), 64, DType::kFloat32);
  const auto element = [&](int32_t row) {
    return (row * 20 + uniform(0, 19)) * 72 + uniform(0, 63);
  };
  a.set(element(1), NAN);
  a.set(element(2), 1e30f);
  a.set(element(3), -INFINITY);
  a.rows[4].step = 3;
  a.rows[5].num_tokens = 21;
  a.rows[6].input = 4;
  a.rows[7].output = -8;
  a.steps.push_back(0.0f);
  a.rows[8].step = 3;
  a.rows[4].step = 4;
  compare(&a, false);
  const auto bad = StatusCode::kInvalidArgument;
  EXPECT_EQ(a.status, (std::vector<StatusCode>{StatusCode::kOk, StatusCode::kNonFinite,
                                               StatusCode::kOutOfRange, StatusCode::kNonFinite, bad,
                                               bad, bad, bad, bad}));
}

TEST_F(GpuStepCodes, BadCallsAreRefused) {
  StepArrays a = make({20}, 64, DType::kFloat16);
  const auto code = [&](const std::function<void(StepCodes*)>& spoil) {
    StepCodes s = a.call([](auto& v) { return v.data(); }, true);
    spoil(&s);
    return step_codes(s, nullptr).code();
  };
  const auto invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](StepCodes* s) { s->x = nullptr; }), invalid);
  EXPECT_EQ(code([](StepCodes* s) { s->codes += 1; }), invalid);
  EXPECT_EQ(code([](StepCodes* s) { s->num_rows = -1; }), invalid);
  EXPECT_EQ(code([](StepCodes* s) { s->num_steps = 0; }), invalid);
  EXPECT_EQ(code([](StepCodes* s) { s->head_dim = 60; }), invalid);
  EXPECT_EQ(code([](StepCodes* s) { s->x_token_stride = 63; }), invalid);
}

}  // namespace
}  // namespace tierkv
