// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/segment_encoder.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace tierkv::analysis {
namespace {

class SegmentTest : public testing::Test {
 protected:
  SegmentTest() : seed_(std::random_device{}()), rng_(seed_) {}

  std::vector<float> values(int64_t n) {
    std::normal_distribution<float> d(0.2f, 1.5f);
    std::vector<float> x(n);
    for (float& v : x) v = half_to_float(float_to_half(d(rng_)));
    return x;
  }

  // Encodes chunk by chunk, decodes in reads of another size, returns the reconstruction.
  std::vector<float> round_trip(const SegmentCoding& coding, const std::vector<float>& x,
                                EncodedSegment* segment) {
    const int64_t tokens = static_cast<int64_t>(x.size()) / coding.stored.head_dim;
    const SegmentFormat& f = coding.stored;
    SegmentEncoder encoder(coding);
    for (int64_t t = 0; t < tokens; t += f.chunk_tokens()) {
      const int64_t n = std::min(f.chunk_tokens(), tokens - t);
      std::vector<float> chunk(x.begin() + t * f.head_dim, x.begin() + (t + n) * f.head_dim);
      EXPECT_EQ(encoder.append(chunk.data(), n), StatusCode::kOk);
    }
    EXPECT_EQ(encoder.finish(segment), StatusCode::kOk);
    EXPECT_EQ(segment->tokens, tokens);
    SegmentReader decoder(coding, *segment);
    std::vector<float> y(x.size(), NAN);
    for (int64_t t = 0; t < tokens; t += 29) {
      const int64_t n = std::min<int64_t>(29, tokens - t);
      EXPECT_EQ(decoder.read(n, y.data() + t * f.head_dim), StatusCode::kOk);
    }
    float extra;
    EXPECT_EQ(decoder.read(1, &extra), StatusCode::kCorrupt);
    return y;
  }

