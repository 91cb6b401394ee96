// SPDX-License-Identifier: Apache-2.0
#include "codec/format/fixed_block.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/code_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

constexpr uint16_t kPoison = 0x5a5a;
constexpr Component kComponents[] = {Component::kKey, Component::kValue};

class FixedBlock : public RandomTest {
 protected:
  FixedBlock() : source_(seed_) {}

  // Tokens of different ranges and centres.
  std::vector<uint16_t> values(int32_t head_dim) {
    std::vector<uint16_t> y;
    for (int32_t t = 0; t < kBlockTokens; ++t) {
      const double spread = std::exp2(20 * source_.uniform() - 14);
      const double centre = spread * (4 * source_.uniform() - 2);
      for (int32_t d = 0; d < head_dim; ++d) {
        y.push_back(
            float_to_half(static_cast<float>(centre + spread * (2 * source_.uniform() - 1))));
      }
    }
    return y;
  }
  Status decode(const std::vector<uint8_t>& bytes, int32_t head_dim, Component c, int32_t bits,
                std::vector<uint16_t>* y) {
    y->assign(static_cast<size_t>(kBlockTokens) * head_dim, kPoison);
    return decode_fixed_block(bytes.data(), static_cast<int64_t>(bytes.size()), head_dim, c, bits,
                              y->data());
  }

  CodeSource source_;
};

// |y - y'| is half a step for the code, where fp16 rounds the scale by up to 2^-11 of itself, which
// the largest code multiplies, the zero point by 2^-11 of itself, and y' by 2^-11 of itself; below
// 2^-14 by 2^-25 each.
TEST_F(FixedBlock, ReadsWithinHalfAStep) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t bits : {8, 4}) {
      for (const Component c : kComponents) {
        const std::vector<uint16_t> y = values(head_dim);
        std::vector<uint8_t> bytes = {1, 2, 3};  // appends
        encode_fixed_block(y.data(), head_dim, c, bits, &bytes);
        bytes.erase(bytes.begin(), bytes.begin() + 3);
        ASSERT_EQ(bytes.size(), size_t{16} * fixed_block_units(bits, head_dim));
        std::vector<uint16_t> back;
        const Status s = decode(bytes, head_dim, c, bits, &back);
        ASSERT_TRUE(s) << s.message();
        const int32_t dims = std::min(head_dim, kSliceDims), levels = 1 << bits;
        for (size_t first = 0; first < y.size(); first += dims) {
          float lo = half_to_float(y[first]), hi = lo, most = 0;
          for (int32_t d = 0; d < dims; ++d) {
            const float x = half_to_float(y[first + d]);
            lo = std::min(lo, x), hi = std::max(hi, x), most = std::max(most, std::fabs(x));
          }
          const float scale = (hi - lo) / static_cast<float>(levels - 1);
          const float rounding = 0x1p-11f * (hi - lo + 3 * most) + (levels + 3) * 0x1p-25f;
          for (int32_t d = 0; d < dims; ++d) {
            ASSERT_LE(std::fabs(half_to_float(y[first + d]) - half_to_float(back[first + d])),
                      0.5f * scale + rounding)
                << head_dim << " " << bits << " value " << first + d;
          }
        }
      }
    }
  }
}

TEST_F(FixedBlock, ConstantsAndExtremesSurvive) {
  for (const int32_t bits : {8, 4}) {
    std::vector<uint16_t> y(64 * 64, float_to_half(-3.5f)), back;
    for (int32_t d = 0; d < 64; ++d) {
      y[64 + d] = float_to_half(d % 2 ? 65504.0f : -65504.0f);
      y[128 + d] = static_cast<uint16_t>(d % 2);  // 0 and 2^-24: a scale below fp16
      y[192 + d] = 0;
    }
    std::vector<uint8_t> bytes;
    encode_fixed_block(y.data(), 64, Component::kValue, bits, &bytes);
    ASSERT_TRUE(decode(bytes, 64, Component::kValue, bits, &back));
    EXPECT_EQ(back[5], float_to_half(-3.5f));
    EXPECT_EQ(back[64], 0xfbff);
    EXPECT_GE(half_to_float(back[65]), 65000.0f);
    EXPECT_LE(half_to_float(back[65]), 65504.0f);
    for (int32_t d = 0; d < 64; ++d) EXPECT_EQ(back[128 + d], 0);
  }
}

TEST_F(FixedBlock, RefusesEveryDamage) {
  for (const int32_t bits : {8, 4}) {
    const std::vector<uint16_t> y = values(96);
    std::vector<uint8_t> bytes;
    std::vector<uint16_t> back;
    encode_fixed_block(y.data(), 96, Component::kKey, bits, &bytes);
    ASSERT_TRUE(decode(bytes, 96, Component::kKey, bits, &back));
    for (size_t i = 0; i < bytes.size(); ++i) {
      std::vector<uint8_t> damaged = bytes;
      damaged[i] ^= static_cast<uint8_t>(1 << source_.below(8));
      ASSERT_EQ(decode(damaged, 96, Component::kKey, bits, &back).code(), StatusCode::kCorrupt);
      ASSERT_TRUE(std::all_of(back.begin(), back.end(), [](uint16_t x) { return x == 0; }));
    }
    for (const size_t size : {size_t{0}, size_t{15}, size_t{16}, bytes.size() - 16}) {
      std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + static_cast<int64_t>(size));
      EXPECT_EQ(decode(cut, 96, Component::kKey, bits, &back).code(), StatusCode::kCorrupt);
    }
    EXPECT_EQ(decode(bytes, 96, Component::kValue, bits, &back).code(), StatusCode::kCorrupt);
    EXPECT_EQ(decode(bytes, 96, Component::kKey, 12 - bits, &back).code(), StatusCode::kCorrupt);
  }
}

// The checksum agrees.
TEST_F(FixedBlock, RefusesScalesThatAreNone) {
  const std::vector<uint16_t> y = values(64);
  std::vector<uint8_t> bytes;
  std::vector<uint16_t> back;
  encode_fixed_block(y.data(), 64, Component::kKey, 8, &bytes);
  const FixedBlockLayout at = fixed_block_layout(8, 64);
  const struct {
    int32_t byte;
    uint16_t bits;
  } kCases[] = {{0, 0x7c00}, {0, 0x8001}, {0, 0x7e00}, {2, 0xfc00}, {2, 0x7d00}};
  for (const auto& made : kCases) {
    std::vector<uint8_t> changed = bytes;
    store_u16(&changed[at.metadata_byte(2) + 8 * 3 + made.byte], made.bits);
    store_u16(&changed[14], block_checksum(changed.data(), at.bytes));
    EXPECT_EQ(decode(changed, 64, Component::kKey, 8, &back).code(), StatusCode::kCorrupt);
  }
}

}  // namespace
}  // namespace tierkv
