// The registers that attention over raw blocks makes of a lane's words, on the host, against the
// codes that encode_block() was given.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "attention/coded/coded_raw.cuh"
#include "codec/format/coded_block.h"

namespace tierkv {
namespace {

// codes: [kBlockTokens][kDims], of a block of kBits.
template <int32_t kBits, int32_t kDims, Component kComponent>
void expect_digits(const std::vector<uint8_t>& block, const std::vector<int16_t>& codes) {
  const CodedBlockHeader h = load_header(block.data());
  ASSERT_EQ(raw_bits(h.mode), kBits);
  using Words = RawWords<kBits, kDims>;
  for (int32_t tile = 0; tile < kBlockTokens / kTileTokens; ++tile) {
    for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
      Words words;
      words.load(block.data() + kCodedBlockHeaderBytes + tile * Words::kTile.bytes(), lane);
      for (int32_t f = 0; f < kDims / kDimBlock; ++f) {
        uint32_t a[4] = {~0u, ~0u, ~0u, ~0u};
        words.template digits<kComponent>(f, a);
        for (int32_t r = 0; r < kPairsPerFragment; ++r) {
          const PairPosition p = pair_position(kComponent, tile, f, r, lane);
          const int32_t at = p.token * kDims + p.dim;
          const int32_t next = at + (kComponent == Component::kKey ? 1 : kDims);
          // The pattern of an fp16 subnormal is its number of 2^-24.
          ASSERT_EQ(a[r] & 0xffffu, static_cast<uint32_t>(codes[at] - h.base))
              << kBits << " bits, tile " << tile << " lane " << lane << " f " << f << " r " << r;
          ASSERT_EQ(a[r] >> 16, static_cast<uint32_t>(codes[next] - h.base));
        }
      }
    }
  }
}

template <int32_t kBits, int32_t kDims>
void expect_digits_of_both(std::mt19937* rng) {
  std::uniform_int_distribution<int32_t> code(-20000, -20000 + (1 << kBits) - 1);
  std::vector<int16_t> codes(kBlockTokens * kDims);
  for (int16_t& c : codes) c = static_cast<int16_t>(code(*rng));
  codes[5] = -20000, codes[77] = static_cast<int16_t>(-20000 + (1 << kBits) - 1);
  std::vector<uint8_t> keys, values;
  ASSERT_TRUE(
      encode_block(codes.data(), kBlockTokens, kDims, raw_codebook(Component::kKey), &keys));
  ASSERT_TRUE(
      encode_block(codes.data(), kBlockTokens, kDims, raw_codebook(Component::kValue), &values));
  expect_digits<kBits, kDims, Component::kKey>(keys, codes);
  expect_digits<kBits, kDims, Component::kValue>(values, codes);
}

template <int32_t kDims>
void expect_digits_of_all(std::mt19937* rng) {
  expect_digits_of_both<2, kDims>(rng);
  expect_digits_of_both<4, kDims>(rng);
  expect_digits_of_both<8, kDims>(rng);
}

TEST(EmulatedRaw, RegistersAreTheCodesOfTheirPlaces) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 rng(seed);
  expect_digits_of_all<64>(&rng);
  expect_digits_of_all<96>(&rng);
  expect_digits_of_all<128>(&rng);
}

}  // namespace
}  // namespace tierkv
