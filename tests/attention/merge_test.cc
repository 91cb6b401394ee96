// SPDX-License-Identifier: Apache-2.0
#include "attention/core/merge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr int32_t kDim = 96;

struct Buffers {
  std::vector<uint16_t> a, b, out;
  std::vector<float> lse_a, lse_b, lse;

  explicit Buffers(int64_t rows)
      : a(rows * kDim),
        b(rows * kDim),
        out(rows * kDim, 0xffff),
        lse_a(rows),
        lse_b(rows),
        lse(rows, NAN) {}
  MergeCall call() {
    MergeCall call;
    call.a = {a.data(), lse_a.data()};
    call.b = {b.data(), lse_b.data()};
    call.out = out.data();
    call.lse = lse.data();
    call.rows = static_cast<int64_t>(lse.size());
    call.head_dim = kDim;
    return call;
  }
};

TEST(Merge, AgreesWithTheFormulaInDouble) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Buffers x(40);
  for (uint16_t& v : x.a) v = float_to_half(normal(rng));
  for (uint16_t& v : x.b) v = float_to_half(normal(rng));
  for (size_t r = 0; r < x.lse.size(); ++r) {
    x.lse_a[r] = 5 * normal(rng);
    x.lse_b[r] = 5 * normal(rng);
  }
  ASSERT_TRUE(merge_attention_host(x.call()).is_ok());
  for (size_t r = 0; r < x.lse.size(); ++r) {
    const double a = std::exp(x.lse_a[r]), b = std::exp(x.lse_b[r]);
    EXPECT_NEAR(x.lse[r], std::log(a + b), 1e-5) << "seed " << seed;
    for (int32_t d = 0; d < kDim; ++d) {
      const double want =
          (a * half_to_float(x.a[r * kDim + d]) + b * half_to_float(x.b[r * kDim + d])) / (a + b);
      // One rounding to fp16 of values below 8: 2^-9, and fp32 noise.
      EXPECT_NEAR(half_to_float(x.out[r * kDim + d]), want, 2.1e-3) << "seed " << seed;
    }
  }
}

TEST(Merge, BFloat16) {
  const uint64_t seed = std::random_device{}();
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Buffers x(9);
  for (uint16_t& v : x.a) v = float_to_bfloat16(normal(rng));
  for (uint16_t& v : x.b) v = float_to_bfloat16(normal(rng));
  for (size_t r = 0; r < x.lse.size(); ++r) {
    x.lse_a[r] = normal(rng);
    x.lse_b[r] = normal(rng);
  }
  MergeCall call = x.call();
  call.dtype = DType::kBFloat16;
  ASSERT_TRUE(merge_attention_host(call).is_ok());
  for (size_t i = 0; i < x.a.size(); ++i) {
    const double a = std::exp(x.lse_a[i / kDim]), b = std::exp(x.lse_b[i / kDim]);
    const double want = (a * bfloat16_to_float(x.a[i]) + b * bfloat16_to_float(x.b[i])) / (a + b);
    // One rounding to 8 bits, and fp32 noise.
    EXPECT_NEAR(bfloat16_to_float(x.out[i]), want, 0x1p-8 * std::fabs(want) + 1e-6)
        << "seed " << seed;
  }
}

TEST(Merge, PartsWithoutTokensDoNotCount) {
  Buffers x(3);
  x.lse_a = {-INFINITY, 2.0f, -INFINITY};
  x.lse_b = {1.0f, -INFINITY, -INFINITY};
  for (uint16_t& v : x.a) v = float_to_half(1.5f);
  for (uint16_t& v : x.b) v = float_to_half(-2.5f);
  for (int32_t d = 0; d < kDim; ++d) {
    x.a[d] = x.b[kDim + d] = x.a[2 * kDim + d] = 0x7e00;  // NaN where there are no tokens
  }
  ASSERT_TRUE(merge_attention_host(x.call()).is_ok());
  EXPECT_EQ(half_to_float(x.out[0]), -2.5f);
  EXPECT_EQ(half_to_float(x.out[kDim]), 1.5f);
  EXPECT_EQ(half_to_float(x.out[2 * kDim]), 0.0f);
  EXPECT_EQ(x.lse[0], 1.0f);
  EXPECT_EQ(x.lse[1], 2.0f);
  EXPECT_EQ(x.lse[2], -INFINITY);
}

TEST(Merge, MayWriteOverItsInputs) {
  Buffers x(1);
  x.lse_a = {0.0f};
  x.lse_b = {0.0f};
  for (uint16_t& v : x.a) v = float_to_half(1.0f);
  for (uint16_t& v : x.b) v = float_to_half(3.0f);
  MergeCall call = x.call();
  call.out = x.a.data();
  call.lse = x.lse_a.data();
  ASSERT_TRUE(merge_attention_host(call).is_ok());
  EXPECT_EQ(half_to_float(x.a[kDim - 1]), 2.0f);
  EXPECT_NEAR(x.lse_a[0], std::log(2.0f), 1e-6);
}

TEST(Merge, RefusesBadCalls) {
  Buffers x(1);
  MergeCall call = x.call();
  call.b.lse = nullptr;
  EXPECT_EQ(merge_attention_host(call).code(), StatusCode::kInvalidArgument);
  call = x.call();
  call.head_dim = 7;
  EXPECT_EQ(merge_attention_host(call).code(), StatusCode::kInvalidArgument);
  call = x.call();
  call.rows = -1;
  EXPECT_EQ(merge_attention_host(call).code(), StatusCode::kInvalidArgument);
  call = x.call();
  call.dtype = DType::kFloat32;
  EXPECT_EQ(merge_attention_host(call).code(), StatusCode::kUnsupported);
  EXPECT_EQ(x.out[0], 0xffff);
}

TEST(Merge, NoRowsNeedNoPointers) {
  MergeCall call;
  call.head_dim = 64;
  EXPECT_TRUE(merge_attention_host(call));
  call.rows = 1;
  EXPECT_EQ(merge_attention_host(call).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv
