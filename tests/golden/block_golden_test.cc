// SPDX-License-Identifier: Apache-2.0
// The bytes of codebooks and coded blocks in every mode and many shapes, and the example of
// docs/internals/coded-attention.md.
#include <bit>
#include <random>

#include "codec/host/coded/coded_block.h"
#include "tests/golden/golden_table.h"

namespace tierkv {
namespace {

using std::to_string;

// A bell of integers around `centre` with a spread that suits the mode; `far` codes leave it.
std::vector<int16_t> codes_of(std::mt19937& rng, BlockMode mode, int32_t centre, int64_t count) {
  std::vector<int16_t> codes;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = rng();
    int32_t code = std::popcount(bits & 0xffff) - 8;  // variance 4
    if (mode == BlockMode::kQuad) code = (bits & 3) == 0 ? static_cast<int32_t>(bits >> 2 & 3) : 1;
    if (mode == BlockMode::kSplit) code = 6 * code + static_cast<int32_t>(bits >> 16 & 7);
    if (bits >> 20 == 0) code *= 9;
    codes.push_back(static_cast<int16_t>(centre + code));
  }
  return codes;
}

TEST(BlockGolden, BytesOfEveryModeAndShape) {
  golden::Table table("blocks.csv",
                      "mode,component,streams,tokens,head_dim,codebook_bytes,codebook_xxh3,block_"
                      "bytes,exceptions,block_xxh3");
  uint32_t seed = 1;
  for (BlockMode mode :
       {BlockMode::kSingle, BlockMode::kPair, BlockMode::kQuad, BlockMode::kSplit}) {
    for (Component component : {Component::kKey, Component::kValue}) {
      for (int32_t streams : {1, 2}) {
        for (auto [tokens, head_dim] :
             {std::pair{64, 128}, {64, 64}, {50, 96}, {64, 256}, {17, 80}, {1, 128}}) {
          std::mt19937 rng(seed++);
          const int32_t centre = static_cast<int32_t>(rng() % 300) - 150;
          const std::vector<int16_t> seen = codes_of(rng, mode, centre, int64_t{256} * head_dim);
          const auto codes = codes_of(rng, mode, centre, int64_t{tokens} * head_dim);
          CodeHistogram histogram(component, head_dim);
          histogram.add(seen.data(), 256);
          CodebookSpec spec;
          spec.mode = mode;
          spec.streams_per_lane = streams;
          spec.table_id = static_cast<uint8_t>(seed);
          const Result<Codebook> codebook = build_codebook(histogram, spec);
          ASSERT_TRUE(codebook.is_ok()) << codebook.status().message();
          std::vector<uint8_t> book, bytes;
          serialize_codebook(*codebook, &book);
          ASSERT_TRUE(encode_block({codes.data(), nullptr, tokens, head_dim}, {&*codebook, 1},
                                   nullptr, &bytes));
          int32_t exceptions = 0;
          for (size_t at = 0; at < bytes.size(); at += 16 * load_header(&bytes[at]).units) {
            exceptions += load_header(&bytes[at]).exceptions;
          }
          table.expect({block_mode_name(mode), component == Component::kKey ? "key" : "value",
                        to_string(streams), to_string(tokens), to_string(head_dim),
                        to_string(book.size()), golden::hash(book), to_string(bytes.size()),
                        to_string(exceptions), golden::hash(bytes)});
        }
      }
    }
  }
}

std::string hex_lines(const std::vector<uint8_t>& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    char digits[4];
    std::snprintf(digits, sizeof(digits), "%02x", bytes[i]);
    text += digits;
    text += i % 16 == 15 || i + 1 == bytes.size() ? "\n" : " ";
  }
  return text;
}

// 16 tokens of 16 channels of keys: mostly 0, some 1, few -1 and one 9.
TEST(BlockGolden, ExampleOfTheDocument) {
  std::vector<int16_t> codes;
  for (int32_t token = 0; token < 16; ++token) {
    for (int32_t dim = 0; dim < 16; ++dim) {
      const bool up = (7 * token + 3 * dim) % 11 == 0, down = (token + 2 * dim) % 13 == 0;
      codes.push_back(static_cast<int16_t>(up ? 1 : down ? -1 : 0));
    }
  }
  CodeHistogram histogram(Component::kKey, 16);
  histogram.add(codes.data(), 16);
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  const Result<Codebook> codebook = build_codebook(histogram, spec);
  ASSERT_TRUE(codebook.is_ok());
  codes[2 * 16 + 5] = 9;
  std::vector<uint8_t> book, bytes;
  serialize_codebook(*codebook, &book);
  ASSERT_TRUE(encode_block({codes.data(), nullptr, 16, 16}, {&*codebook, 1}, nullptr, &bytes));
  ASSERT_EQ(bytes[1] & 15, static_cast<int>(BlockMode::kPair));
  const std::vector<uint8_t> document =
      golden::read_file(TIERKV_SOURCE_DIR "/docs/internals/coded-attention.md");
  const std::string text(document.begin(), document.end());
  EXPECT_NE(text.find(hex_lines(book)), std::string::npos) << hex_lines(book);
  EXPECT_NE(text.find(hex_lines(bytes)), std::string::npos) << hex_lines(bytes);
}

}  // namespace
}  // namespace tierkv
