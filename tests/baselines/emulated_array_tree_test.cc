// SPDX-License-Identifier: Apache-2.0
// The array-tree decoder's source on the host: the streams of blocks that encode_block() made, a
// lane at a time, against the codes.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "bench/baselines/coded/array_tree.cuh"
#include "codec/format/coded_block.h"
#include "tests/support/code_source.h"

namespace tierkv {
namespace {

// The symbols of every stream, [stream][lane][symbol]; poisoned where the decoder wrote none.
struct Streams {
  std::vector<uint16_t> symbols[2][kWarpLanes];
  uint32_t counts[2][kWarpLanes];
};

constexpr uint16_t kPoison = 0x7777;

// most: symbols of a stream.
Streams decode_streams(const std::vector<uint8_t>& block, const Codebook& book, uint32_t most) {
  const CodedBlockHeader h = load_header(block.data());
  const CodedBlockLayout at = block_layout(h);
  std::vector<uint32_t> payload((block.size() - at.payload) / 4 + 2);
  std::memcpy(payload.data(), block.data() + at.payload, block.size() - at.payload);
  const ArrayTree tree = {book.tree.data(), static_cast<uint32_t>(book.tree.size() - 1)};
  const int32_t streams = kWarpLanes * h.streams_per_lane;
  Streams out;
  for (int32_t i = 0; i < streams; ++i) {
    const int32_t s = i / kWarpLanes, lane = i % kWarpLanes;
    const int32_t begin = load_u16(block.data() + at.starts + 2 * i);
    const int32_t end =
        i + 1 < streams ? load_u16(block.data() + at.starts + 2 * (i + 1)) : h.payload_bits;
    std::vector<uint16_t> rows((most + 2) * kWarpLanes, kPoison);
    out.counts[s][lane] = tree.decode(payload.data(), begin, end, rows.data(), most);
    EXPECT_EQ(rows[(most + 1) * kWarpLanes], kPoison) << "written behind the last row";
    for (uint32_t n = 0; n < most; ++n) {
      out.symbols[s][lane].push_back(rows[n * kWarpLanes] & (kLeaf - 1));
    }
  }
  return out;
}

class EmulatedArrayTree : public testing::Test {
 protected:
  EmulatedArrayTree()
      : seed_(std::random_device{}()), source_(seed_), trace_(__FILE__, __LINE__, seed_) {}

  Codebook codebook(Component component, BlockMode mode, int32_t streams) {
    CodebookSpec spec;
    spec.mode = mode;
    spec.streams_per_lane = streams;
    CodeHistogram h(component, 128);
    h.add(source_.bell(256 * 128, 2.0, 0, false).data(), 256);
    Result<Codebook> book = build_codebook(h, spec);
    EXPECT_TRUE(book.is_ok()) << book.status().message();
    return *book;
  }

  uint32_t seed_;
  CodeSource source_;
  testing::ScopedTrace trace_;
};

// Digits of codes inside the alphabet; others are exceptions, which streams do not hold.
TEST_F(EmulatedArrayTree, FindsTheCodes) {
  constexpr int32_t kDims = 128, kTokens = 64, kBlocks = kDims / kDimBlock;
  for (const Component component : {Component::kKey, Component::kValue}) {
    for (const BlockMode mode : {BlockMode::kSingle, BlockMode::kPair}) {
      for (const int32_t streams : {1, 2}) {
        const Codebook book = codebook(component, mode, streams);
        std::vector<int16_t> codes = source_.bell(kTokens * kDims, 1.5, 0, false);
        std::vector<uint8_t> block;
        ASSERT_TRUE(encode_block(codes.data(), kTokens, kDims, book, &block));
        ASSERT_EQ(load_header(block.data()).mode, mode);
        if (load_header(block.data()).exceptions > 0) continue;
        const bool pair = mode == BlockMode::kPair;
        const uint32_t most = kTokens * kDims / kWarpLanes / (pair ? 2 : 1) / streams;
        const Streams got = decode_streams(block, book, most);
        uint32_t next[2][kWarpLanes] = {};
        for (int32_t i = 0; i < kTokens / kTileTokens * kBlocks * kPairsPerFragment; ++i) {
          const int32_t r = i % kPairsPerFragment, f = i / kPairsPerFragment % kBlocks;
          const int32_t tile = i / kPairsPerFragment / kBlocks, s = streams == 2 ? r % 2 : 0;
          for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
            const PairPosition p = pair_position(component, tile, f, r, lane);
            const int32_t first = p.token * kDims + p.dim;
            const int32_t second = first + (component == Component::kKey ? 1 : kDims);
            const int32_t a = codes[first] - book.base, b = codes[second] - book.base;
            uint32_t& n = next[s][lane];
            if (pair) {
              ASSERT_EQ(got.symbols[s][lane][n++], a + book.levels * b);
            } else {
              ASSERT_EQ(got.symbols[s][lane][n++], a);
              ASSERT_EQ(got.symbols[s][lane][n++], b);
            }
          }
        }
        for (int32_t s = 0; s < streams; ++s) {
          for (int32_t lane = 0; lane < kWarpLanes; ++lane) {
            EXPECT_EQ(got.counts[s][lane], most);
          }
        }
      }
    }
  }
}

// Streams that hold more or fewer symbols, or end inside one, and bits of any kind.
TEST_F(EmulatedArrayTree, CountsWhatDoesNotFit) {
  const Codebook book = codebook(Component::kKey, BlockMode::kSingle, 1);
  const ArrayTree tree = {book.tree.data(), static_cast<uint32_t>(book.tree.size() - 1)};
  uint32_t longest = 0;
  for (uint32_t s = 0; s < book.lengths.size(); ++s) {
    if (book.lengths[s] > book.lengths[longest]) longest = s;
  }
  const uint32_t words[3] = {book.words[longest], 0, 0};
  const int32_t length = book.lengths[longest];
  std::vector<uint16_t> rows(4 * kWarpLanes, kPoison);
  EXPECT_EQ(tree.decode(words, 0, length, rows.data(), 2), 1u);
  EXPECT_EQ(rows[0], kLeaf + longest);
  EXPECT_EQ(tree.decode(words, 0, length - 1, rows.data(), 2), 3u) << "not whole";
  EXPECT_EQ(tree.decode(words, 0, 0, rows.data(), 2), 0u);
  EXPECT_EQ(tree.decode(words, 0, length, rows.data(), 0), 1u) << "no room";
  for (int32_t round = 0; round < 1000; ++round) {
    std::vector<uint32_t> any(40);
    for (uint32_t& word : any) word = static_cast<uint32_t>(source_.rng()());
    const auto most = static_cast<uint32_t>(source_.below(200));
    std::vector<uint16_t> to((most + 2) * kWarpLanes, kPoison);
    const int32_t begin = source_.below(100), end = begin + source_.below(1000);
    EXPECT_LE(tree.decode(any.data(), begin, end, to.data(), most), most + 1);
    EXPECT_EQ(to[(most + 1) * kWarpLanes], kPoison);
  }
}

}  // namespace
}  // namespace tierkv
