// SPDX-License-Identifier: Apache-2.0
// Rows to codes and back: bounds, both forms, refusals, pinned bytes.
#include "codec/host/coded/weighted_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "codec/format/global_step.h"
#include "tests/codec/support/simd_targets.h"
#include "tests/codec/support/weighted_source.h"
#include "tests/support/plain_weighted_rows.h"

namespace tierkv {
namespace {

constexpr int32_t kHeadDims[] = {64, 80, 96, 128, 256, 17};

class WeightedRowsTest : public testing::Test {
 protected:
  WeightedRowsTest() : seed_(std::random_device{}()), rows_(seed_) {
    RecordProperty("seed", seed_);
  }

  // A row of keys and values with everything that a row can have.
  void make_row(int32_t head_dim, int32_t tokens, RopePairing pairing) {
    head_dim_ = head_dim;
    tokens_ = tokens;
    const int32_t most = head_dim / 2 * 2;
    const int32_t rotary = pairing == RopePairing::kNone ? 0
                           : rows_.source.below(3)       ? most
                                                         : most / 4 * 2;
    rope_ = *make_rope_table(rows_.rope(rotary == 0 ? RopePairing::kNone : pairing, rotary),
                             head_dim, kPositions);
    first_ = rows_.source.below(kPositions - tokens + 1);
    keys_ = rows_.rows(tokens, head_dim);
    values_ = rows_.rows(tokens, head_dim, std::exp(8 * rows_.source.uniform() - 4));
    WeightedFit fit;
    const std::vector<double> energy = rows_.energies(head_dim);
    if (rows_.source.below(2)) fit.query_energy = energy.data();
    fit.key_scale = 0.5 + rows_.source.uniform();
    const Result<WeightedRow> row = fit_weighted_row(fit, head_dim, keys(), &rope_);
    ASSERT_TRUE(row.is_ok()) << row.status().message();
    row_ = *row;
    importance_ = rows_.key_exponents(tokens);
    exponents_.resize(static_cast<size_t>(tokens));
    codes_.resize(keys_.size());
  }
  WeightedTokens keys() const { return {keys_.data(), tokens_, first_}; }
  WeightedTokens tokens(Component c) const {
    return {c == Component::kKey ? keys_.data() : values_.data(), tokens_, first_};
  }
  WeightedSource coded() const { return {codes_.data(), exponents_.data(), tokens_, first_}; }
  Status encode(Component c) {
    const WeightedTokens t = tokens(c);
    if (Status s = token_exponents(c, t, head_dim_, importance_.data(), exponents_.data()); !s)
      return s;
    return quantize_weighted(row_, c, t, exponents_.data(), codes_.data());
  }