  uint32_t seed_;
  std::mt19937 rng_;
};

TEST_F(SegmentTest, RawIsExactAndTakesTwoBytesAValue) {
  for (const Coder coder : {Coder::kNone, Coder::kZstd}) {
    SegmentCoding f;
    f.stored.head_dim = 96;
    f.code_with(coder, nullptr);
    const std::vector<float> x = values(131 * 96);
    EncodedSegment s;
    EXPECT_EQ(round_trip(f, x, &s), x) << seed_;
    if (coder == Coder::kNone) {
      EXPECT_EQ(stored_bytes(s), 2 * 131 * 96);
    }
  }
}

// The segment adds nothing to the quantiser: every unit reconstructs as quantise + dequantise of
// its values alone.
TEST_F(SegmentTest, TokenWiseCodesMatchTheQuantiser) {
  for (const int32_t bits : {8, 4, 2, 1}) {
    for (const int32_t group : {0, 32}) {
      SegmentCoding f;
      f.stored.format = token_wise(bits, group);
      f.stored.head_dim = 128;
      const std::vector<float> x = values(77 * 128);
      EncodedSegment s;
      const std::vector<float> y = round_trip(f, x, &s);
      const int64_t n = group > 0 ? group : 128;
      for (size_t i = 0; i < x.size(); i += n) {
        QuantParams p;
        std::vector<uint8_t> codes(n);
        ASSERT_EQ(quantize_minmax(x.data() + i, n, 1, 1 << bits, &p, codes.data()),
                  StatusCode::kOk);
        for (int64_t j = 0; j < n; ++j) {
          ASSERT_EQ(y[i + j],
                    dequantize(codes[j], half_to_float(p.scale), half_to_float(p.zero_point)))
              << seed_;
        }
      }
      EXPECT_EQ(stored_bytes(s), 77 * (128 * bits / 8 + 4 * 128 / n));
    }
  }
}

TEST_F(SegmentTest, RelativeStepsKeepTheirBoundInEveryUnit) {
  for (const Unit unit : {Unit::kBlock, Unit::kChannel, Unit::kToken}) {
    SegmentCoding f;
    f.stored.format = {
        CodeType::uniform(0), StepRule::kRelative, unit, unit == Unit::kToken ? 0 : 64, 0.05,
        Entropy::kHuffman,    BasisKind::kNone};
    f.stored.head_dim = 64;
    f.code_with(Coder::kZstd, nullptr);
    const std::vector<float> x = values(200 * 64);
    EncodedSegment s;
    const std::vector<float> y = round_trip(f, x, &s);
    const auto [lo, hi] = std::minmax_element(x.begin(), x.end());
    // Every unit's range is at most the whole one; fp16 rounding of step (2^-11) and one of the
    // product and sum.
    const double bound = 0.05 * (*hi - *lo) * 0.5 * (1 + 0x1p-10) + 1e-4;
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_LE(std::fabs(x[i] - y[i]), bound) << seed_ << " " << i;
  }
}

TEST_F(SegmentTest, AbsoluteStepErrorIsHalfAStepInEveryBasis) {
  for (const BasisKind kind : {BasisKind::kNone, BasisKind::kMean, BasisKind::kHadamard}) {
    const std::vector<float> x = values(150 * 128);
    const Basis basis = kind == BasisKind::kNone   ? Basis::none(128)
                        : kind == BasisKind::kMean ? Basis::mean_removed(values(128))
                                                   : Basis::hadamard(128);
    SegmentCoding f;
    f.stored.format = {
        CodeType::uniform(0), StepRule::kAbsolute, Unit::kGlobal, 0, 0.3, Entropy::kHuffman, kind};
    f.stored.head_dim = 128;
    f.stored.step = 0.37f;
    f.stored.basis = &basis;
    f.code_with(Coder::kHuffman, nullptr);
    CodeHistogram counts(Component::kKey, 128);
    ChunkCodes chunk;
    std::vector<float> coordinates = x;
    basis.apply(coordinates.data(), 150);
    ASSERT_EQ(quantize_chunk(f.stored, coordinates.data(), 150, &chunk), StatusCode::kOk);
    counts.add(chunk.codes.data(), 150);
    Result<Codebook> book = build_codebook(counts);
    ASSERT_TRUE(book.is_ok());
    f.stored.codebook = &book.value();
    EncodedSegment s;
    const std::vector<float> y = round_trip(f, x, &s);
    double worst = 0, squares = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      worst = std::max(worst, static_cast<double>(std::fabs(x[i] - y[i])));
      squares += std::pow(x[i] - y[i], 2);
    }
    // Without rotation each coordinate is within half a step; a rotation keeps the norm: step /
    // sqrt(12) rms.
    if (kind != BasisKind::kHadamard) {
      EXPECT_LE(worst, 0.37 / 2 + 1e-5) << seed_;
    }
    EXPECT_NEAR(std::sqrt(squares / static_cast<double>(x.size())), 0.37 / std::sqrt(12.0), 0.01)
        << seed_;
    EXPECT_LT(stored_bytes(s), 2 * 150 * 128 / 3);
  }
}

TEST_F(SegmentTest, UnitsThatNeedTooManyLevelsAreStoredRaw) {
  SegmentCoding f;
  f.stored.format = {CodeType::uniform(0), StepRule::kRelative, Unit::kBlock, 64, 0.001,
                     Entropy::kHuffman,    BasisKind::kNone};
  f.stored.head_dim = 64;
  f.code_with(Coder::kZstd, nullptr);
  const std::vector<float> x = values(128 * 64);
  EncodedSegment s;
  EXPECT_EQ(round_trip(f, x, &s), x) << seed_;
  EXPECT_EQ(s.raw_values.size(), x.size());
}

TEST_F(SegmentTest, BeyondHalfRangeIsNamed) {
  SegmentCoding f;
  f.stored.head_dim = 4;
  std::vector<float> x = {1, 2, 1e6f, 3};
  EXPECT_EQ(SegmentEncoder(f).append(x.data(), 1), StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace tierkv::analysis
