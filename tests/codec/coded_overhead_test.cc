// SPDX-License-Identifier: Apache-2.0
// What a coded block costs beside its code words, field by field.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "codec/format/coded_block.h"
#include "codec/format/coded_block_format.h"
#include "tests/support/code_source.h"

namespace tierkv {
namespace {

// Bits a code, over whole blocks of 64 tokens and 128 channels.
struct Overhead {
  double header = 0, starts = 0, exceptions = 0, padding = 0, reference = 0, codebook = 0;
  double fixed() const { return header + starts + padding + reference; }
};

constexpr int32_t kBlocks = 256;  // of a layer's component: 8 heads of 2048 tokens
constexpr int32_t kReferenceBytes = 8;

Overhead measure(CodeSource* source, int32_t streams) {
  constexpr int32_t kCodes = kBlockTokens * kSliceDims;
  CodeHistogram histogram(Component::kKey, kSliceDims);
  std::vector<std::vector<int16_t>> codes;
  for (int32_t i = 0; i < kBlocks; ++i) {
    codes.push_back(source->bell(kCodes, 1.6, 0.0, false));
    histogram.add(codes.back().data(), kBlockTokens);
  }
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  spec.max_length = 10;
  spec.streams_per_lane = streams;
  const auto book = build_codebook(histogram, spec);
  EXPECT_TRUE(book.is_ok()) << book.status().message();
  Overhead sum;
  for (const std::vector<int16_t>& block : codes) {
    std::vector<uint8_t> bytes;
    EXPECT_TRUE(encode_block(block.data(), kBlockTokens, kSliceDims, *book, &bytes).is_ok());
    const BlockHeader h = load_header(bytes.data());
    const BlockLayout at = block_layout(h);
    EXPECT_FALSE(is_raw_mode(h.mode));
    sum.header += 8.0 * at.lengths;
    sum.starts += 8.0 * (at.payload - at.lengths);
    sum.exceptions += 8.0 * (at.end - at.exceptions);
    sum.padding += 8.0 * (at.exceptions - at.payload) - h.payload_bits + 8.0 * (at.bytes - at.end);
    sum.reference += 8.0 * kReferenceBytes;
    // All that is not code words is one of these: they end where the block does.
    EXPECT_EQ(at.bytes, static_cast<int64_t>(bytes.size()));
    EXPECT_LE(h.payload_bits, 8 * (at.exceptions - at.payload));
  }
  sum.codebook = 8.0 * static_cast<double>(codebook_bytes(*book));
  const double n = static_cast<double>(kBlocks) * kCodes;
  for (double* x :
       {&sum.header, &sum.starts, &sum.exceptions, &sum.padding, &sum.reference, &sum.codebook}) {
    *x /= n;
  }
  return sum;
}

TEST(CodedBlockOverhead, StaysBelowAFifthOfABit) {
  const uint32_t seed = std::random_device{}();
  CodeSource source(seed);
  for (int32_t streams : {1, 2}) {
    const Overhead o = measure(&source, streams);
    std::printf(
        "%d streams: header %.4f, starts %.4f, padding %.4f, reference %.4f, exceptions %.4f, "
        "codebook %.5f\n",
        streams, o.header, o.starts, o.padding, o.reference, o.exceptions, o.codebook);
    EXPECT_EQ(o.header, 128.0 / 8192) << "seed " << seed;
    EXPECT_EQ(o.starts, 512.0 * streams / 8192) << "seed " << seed;
    // Less than a word behind the payload and 15 bytes at the end.
    EXPECT_LT(o.padding, (32.0 + 8 * 15) / 8192) << "seed " << seed;
    EXPECT_LT(o.fixed() + o.exceptions + o.codebook, streams == 1 ? 0.13 : 0.2) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tierkv
