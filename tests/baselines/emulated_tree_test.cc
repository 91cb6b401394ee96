// SPDX-License-Identifier: Apache-2.0
// The decoders of bench/baselines/tree on the host: each writes the digits of the codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bench/baselines/tree/tree_decode.cuh"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

// Symbols 0, 1, 2 have 1, 2, 2 bits: the words 0, 10 and 11, first bit first. So node 0 has the
// children leaf 0 and node 1, and node 1 has the leaves 1 and 2. The stream 0 11 10 0 10 has the
// symbols 0 2 1 0 1. It lies at bits 3 to 10 between ones. From bit 0 on, four bits a digit: 1110
// 1110 0101 1111, which are 7, 7, a and f in hexadecimal.
TEST(EmulatedTreeByHand, ArrayTreeWalksAStream) {
  const uint16_t nodes[] = {kLeaf | 0, 1, kLeaf | 1, kLeaf | 2};
  const uint32_t payload[] = {0xfffffa77u, 0xffffffffu};
  uint8_t symbols[64];
  std::fill_n(symbols, 64, uint8_t{0xee});
  const ArrayTree tree(TreeDecode(), reinterpret_cast<const uint8_t*>(nodes));
  tree.walk(payload, 3, 11, symbols);
  const uint8_t expected[] = {0, 2, 1, 0, 1};
  EXPECT_EQ(std::memcmp(symbols, expected, 5), 0);
  // A whole word is walked, so 24 ones follow: 12 symbols, and nothing behind them.
  EXPECT_TRUE(std::all_of(symbols + 5, symbols + 17, [](uint8_t x) { return x == 2; }));
  EXPECT_TRUE(std::all_of(symbols + 17, symbols + 64, [](uint8_t x) { return x == 0xee; }));
}

class EmulatedTree : public RandomTest {
 protected:
  // Three blocks by two CTAs of two warps each, over poison.
  template <class Decoder>
  void expect_digits(BlockMode mode, int32_t max_length, double spread) {
    const std::vector<int16_t> codes = laplace_codes(3, spread, rng_());
    const Result<Codebook> book = tree_codebook(codes, mode, max_length);
    ASSERT_TRUE(book.is_ok()) << book.status().message();
    const Result<TreeBlocks> blocks = make_tree_blocks(codes, *book);
    ASSERT_TRUE(blocks.is_ok()) << blocks.status().message();
    const std::vector<uint32_t> table = device_table(*book);
    std::vector<uint4> bytes(blocks->bytes.size() / 16);
    std::memcpy(bytes.data(), blocks->bytes.data(), blocks->bytes.size());
    std::vector<uint32_t> digits(blocks->digits.size() + 1, 0xeeeeeeee);
    TreeDecode call;
    call.bytes = reinterpret_cast<const uint8_t*>(bytes.data());
    call.units = blocks->units.data();
    call.digits = digits.data();
    const std::vector<uint16_t> tree = build_tree(*book);
    call.tree = tree.data();
    call.tree_entries = static_cast<int32_t>(tree.size());
    call.codebook = device_codebook(*book);
    call.codebook.table = table.data();
    call.num_blocks = 3;
    call.most_bytes = blocks->most_bytes;
    const int32_t warps = 2, size = 2 * Decoder::region_bytes(call) +
                                    warps * tree_decode_warp_bytes<Decoder>(call);
    for (int32_t cta = 0; cta < 2; ++cta) {
      std::vector<uint4> shared(size / 16, uint4{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5});
      auto* const memory = reinterpret_cast<uint8_t*>(shared.data());
      emulated_shared() = {memory, static_cast<uint32_t>(size)};
      emulator::cta().run(
          cta, 32 * warps, [&] { decode_tree_blocks<Decoder>(call, memory); }, 2);
    }
    EXPECT_EQ(digits.back(), 0xeeeeeeee);
    digits.pop_back();
    EXPECT_EQ(digits, blocks->digits);
  }
};

TEST_F(EmulatedTree, ArrayTree) {
  for (const double spread : {0.1, 0.72, 3.0}) {
    expect_digits<ArrayTree>(BlockMode::kSingle, 8, spread);
  }
}

TEST_F(EmulatedTree, LoopOverBits) {
  for (const double spread : {0.1, 0.72, 3.0}) {
    expect_digits<TreeLoop>(BlockMode::kSingle, 8, spread);
  }
}

TEST_F(EmulatedTree, Table) {
  for (const double spread : {0.1, 0.72, 3.0}) {
    expect_digits<TableLookup<false>>(BlockMode::kSingle, 8, spread);
    expect_digits<TableLookup<true>>(BlockMode::kPair, 10, spread);
  }
}

}  // namespace
}  // namespace tierkv