  static constexpr int32_t kPositions = 5000;  // that the table of turns has
  uint32_t seed_;
  WeightedSourceOfRows rows_;
  int32_t head_dim_ = 0, tokens_ = 0;
  int64_t first_ = 0;
  RopeTable rope_;
  WeightedRow row_;
  std::vector<float> keys_, values_;
  std::vector<int8_t> importance_, exponents_;
  std::vector<int16_t> codes_;
};

// |x' - x| in the coordinates of the codes: half a step, and roundings. The quotient is off by
// 2^-24 of itself for the difference, the step and the division each, so the code can be a half and
// 3 x 2^-24 of itself off; x' adds 2^-24 of |x - mean| for the product and 2^-24 of itself. With
// |x'| + |x| + |mean| + step as the size all of this is below 8 x 2^-24 of it. Undoing RoPE is in
// both.
TEST_F(WeightedRowsTest, ErrorIsHalfAStep) {
  for (int32_t head_dim : kHeadDims) {
    for (RopePairing pairing :
         {RopePairing::kNone, RopePairing::kHalves, RopePairing::kNeighbours}) {
      ASSERT_NO_FATAL_FAILURE(make_row(head_dim, 40, pairing));
      for (Component c : {Component::kKey, Component::kValue}) {
        ASSERT_TRUE(encode(c));
        WeightedRow still = row_;
        still.rope = nullptr;  // decoded keys stay before RoPE
        std::vector<float> back(codes_.size()), x(tokens(c).x, tokens(c).x + codes_.size());
        ASSERT_TRUE(dequantize_weighted(still, c, coded(), back.data()));
        for (int32_t t = 0; t < tokens_; ++t) {
          float* row = x.data() + t * head_dim;
          if (c == Component::kKey) undo_rope(rope_, first_ + t, row);
          for (int32_t d = 0; d < head_dim; ++d) {
            const bool key = c == Component::kKey;
            const double w = key && !row_.key_weight.empty() ? row_.key_weight[d] : 1;
            const double mean = key ? half_to_float(row_.key_mean[d]) : 0;
            const double step =
                (key ? row_.key_step : row_.value_step) / w * std::exp2(exponents_[t] / 8.0);
            const double y = back[t * head_dim + d];
            const double size = std::abs(y) + std::abs(row[d]) + std::abs(mean) + step;
            ASSERT_LE(std::abs(y - row[d]), step / 2 + 8 * 0x1p-24 * size) << "seed " << seed_;
          }
        }
      }
    }
  }
}

// A weight's square root shapes the noise: its variance in a channel is (S f / w)^2 / 12, so the
// logit's error, the sum of E_d times it, is the same for all pairs up to w^2. Over 4096 tokens the
// estimate of a variance of uniform noise is within 6 standard deviations, 6 sqrt(0.8 / 4096) =
// 8.4 %, but for steps that are wide against the spread.
TEST_F(WeightedRowsTest, NoiseFollowsTheWeights) {
  constexpr int32_t kDim = 64, kTokens = 4096;
  head_dim_ = kDim;
  tokens_ = kTokens;
  keys_ = rows_.rows(kTokens, kDim);
  const std::vector<double> energy = rows_.energies(kDim);
  WeightedFit fit;
  fit.query_energy = energy.data();
  fit.k = 0.05;
  row_ = *fit_weighted_row(fit, kDim, keys(), nullptr);
  double mean_square = 0;
  for (float w : row_.key_weight) mean_square += double{w} * w / kDim;
  EXPECT_NEAR(mean_square, 1, 1e-6);
  const double trace = std::accumulate(energy.begin(), energy.end(), 0.0);
  EXPECT_FLOAT_EQ(row_.key_step,
                  static_cast<float>(key_step(0.05, 1.01 * trace, 1 / std::sqrt(64.0))));
  for (int32_t d = 1; d < kDim; ++d) {
    EXPECT_NEAR(std::pow(row_.key_weight[d] / row_.key_weight[0], 4), energy[d] / energy[0],
                1e-4 * energy[d] / energy[0]);
  }
  exponents_.assign(kTokens, 0);
  codes_.resize(keys_.size());
  ASSERT_TRUE(quantize_weighted(row_, Component::kKey, keys(), exponents_.data(), codes_.data()));
  std::vector<float> back(keys_.size());
  ASSERT_TRUE(dequantize_weighted(row_, Component::kKey, coded(), back.data()));
  // A normal variable of deviation s has noise step^2 / 12 but for a share of 12 / pi^2 exp(-2 pi^2
  // s^2 / step^2), 0.9 % at half a step. 4096 tokens estimate it to 1.4 %: 0.1 is six deviations.
  int32_t checked = 0;
  for (int32_t d = 0; d < kDim; ++d) {
    double noise = 0, sum = 0, square = 0;
    for (int32_t t = 0; t < kTokens; ++t) {
      const double x = keys_[t * kDim + d];
      noise += std::pow(back[t * kDim + d] - x, 2) / kTokens;
      sum += x / kTokens;
      square += x * x / kTokens;
    }
    const double step = row_.key_step / row_.key_weight[d];
    if (std::sqrt(square - sum * sum) < 0.55 * step) continue;
    ++checked;
    EXPECT_NEAR(noise * 12 / (step * step), 1, 0.1) << d << " seed " << seed_;
  }
  EXPECT_GT(checked, kDim / 2) << "seed " << seed_;
}

TEST_F(WeightedRowsTest, BothFormsMakeTheSameBits) {
  SimdTargets targets;
  for (const int64_t target : targets.list()) {
    SimdTargets::choose(target);
    SCOPED_TRACE(hwy::TargetName(target));
    for (int32_t head_dim : kHeadDims) {
      const auto pairing = static_cast<RopePairing>(rows_.source.below(3));
      ASSERT_NO_FATAL_FAILURE(make_row(head_dim, 1 + rows_.source.below(64), pairing));
      for (Component c : {Component::kKey, Component::kValue}) {
        ASSERT_TRUE(encode(c));
        std::vector<int8_t> e(exponents_.size());
        std::vector<int16_t> codes(codes_.size());
        ASSERT_TRUE(
            reference::token_exponents(c, tokens(c), head_dim, importance_.data(), e.data()));
        ASSERT_EQ(e, exponents_) << "seed " << seed_;
        ASSERT_TRUE(reference::quantize_weighted(row_, c, tokens(c), e.data(), codes.data()));
        ASSERT_EQ(codes, codes_) << "seed " << seed_ << " dims " << head_dim;
        std::vector<float> a(codes_.size()), b(codes_.size());
        ASSERT_TRUE(dequantize_weighted(row_, c, coded(), a.data()));
        ASSERT_TRUE(reference::dequantize_weighted(row_, c, coded(), b.data()));
        ASSERT_EQ(std::memcmp(a.data(), b.data(), 4 * a.size()), 0) << "seed " << seed_;
      }
    }
  }
}

TEST_F(WeightedRowsTest, ExponentsOfValues) {
  constexpr int32_t kDim = 96;
  values_.assign(6 * kDim, 0.0f);
  for (int32_t d = 0; d < kDim; ++d) {
    values_[1 * kDim + d] = 1;
    values_[2 * kDim + d] = d % 2 ? -4 : 4;
    values_[3 * kDim + d] = 65504;
    values_[4 * kDim + d] = 0x1p-24f;
    values_[5 * kDim + d] = 1;
  }
  const int8_t g[] = {4, 0, 0, 4, 4, -8};
  int8_t e[6];
  ASSERT_TRUE(token_exponents(Component::kValue, {values_.data(), 6, 0}, kDim, g, e));
  EXPECT_EQ(std::vector<int8_t>(e, e + 6), (std::vector<int8_t>{-128, 0, 16, 127, -128, -8}));
  ASSERT_TRUE(token_exponents(Component::kKey, {values_.data(), 6, 0}, kDim, g, e));
  EXPECT_EQ(std::vector<int8_t>(e, e + 6), std::vector<int8_t>(g, g + 6));
  ASSERT_TRUE(token_exponents(Component::kKey, {values_.data(), 6, 0}, kDim, nullptr, e));
  EXPECT_EQ(std::vector<int8_t>(e, e + 6), std::vector<int8_t>(6, 0));
  // A token of zeros has codes 0 and comes back as zeros.
  row_.head_dim = kDim;
  row_.key_step = row_.value_step = 0.5f;
  int16_t codes[kDim];
  float back[kDim];
  e[0] = -128;
  ASSERT_TRUE(quantize_weighted(row_, Component::kValue, {values_.data(), 1, 0}, e, codes));
  ASSERT_TRUE(dequantize_weighted(row_, Component::kValue, {codes, e, 1, 0}, back));
  for (int32_t d = 0; d < kDim; ++d) EXPECT_TRUE(codes[d] == 0 && back[d] == 0);
}

TEST_F(WeightedRowsTest, RefusesWhatCannotBeCoded) {
  for (Component c : {Component::kKey, Component::kValue}) {
    for (int32_t head_dim : {64, 17}) {
      ASSERT_NO_FATAL_FAILURE(make_row(head_dim, 5, RopePairing::kHalves));
      std::vector<float>& x = c == Component::kKey ? keys_ : values_;
      ASSERT_TRUE(encode(c));
      for (float wrong : {NAN, INFINITY, -INFINITY}) {
        for (size_t i : {size_t{0}, x.size() / 2, x.size() - 1}) {
          const float before = x[i];
          x[i] = wrong;
          EXPECT_EQ(quantize_weighted(row_, c, tokens(c), exponents_.data(), codes_.data()).code(),
                    StatusCode::kNonFinite);
          EXPECT_EQ(
              reference::quantize_weighted(row_, c, tokens(c), exponents_.data(), codes_.data())
                  .code(),
              StatusCode::kNonFinite);
          if (c == Component::kValue) {
            EXPECT_EQ(encode(c).code(), StatusCode::kNonFinite);
          }
          x[i] = before;
          ASSERT_TRUE(encode(c));
        }
      }
      x[3] = 1e9f;
      exponents_.assign(5, -8);
      EXPECT_EQ(quantize_weighted(row_, c, tokens(c), exponents_.data(), codes_.data()).code(),
                StatusCode::kOutOfRange);
      EXPECT_EQ(
          reference::quantize_weighted(row_, c, tokens(c), exponents_.data(), codes_.data()).code(),
          StatusCode::kOutOfRange);
    }
  }
  exponents_[0] = 5;
  EXPECT_EQ(
      quantize_weighted(row_, Component::kKey, keys(), exponents_.data(), codes_.data()).code(),
      StatusCode::kInvalidArgument);
  exponents_[0] = 0;
  first_ = rope_.positions() - 4;
  EXPECT_EQ(
      quantize_weighted(row_, Component::kKey, keys(), exponents_.data(), codes_.data()).code(),
      StatusCode::kOutOfRange);
  importance_[1] = -9;
  EXPECT_EQ(
      token_exponents(Component::kValue, keys(), head_dim_, importance_.data(), exponents_.data())
          .code(),
      StatusCode::kInvalidArgument);
}

TEST_F(WeightedRowsTest, FitWithoutAProfileIsRelativeToTheKeys) {
  ASSERT_NO_FATAL_FAILURE(make_row(64, 256, RopePairing::kHalves));
  WeightedFit fit;
  fit.k = 0.3;
  const Result<WeightedRow> row = fit_weighted_row(fit, 64, keys(), &rope_);
  ASSERT_TRUE(row.is_ok());
  std::vector<float> x = keys_;
  double sum = 0;
  for (int32_t t = 0; t < 256; ++t) undo_rope(rope_, first_ + t, x.data() + t * 64);
  for (int32_t d = 0; d < 64; ++d) {
    double mean = 0;
    for (int32_t t = 0; t < 256; ++t) mean += x[t * 64 + d] / 256.0;
    EXPECT_NEAR(half_to_float(row->key_mean[d]), mean, 0x1p-10 * std::abs(mean) + 1e-6);
    for (int32_t t = 0; t < 256; ++t)
      sum += std::pow(x[t * 64 + d] - half_to_float(row->key_mean[d]), 2);
  }
  // Sums of fp32 squares: 8 additions of positive numbers, each 2^-24 off.
  EXPECT_NEAR(row->key_step, 0.3 * std::sqrt(sum / keys_.size()), 1e-6 * row->key_step);
  EXPECT_TRUE(row->key_weight.empty());
  const std::vector<float> same(256 * 64, 1.0f);
  EXPECT_EQ(fit_weighted_row(fit, 64, {same.data(), 256, 0}, nullptr)->key_step, 1.0f);
  const std::vector<float> wide(64, 1e5f);
  EXPECT_EQ(fit_weighted_row(fit, 64, {wide.data(), 1, 0}, nullptr).status().code(),
            StatusCode::kOutOfRange);
  fit.k = 0;
  EXPECT_EQ(fit_weighted_row(fit, 64, keys(), &rope_).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tierkv
