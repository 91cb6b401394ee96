// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/baselines/baseline_coders.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tools/analysis/baselines/fse.h"
#include "tools/analysis/scheme/code_entropy.h"

namespace tierkv::analysis {
namespace {

using Codes = std::vector<int16_t>;

struct Shape {
  int32_t tokens, head_dim;
};
constexpr Shape kShapes[] = {{1, 1}, {1, 128}, {64, 64}, {17, 96}, {64, 128}, {63, 256}, {5, 7}};

class BaselineCoders : public testing::Test {
 protected:
  // Normal around `mean`, rounded; a few codes anywhere in 16 bits with `outliers`.
  Codes draw(const Shape& s, double mean, double deviation, bool outliers) {
    Codes codes(static_cast<size_t>(s.tokens) * s.head_dim);
    std::normal_distribution<double> normal(mean, deviation);
    for (int16_t& c : codes) {
      c = static_cast<int16_t>(std::clamp(std::round(normal(random_)), -32768.0, 32767.0));
      if (outliers && random_() % 50 == 0) c = static_cast<int16_t>(random_());
    }
    return codes;
  }

  CodeHistogram histogram(const Codes& codes, const Shape& s) {
    CodeHistogram h(Component::kKey, s.head_dim);
    h.add(codes.data(), s.tokens);
    return h;
  }

  void expect_round_trip(const BlockCoder& coder, const Codes& codes, const Shape& s) {
    std::vector<uint8_t> bytes;
    ASSERT_EQ(coder.encode(codes.data(), s.tokens, s.head_dim, &bytes), StatusCode::kOk);
    Codes decoded(codes.size(), 0x5a5a);
    ASSERT_EQ(coder.decode(bytes.data(), static_cast<int64_t>(bytes.size()), s.tokens, s.head_dim,
                           decoded.data()),
              StatusCode::kOk);
    ASSERT_EQ(decoded, codes);
  }

  // Shortened and damaged blocks are refused or decode to something, within their bytes. There is
  // no checksum: a cut passes where 12 bits of state happen to end at the first one.
  void expect_no_overrun(const BlockCoder& coder, const Codes& codes, const Shape& s) {
    std::vector<uint8_t> bytes;
    ASSERT_EQ(coder.encode(codes.data(), s.tokens, s.head_dim, &bytes), StatusCode::kOk);
    Codes decoded(codes.size());
    for (int i = 0; i < 50; ++i) {
      std::vector<uint8_t> bad(bytes.begin(), bytes.begin() + random_() % (bytes.size() + 1));
      if (!bad.empty() && i % 2 == 0) bad[random_() % bad.size()] ^= 1 << random_() % 8;
      bad.shrink_to_fit();
      const bool passed = coder.decode(bad.data(), static_cast<int64_t>(bad.size()), s.tokens,
                                       s.head_dim, decoded.data()) == StatusCode::kOk;
      if (bad.size() + 2 >= bytes.size() || i % 2 == 0) continue;
      ++cut_;
      cut_and_passed_ += passed;
    }
  }

