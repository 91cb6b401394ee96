// SPDX-License-Identifier: Apache-2.0
// Reflections of keys: where they take the mean, what that does to codes.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "tests/support/block_world.h"
#include "tests/support/fresh_random.h"
#include "tierkv/basis.h"

namespace tierkv {
namespace {

using test::BlockShape;
using test::BlockWorld;

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};

class ReflectionTest : public RandomTest {
 protected:
  std::vector<float> normals(int32_t n, float deviation, float mean = 0) {
    std::normal_distribution<float> normal(mean, deviation);
    std::vector<float> x(n);
    for (float& y : x) y = normal(rng_);
    return x;
  }
  static double norm(const std::vector<float>& x) {
    return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
  }
  static std::vector<float> reflection(const Rotation& rotation, const std::vector<float>& mean) {
    std::vector<float> w(mean.size());
    const auto dim = static_cast<int32_t>(mean.size());
    EXPECT_TRUE(key_reflections(rotation, mean.data(), 1, dim, w.data()));
    return w;
  }
  // Encodes keys [tokens, head_dim] of one head as fp16 in K4 and decodes them.
  static std::vector<float> coded(BlockWorld* w, const std::vector<float>& keys) {
    std::transform(keys.begin(), keys.end(), w->k.begin(), float_to_half);
    w->encode_all();
    const std::vector<int32_t> starts = {0, w->shape.tokens[0]};
    struct alignas(16) Piece {
      uint16_t x[8];
    };
    std::vector<Piece> k(keys.size() / 8);
    BlockDecode d;
    d.cache = w->cache;
    d.block_table = w->table.data();
    d.table_stride = w->columns;
    d.num_sequences = d.count = 1;
    d.starts = starts.data();
    d.max_tokens = starts[1];
    d.num_rows = starts[1];
    d.k = k.data();
    EXPECT_TRUE(decode_blocks_host(d));
    std::vector<float> got(keys.size());
    for (size_t i = 0; i < got.size(); ++i) got[i] = half_to_float(k[i / 8].x[i % 8]);
    return got;
  }
  static double squared_error(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    return sum;
  }
  static BlockShape one_head(int32_t head_dim, int32_t tokens) {
    BlockShape s;
    s.head_dim = head_dim;
    s.num_kv_heads = 1;
    s.tokens = {tokens};
    return s;
  }
};

// Errors are of the normal's and the row's rounding, 2^-24 of the norm an element, and of sums of
// head_dim products: at most head_dim 2^-24 of the norm each.
TEST_F(ReflectionTest, MeansFallOntoTheOnes) {
  for (const int32_t dim : kHeadDims) {
    const double bound = 4.0 * dim * std::exp2(-24);
    for (const float offset : {0.0f, 2.0f, -2.0f, 1e6f}) {
      // With an offset and no rotation the mean is near the vector of ones from the start.
      for (const bool rotate : {true, false}) {
        const std::vector<float> mean = normals(dim, 1e-2f, offset);
        const std::vector<float> w = reflection(rotate ? hadamard_rotation(dim) : Rotation{}, mean);
        EXPECT_NEAR(norm(w), 1, 1e-6);
        std::vector<float> y = mean;
        if (rotate) Basis::hadamard(dim).apply(y.data(), 1);
        const std::vector<float> before = y;
        reflect(w.data(), dim, y.data());
        const double size = norm(mean), expected = std::copysign(size / std::sqrt(dim), y[0]);
        for (const float x : y) ASSERT_NEAR(x, expected, bound * size) << dim << " " << offset;
        reflect(w.data(), dim, y.data());
        EXPECT_LT(std::sqrt(squared_error(y, before)), bound * size);
      }
    }
  }
}

// q . k is kept.
TEST_F(ReflectionTest, ProductsStayWhatTheyAre) {
  for (const int32_t dim : kHeadDims) {
    const std::vector<float> w = reflection(Rotation{}, normals(dim, 1));
    std::vector<float> q = normals(dim, 1), k = normals(dim, 1);
    const double sizes = norm(q) * norm(k);
    const double before = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
    reflect(w.data(), dim, q.data());
    EXPECT_GT(std::fabs(before - std::inner_product(q.begin(), q.end(), k.begin(), 0.0)), 0);
    reflect(w.data(), dim, k.data());
    const double after = std::inner_product(q.begin(), q.end(), k.begin(), 0.0);
    EXPECT_NEAR(after, before, 8.0 * dim * std::exp2(-24) * sizes);
  }
}

TEST_F(ReflectionTest, MeansOfZerosReflectNothing) {
  std::vector<float> mean(2 * 96, 0.0f), w(mean.size(), 7.0f);
  mean[96] = 1e-40f;
  ASSERT_TRUE(key_reflections(hadamard_rotation(96), mean.data(), 2, 96, w.data()));
  EXPECT_EQ(norm({w.begin(), w.begin() + 96}), 0);
  EXPECT_NEAR(norm({w.begin() + 96, w.end()}), 1, 1e-6);
  const std::vector<float> given = normals(96, 1);
  std::vector<float> x = given;
  reflect(w.data(), 96, x.data());
  EXPECT_EQ(x, given);
  for (const float bad : {NAN, INFINITY}) {
    mean[100] = bad;
    std::fill(w.begin(), w.end(), 7.0f);
    const Status s = key_reflections(hadamard_rotation(96), mean.data(), 2, 96, w.data());
    EXPECT_EQ(s.code(), StatusCode::kNonFinite);
    EXPECT_NE(s.message().find("kv_head 1"), std::string::npos) << s.message();
    EXPECT_EQ(w, std::vector<float>(w.size(), 7.0f));
  }
}

// Coordinates of the mean have deviation 2, those of the rest 0.5: without the mean a step is about
// a fourth, its squared error a sixteenth.
TEST_F(ReflectionTest, CodesOfKeysNearTheirMeanHaveHalfTheError) {
  for (const int32_t dim : kHeadDims) {
    BlockWorld w(one_head(dim, 100), rng_);
    const std::vector<float> mean = normals(dim, 2);
    std::vector<float> keys = normals(100 * dim, 0.5f);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = half_to_float(float_to_half(keys[i] + mean[i % dim]));
    }
    w.cache.key_reflection = nullptr;
    const double plain = squared_error(coded(&w, keys), keys);
    const std::vector<float> normal = reflection(w.cache.rotation, mean);
    w.cache.key_reflection = normal.data();
    EXPECT_LT(squared_error(coded(&w, keys), keys), 0.5 * plain) << dim;
  }
}

// A step is at most 2 * 4.5 deviations / 15, an error a step / sqrt(12). fp16 zero points and
// results add less than a hundredth of that.
TEST_F(ReflectionTest, KeysFarFromTheMeanKeepTheirOwnScale) {
  for (const int32_t dim : kHeadDims) {
    BlockWorld w(one_head(dim, 32), rng_);
    const std::vector<float> normal = reflection(w.cache.rotation, normals(dim, 10));
    w.cache.key_reflection = normal.data();
    std::vector<float> keys = normals(32 * dim, 1e-2f);
    std::fill_n(keys.begin() + 3 * dim, dim, 0.0f);
    for (float& x : keys) x = half_to_float(float_to_half(x));
    const std::vector<float> got = coded(&w, keys);
    for (int32_t d = 0; d < dim; ++d) ASSERT_EQ(got[3 * dim + d], 0) << dim;
    EXPECT_LT(std::sqrt(squared_error(got, keys)) / norm(keys), 0.18) << dim;
  }
}

}  // namespace
}  // namespace tierkv
