// SPDX-License-Identifier: Apache-2.0
// The per-lane maths of the kernels against the plain statements: code_position() and
// minmax_code().
#include "codec/format/fragment_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

class FragmentCodes : public RandomTest {
 protected:
  float random_half() {  // finite, of any magnitude
    for (;;) {
      const float x = half_to_float(static_cast<uint16_t>(rng_()));
      if (is_finite(x)) return x;
    }
  }
};

void expect_code(float x, QuantParams p, int32_t bits) {
  const int32_t levels = 1 << bits;
  const int32_t expected =
      minmax_code(x, half_to_float(p.scale), half_to_float(p.zero_point), levels);
  const uint32_t code = biased_code(x, make_code_maker(p), static_cast<float>(levels - 1)) & 255u;
  ASSERT_EQ(static_cast<int32_t>(code), expected)
      << "x " << x << " scale " << half_to_float(p.scale) << " zero "
      << half_to_float(p.zero_point);
}

// Every fp16 scale, at each tie and at the floats next to it: where a quotient could round wrongly.
TEST_F(FragmentCodes, CodesAreThoseOfTheTrueDivisionAtEveryTie) {
  for (uint32_t scale = 0; scale < 0x7c00u; ++scale) {
    const QuantParams p{static_cast<uint16_t>(scale), 0};
    for (int32_t n = 0; n < 24; ++n) {
      const auto k = static_cast<float>(n < 8 ? n : rng_() % 256);
      const float tie = (k + 0.5f) * half_to_float(p.scale);
      for (const float x : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f)}) {
        ASSERT_NO_FATAL_FAILURE(expect_code(x, p, 8));
      }
    }
  }
}

TEST_F(FragmentCodes, CodesAreThoseOfTheTrueDivision) {
  for (int32_t n = 0; n < 2000000; ++n) {
    const float lo = random_half(), hi = random_half();
    const int32_t bits = 1 << (1 + rng_() % 3);
    const QuantParams p = minmax_params(std::fmin(lo, hi), std::fmax(lo, hi), 1 << bits);
    if (!params_in_range(p)) continue;
    const float share = static_cast<float>(rng_() % 4097) / 4096.0f;
    ASSERT_NO_FATAL_FAILURE(expect_code(lo + share * (hi - lo), p, bits));
    ASSERT_NO_FATAL_FAILURE(expect_code(random_half(), p, bits));  // mostly outside: clamped
    ASSERT_NO_FATAL_FAILURE(expect_code(bits_float(rng_() & 0xbfffffffu), p, bits));
  }
}

// First bit of a code of fewer than 16 bits in its word.
int32_t fragment_code_bit(int32_t bits, int32_t block, int32_t th, int32_t dh, int32_t par) {
  if (bits == 8) return 16 * par + 8 * dh;
  return 16 * par + 8 * th + (bits == 4 ? 4 * dh : 4 * (block % 2) + 2 * dh);
}

TEST_F(FragmentCodes, WordsAreWhereCodePositionSays) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const int32_t bits : {8, 4, 2}) {
      for (const Component c : kComponents) {
        const TileLayout tile{CodeType::of_bits(bits), head_dim};
        for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
          for (int32_t i = 0; i < tile.dim_blocks() * 8; ++i) {
            const int32_t block = i / 8, th = i / 4 % 2, dh = i / 2 % 2, par = i % 2;
            const CodePosition at =
                code_position(tile, c, fragment_token(c, lane, th, par),
                              block * kDimBlock + fragment_dim(c, lane, dh, par));
            EXPECT_EQ(at.byte, lane_word_byte(tile.words_per_lane(),
                                              fragment_code_word(bits, block, th), lane));
            EXPECT_EQ(at.bit, fragment_code_bit(bits, block, th, dh, par));
          }
        }
      }
    }
  }
}

// A word built from codes whose upper bits are noise reads back as those codes.
TEST_F(FragmentCodes, PackedWordsHoldTheirCodes) {
  for (int32_t n = 0; n < 1000; ++n) {
    for (const int32_t bits : {4, 2}) {
      BlockCodes blocks[2];
      const uint32_t mask = (1u << bits) - 1;
      const auto code = [&] { return static_cast<uint32_t>(rng_() & mask) | 0x4b400000u; };
      for (BlockCodes& b : blocks) {
        for (auto& th : b.at) {
          for (auto& dh : th) dh[0] = code(), dh[1] = code();
        }
      }
      for (int32_t i = 0; i < 16; ++i) {
        const int32_t block = i / 8, th = i / 4 % 2, dh = i / 2 % 2, par = i % 2;
        const uint32_t word =
            bits == 4 ? pack_word_4(blocks[block]) : pack_word_2(blocks[0], blocks[1]);
        ASSERT_EQ(word >> fragment_code_bit(bits, block, th, dh, par) & mask,
                  blocks[block].at[th][dh][par] & mask);
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
