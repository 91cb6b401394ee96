// SPDX-License-Identifier: Apache-2.0
// Codebooks built on the GPU from counts in its memory: those that the host builds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/fragment_order.h"
#include "codec/gpu/coded/codebook_batch.h"
#include "tests/gpu/device_array.cuh"

namespace tierkv {
namespace {

using test::DeviceArray;

// Histograms, and their counts as a CodeCounter leaves them.
struct World {
  std::vector<CodeHistogram> expected;
  std::vector<uint32_t> pairs, wide;
};

World make_world(std::mt19937* rng, Component c, int32_t head_dim, double spread) {
  World w;
  std::normal_distribution<double> normal;
  for (int32_t h = 0; h < 3; ++h) {
    w.expected.emplace_back(c, head_dim);
    const int32_t tokens = kBlockTokens * static_cast<int32_t>((*rng)() % 9);
    std::vector<int16_t> codes;
    for (int64_t i = 0; i < int64_t{tokens} * head_dim; ++i) {
      const double x = spread * normal(*rng) * ((*rng)() % 500 == 0 ? 100.0 : 1.0);
      codes.push_back(static_cast<int16_t>(std::clamp(std::round(x), -32768.0, 32767.0)));
    }
    w.pairs.resize(w.pairs.size() + kHistogramCounts);
    w.wide.resize(w.wide.size() + kHistogramCounts);
    if (tokens == 0) continue;
    w.expected.back().add(codes.data(), tokens);
    uint32_t* const pairs = w.pairs.data() + h * kHistogramCounts;
    uint32_t* const wide = w.wide.data() + h * kHistogramCounts;
    const bool key = c == Component::kKey;
    for (int32_t t = 0; t < tokens; t += key ? 1 : 2) {
      for (int32_t d = 0; d < head_dim; d += key ? 2 : 1) {
        const int64_t at = int64_t{t} * head_dim + d;
        const int16_t both[2] = {codes[at], codes[at + (key ? 1 : head_dim)]};
        ++pairs[(both[0] & 255) << 8 | (both[1] & 255)];
        for (const int16_t x : both) wide[static_cast<uint16_t>(x)] += x < -128 || x > 127;
      }
    }
  }
  return w;
}

// The codebooks of three histograms that lie in device memory, with all that follows from them.
void expect_codebooks(Component c, int32_t max_length, const std::vector<CodeHistogram>& expected,
                      const uint32_t* pairs, const uint32_t* wide) {
  const auto count = static_cast<int32_t>(expected.size());
  const DeviceArray<DeviceCodebook> books{std::vector<DeviceCodebook>(count)};
  const DeviceArray<uint32_t> tables(
      std::vector<uint32_t>(static_cast<size_t>(count) << max_length, 0xdeadbeef));
  const DeviceArray<uint32_t> words(std::vector<uint32_t>(count * kMaxSymbols, 7));
  const DeviceArray<uint16_t> cheapest(std::vector<uint16_t>(count * kCheapestEntries, 7));
  const DeviceArray<uint8_t> lengths(std::vector<uint8_t>(count * kMaxSymbols, 0xa5));
  const DeviceArray<uint8_t> workspace(std::vector<uint8_t>(codebook_workspace_bytes(count), 0xa5));
  CodebookBuild call;
  call.pairs = pairs;
  call.wide = wide;
  call.books = books.get();
  call.tables = tables.get();
  call.words = words.get();
  call.cheapest = cheapest.get();
  call.lengths = lengths.get();
  call.workspace = workspace.get();
  call.num_books = count;
  call.max_length = max_length;
  call.component = c;
  const Status status = build_codebooks(call, nullptr);
  ASSERT_TRUE(status.is_ok()) << status.message();
  const std::vector<DeviceCodebook> got = books.read();
  const std::vector<uint32_t> got_tables = tables.read(), got_words = words.read();
  const std::vector<uint16_t> got_cheapest = cheapest.read();
  const std::vector<uint8_t> got_lengths = lengths.read();
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  spec.max_length = max_length;
  for (int32_t i = 0; i < count; ++i) {
    const Codebook want = *build_codebook(expected[i], spec);
    const Result<Codebook> book = codebook_of_device(got[i], &got_lengths[i * kMaxSymbols]);
    ASSERT_TRUE(book.is_ok()) << book.status().message();
    std::vector<uint8_t> x, y;
    serialize_codebook(want, &x);
    serialize_codebook(*book, &y);
    ASSERT_EQ(x, y);
    const std::vector<uint32_t> table = device_table(want), code_words = encoder_words(want);
    const auto starts_with = [](const auto& all, size_t at, const auto& part) {
      return std::equal(part.begin(), part.end(), all.begin() + static_cast<int64_t>(at));
    };
    EXPECT_TRUE(starts_with(got_tables, static_cast<size_t>(i) << max_length, table));
    EXPECT_TRUE(starts_with(got_words, i * kMaxSymbols, code_words));
    EXPECT_TRUE(starts_with(got_cheapest, i * kCheapestEntries, want.cheapest));
  }
}

TEST(GpuCodebooks, AreThoseOfTheHost) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (const Component c : {Component::kKey, Component::kValue}) {
    for (const int32_t head_dim : {16, 64, 96, 128, 256}) {
      for (const double spread : {0.7, 4.0, 300.0}) {
        const World w = make_world(&rng, c, head_dim, spread);
        const DeviceArray<uint32_t> pairs(w.pairs), wide(w.wide);
        expect_codebooks(c, 8 + static_cast<int32_t>(rng() % 7), w.expected, pairs.get(),
                         wide.get());
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
