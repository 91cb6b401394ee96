// The source of the warp that writes fixed-rate blocks on the host, against encode_fixed_block():
// the same bytes.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "codec/gpu/coded/fixed_encode.cuh"
#include "tests/support/code_source.h"

namespace tierkv {
namespace {

// Values [kBlockTokens][dims] as lanes get them.
struct LaneValues {
  const uint16_t* data;
  Component component;
  int32_t dims;

  int32_t fetch(int32_t i) const { return i; }
  void values(int32_t i, int32_t f, FragmentValues& y) const {
    const int32_t blocks = dims / kDimBlock;
    EXPECT_EQ(f, i % blocks);
    const bool key = component == Component::kKey;
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition p = pair_position(component, i / blocks, i % blocks, r, lane_index());
      const int32_t at = p.token * dims + p.dim;
      y[r] = data[at] | static_cast<uint32_t>(data[at + (key ? 1 : dims)]) << 16;
    }
  }
};

TEST(EmulatedFixed, IsTheHostsBlock) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  CodeSource source(seed);
  for (const int32_t dims : {64, 96, 128}) {
    for (const int32_t bits : {8, 4}) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        std::vector<uint16_t> y;
        for (int32_t t = 0; t < kBlockTokens; ++t) {
          const double spread = std::exp2(24 * source.uniform() - 14);
          for (int32_t d = 0; d < dims; ++d) {
            const double x = t == 5 ? 3.0 : spread * (2 * source.uniform() - 0.7);
            y.push_back(d == 7 && t % 3 == 0 ? uint16_t{0x8000}
                                             : float_to_half(static_cast<float>(x)));
          }
        }
        std::vector<uint8_t> expected;
        encode_fixed_block(y.data(), dims, c, bits, &expected);
        alignas(16) uint8_t block[kMaxCodedBlockBytes];
        std::fill(std::begin(block), std::end(block), uint8_t{0xa5});
        const LaneValues values = {y.data(), c, dims};
        emulator::cta().run(0, kWarpLanes,
                            [&] { write_fixed_block(values, c, bits, dims, block); });
        const auto size = static_cast<int64_t>(expected.size());
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), block))
            << dims << " " << bits << " "
            << std::mismatch(expected.begin(), expected.end(), block).second - block;
        EXPECT_TRUE(
            std::all_of(block + size, std::end(block), [](uint8_t x) { return x == 0xa5; }));
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