  int cut_ = 0, cut_and_passed_ = 0;
  std::random_device::result_type seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

TEST_F(BaselineCoders, EveryStageRoundTripsAnyCodes) {
  for (const Shape& s : kShapes) {
    for (const double deviation : {0.0, 0.4, 3.0, 60.0, 9000.0}) {
      for (const bool outliers : {false, true}) {
        const Codes codes = draw(s, 100, deviation, outliers);
        const FseCoder fse(histogram(codes, s));
        const auto fixed = make_fixed_length_coder(), shuffled = make_bitshuffle_coder(3);
        for (const BlockCoder* coder :
             {static_cast<const BlockCoder*>(&fse), static_cast<const BlockCoder*>(fixed.get()),
              static_cast<const BlockCoder*>(shuffled.get())}) {
          expect_round_trip(*coder, codes, s);
          expect_no_overrun(*coder, codes, s);
        }
      }
    }
  }
  EXPECT_GT(cut_, 500);
  EXPECT_LT(cut_and_passed_, cut_ / 100);
}

// A table serves blocks whose codes it has never seen.
TEST_F(BaselineCoders, FseEscapesWhatItsTableDoesNotHold) {
  const Shape s = {64, 128};
  const FseCoder coder(histogram(draw(s, 0, 2, false), s));
  expect_round_trip(coder, draw(s, 0, 2, true), s);
  expect_round_trip(coder, draw(s, -9000, 5, false), s);
  // Inside of the range, but never seen.
  Codes gap(s.tokens * s.head_dim, -40);
  std::fill(gap.begin() + 4000, gap.end(), 40);
  const FseCoder two(histogram(gap, s));
  gap[17] = 3;
  expect_round_trip(two, gap, s);
}

// 8192 codes: the first state, the last one and the rounding of counts to states cost little.
TEST_F(BaselineCoders, FseComesCloseToTheEntropy) {
  const Shape s = {64, 128};
  for (const double deviation : {0.3, 1.0, 2.5, 8.0, 40.0}) {
    const Codes codes = draw(s, 0, deviation, false);
    const CodeHistogram h = histogram(codes, s);
    std::vector<uint8_t> bytes;
    ASSERT_EQ(FseCoder(h).encode(codes.data(), s.tokens, s.head_dim, &bytes), StatusCode::kOk);
    const double bits = 8.0 * static_cast<double>(bytes.size()) / static_cast<double>(codes.size());
    EXPECT_LT(bits, code_entropy(h) + 0.03) << deviation;
    EXPECT_GT(bits, code_entropy(h)) << deviation;
  }
}

TEST_F(BaselineCoders, FixedLengthTakesTheBitsOfEachToken) {
  const Shape s = {3, 8};
  const Codes codes = {5, 5, 5, 5, 5, 5, 5, 5, -3, -2, -1, 0, 1, 2, 3, 4, 0, 9, 0, 0, 0, 0, 0, 0};
  std::vector<uint8_t> bytes;
  ASSERT_EQ(make_fixed_length_coder()->encode(codes.data(), s.tokens, s.head_dim, &bytes),
            StatusCode::kOk);
  EXPECT_EQ(bytes.size(), 3 * 2 + 0 + 3 + 4u);  // widths 0, 3 and 4
}

TEST_F(BaselineCoders, PredictionIsUndone) {
  for (const Prediction kind :
       {Prediction::kNone, Prediction::kToken, Prediction::kChannel, Prediction::kPlane}) {
    for (const int32_t bits : {1, 2, 4, 8, 16}) {
      const Predictor predictor = {kind, bits};
      for (const Shape& s : kShapes) {
        Codes codes(static_cast<size_t>(s.tokens) * s.head_dim);
        for (int16_t& c : codes) {
          c = static_cast<int16_t>(bits == 16 ? random_() : random_() % (1u << bits));
        }
        Codes rest = codes;
        predictor.predict(s.tokens, s.head_dim, rest.data());
        if (kind != Prediction::kNone) {
          const auto [low, high] = std::minmax_element(rest.begin(), rest.end());
          EXPECT_GE(*low, -(1 << (bits - 1)));
          EXPECT_LT(*high, 1 << (bits - 1));
        }
        predictor.undo(s.tokens, s.head_dim, rest.data());
        ASSERT_EQ(rest, codes);
      }
    }
  }
}

TEST_F(BaselineCoders, PlanePredictionLeavesTheCornerOfAPlane) {
  const Shape s = {10, 12};
  Codes codes;
  for (int32_t t = 0; t < s.tokens; ++t) {
    for (int32_t c = 0; c < s.head_dim; ++c)
      codes.push_back(static_cast<int16_t>(7 + 3 * t - 2 * c));
  }
  Predictor{Prediction::kPlane, 16}.predict(s.tokens, s.head_dim, codes.data());
  for (int32_t t = 1; t < s.tokens; ++t) {
    for (int32_t c = 1; c < s.head_dim; ++c) EXPECT_EQ(codes[t * s.head_dim + c], 0);
  }
  EXPECT_EQ(codes[0], 7);
}

}  // namespace
}  // namespace tierkv::analysis
