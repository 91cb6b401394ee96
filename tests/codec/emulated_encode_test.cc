// SPDX-License-Identifier: Apache-2.0
// The warp encoders' source on the host, against encode_block(): the same bytes. What it cannot see
// is timing and memory order; tests/gpu covers those.
#include "bench/baselines/coded/coded_encode_slice.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "codec/format/coded_block.h"
#include "tests/support/code_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

struct Shape {
  int32_t tokens, dims, most_coded_bytes;
};

// Shared memory of one warp, poisoned.
struct WarpMemory {
  alignas(16) uint8_t bytes[kSliceBytes];
  WarpMemory() { std::fill(std::begin(bytes), std::end(bytes), uint8_t{0xa5}); }
};

class EmulatedEncode : public RandomTest {
 protected:
  EmulatedEncode() : source_(seed_) {}

  Codebook codebook(Component component, BlockMode mode, int32_t streams, double spread) {
    CodebookSpec spec;
    spec.mode = mode;
    spec.streams_per_lane = streams;
    spec.table_id = static_cast<uint8_t>(source_.below(100));
    CodeHistogram h(component, 128);
    const std::vector<int16_t> codes = source_.bell(64 * 128 * 4, spread, 0, false);
    h.add(codes.data(), 64 * 4);
    Result<Codebook> c = build_codebook(h, spec);
    EXPECT_TRUE(c.is_ok()) << c.status().message();
    return *c;
  }

  // The block as the warp leaves it.
  std::vector<uint8_t> encode_by_warp(const std::vector<int16_t>& codes, const Shape& shape,
                                      const Codebook& c) {
    const std::vector<uint32_t> words = encoder_words(c);
    DeviceCodebook book = device_codebook(c);
    book.words = words.data();
    book.cheapest = c.cheapest.data();
    WarpMemory shared;
    const SliceMemory memory = slice_memory(shared.bytes, 0);
    const Slice slice{book, words.data(), memory, shape.tokens, shape.dims, shape.most_coded_bytes};
    int32_t counter = -1, bytes = 0;
    const auto load = [&] {
      CodeRange range;
      for (int32_t i = lane_index(); i < shape.tokens * shape.dims; i += kWarpLanes) {
        range.add(static_cast<uint16_t>(codes[i]) * 0x10001u);
        memory.codes[i / shape.dims * kCodeStride + i % shape.dims] = codes[i];
      }
      return range;
    };
    emulator::cta().run(0, kWarpLanes, [&] { bytes = encode_slice(slice, load, &counter); });
    const auto* block = reinterpret_cast<const uint8_t*>(memory.block);
    return {block, block + bytes};
  }

  // The mode of the block.
  BlockMode expect_equal(const std::vector<int16_t>& codes, const Shape& shape, const Codebook& c) {
    std::vector<uint8_t> expected;
    EXPECT_TRUE(
        encode_block(codes.data(), shape.tokens, shape.dims, c, &expected, shape.most_coded_bytes));
    EXPECT_EQ(encode_by_warp(codes, shape, c), expected)
        << shape.tokens << " tokens, " << shape.dims << " dims";
    return load_header(expected.data()).mode;
  }

  CodeSource source_;
};

TEST_F(EmulatedEncode, EveryShapeAndMode) {
  for (const Component component : {Component::kKey, Component::kValue}) {
    for (const BlockMode mode : {BlockMode::kSingle, BlockMode::kPair}) {
      for (const int32_t streams : {1, 2}) {
        const double spread = source_.spread_for(mode);
        const Codebook c = codebook(component, mode, streams, spread);
        for (const int32_t dims : {1, 2, 15, 64, 96, 127, 128}) {
          for (const int32_t tokens : {1, 16, 31, 64}) {
            const Shape shape = {tokens, dims, kMaxCodedBlockBytes};
            expect_equal(source_.bell(tokens * dims, spread, 0, false), shape, c);
          }
        }
      }
    }
  }
}

// Codes that the codebook has no word for: far from its alphabet, and in it but absent.
TEST_F(EmulatedEncode, Exceptions) {
  for (const Component component : {Component::kKey, Component::kValue}) {
    for (const BlockMode mode : {BlockMode::kSingle, BlockMode::kPair}) {
      const Codebook c = codebook(component, mode, 2, 2.0);
      bool coded = false;
      for (const int32_t outliers : {1, 7, 60, kMaxExceptions + 1}) {
        std::vector<int16_t> codes = source_.bell(64 * 128, 2.0, 0, false);
        for (int32_t i = 0; i < outliers; ++i) {
          codes[source_.below(64 * 128)] = static_cast<int16_t>(source_.below(4000) - 2000);
        }
        coded |= !is_raw_mode(expect_equal(codes, {64, 128, kMaxCodedBlockBytes}, c));
      }
      EXPECT_TRUE(coded);
    }
  }
}

TEST_F(EmulatedEncode, RawForms) {
  const Codebook c = codebook(Component::kValue, BlockMode::kPair, 2, 2.0);
  const struct {
    int32_t levels;
    BlockMode mode;
  } kCases[] = {{4, BlockMode::kRaw2},
                {16, BlockMode::kRaw4},
                {256, BlockMode::kRaw8},
                {60000, BlockMode::kRaw16}};
  for (const auto& raw : kCases) {
    // Far from what the codebook knows.
    const std::vector<int16_t> codes = source_.uniform_codes(64 * 128, -30000, raw.levels);
    EXPECT_EQ(expect_equal(codes, {64, 128, kMaxCodedBlockBytes}, c), raw.mode);
  }
}

// A bound that the coded form exceeds by one unit makes the block raw.
TEST_F(EmulatedEncode, TheBoundOfCodedBytes) {
  const Codebook c = codebook(Component::kKey, BlockMode::kPair, 2, 2.0);
  const std::vector<int16_t> codes = source_.bell(64 * 128, 2.0, 0, false);
  std::vector<uint8_t> block;
  ASSERT_TRUE(encode_block(codes.data(), 64, 128, c, &block));
  const auto bytes = static_cast<int32_t>(block.size());
  EXPECT_FALSE(is_raw_mode(expect_equal(codes, {64, 128, bytes}, c)));
  EXPECT_TRUE(is_raw_mode(expect_equal(codes, {64, 128, bytes - 16}, c)));
}

}  // namespace
}  // namespace tierkv
