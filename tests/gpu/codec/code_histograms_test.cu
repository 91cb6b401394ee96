// Histograms counted on the GPU: those of the host, and the same codebooks, built there too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/fragment_order.h"
#include "codec/gpu/coded/code_histograms.h"
#include "codec/gpu/coded/codebook_batch.h"
#include "tests/gpu/device_array.cuh"

namespace tierkv {
namespace {

using test::DeviceArray;

struct World {
  std::vector<int16_t> codes;
  std::vector<HistogramRow> rows;
  std::vector<CodeHistogram> expected;
  int32_t blocks = 0;
};

World make_world(std::mt19937* rng, Component c, int32_t head_dim, double spread) {
  World w;
  std::normal_distribution<double> normal;
  for (int32_t h = 0; h < 3; ++h) {
    w.expected.emplace_back(c, head_dim);
    const int32_t rows = 1 + static_cast<int32_t>((*rng)() % 3);
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t blocks = static_cast<int32_t>((*rng)() % 5);
      w.rows.push_back({static_cast<int64_t>(w.codes.size()), w.blocks, h});
      std::vector<int16_t> codes;
      for (int64_t i = 0; i < int64_t{blocks} * kBlockTokens * head_dim; ++i) {
        const double x = spread * normal(*rng) * ((*rng)() % 500 == 0 ? 100.0 : 1.0);
        codes.push_back(static_cast<int16_t>(std::clamp(std::round(x), -32768.0, 32767.0)));
      }
      if (blocks > 0) w.expected.back().add(codes.data(), int64_t{blocks} * kBlockTokens);
      w.codes.insert(w.codes.end(), codes.begin(), codes.end());
      w.blocks += blocks;
    }
  }
  w.codes.resize(w.codes.size() + 8);
  return w;
}

void compare(const CodeHistogram& got, const CodeHistogram& want) {
  ASSERT_EQ(got.total(), want.total());
  ASSERT_EQ(got.min_code(), want.min_code());
  ASSERT_EQ(got.max_code(), want.max_code());
  for (int32_t code = INT16_MIN; code <= INT16_MAX; ++code) {
    ASSERT_EQ(got.count(code), want.count(code)) << "code " << code;
  }
  for (int32_t a = -128; a < 128; ++a) {
    for (int32_t b = -128; b < 128; ++b) {
      ASSERT_EQ(got.pair_count(a, b), want.pair_count(a, b)) << a << " " << b;
    }
  }
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;
  std::vector<uint8_t> x, y;
  serialize_codebook(*build_codebook(got, spec), &x);
  serialize_codebook(*build_codebook(want, spec), &y);
  EXPECT_TRUE(x == y);
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

TEST(GpuCodeHistograms, CountAsTheHostDoes) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  for (const Component c : {Component::kKey, Component::kValue}) {
    for (const int32_t head_dim : {16, 64, 96, 128, 256}) {
      for (const double spread : {0.7, 4.0, 300.0}) {
        const World w = make_world(&rng, c, head_dim, spread);
        const DeviceArray<int16_t> codes(w.codes);
        const DeviceArray<HistogramRow> rows(w.rows);
        const DeviceArray<uint32_t> pairs(std::vector<uint32_t>(3 * kHistogramCounts));
        const DeviceArray<uint32_t> wide(std::vector<uint32_t>(3 * kHistogramCounts));
        CodeHistograms call;
        call.codes = codes.get();
        call.rows = rows.get();
        call.pairs = pairs.get();
        call.wide = wide.get();
        call.token_stride = head_dim;
        call.num_rows = static_cast<int32_t>(w.rows.size());
        call.num_blocks = w.blocks;
        call.num_histograms = 3;
        call.head_dim = head_dim;
        call.component = c;
        const Status s = count_codes(call, nullptr);
        ASSERT_TRUE(s.is_ok()) << s.message();
        const std::vector<uint32_t> x = pairs.read(), y = wide.read();
        for (int32_t h = 0; h < 3; ++h) {
          compare(
              histogram_of_counts(c, head_dim, &x[h * kHistogramCounts], &y[h * kHistogramCounts]),
              w.expected[h]);
          if (::testing::Test::HasFatalFailure()) return;
        }
        expect_codebooks(c, 8 + static_cast<int32_t>(rng() % 7), w.expected, pairs.get(),
                         wide.get());
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// How long codes of 2 x 32 layers take; the time goes to the log, and to bench output nowhere else.
TEST(GpuCodeHistograms, ReadsCodesAtTheSpeedOfMemory) {
  std::mt19937 rng(std::random_device{}());
  std::normal_distribution<double> normal;
  constexpr int32_t kBlocks = 40000, kDim = 128, kLayers = 32;
  std::vector<int16_t> some(int64_t{64} * kDim * 500);
  for (int16_t& x : some) x = static_cast<int16_t>(std::round(2.0 * normal(rng)));
  int16_t* codes = nullptr;
  const size_t bytes = some.size() * 2;
  ASSERT_EQ(cudaMalloc(&codes, size_t{kBlocks} * 64 * kDim * 2), cudaSuccess);
  for (int32_t i = 0; i < kBlocks / 500; ++i) {
    cudaMemcpy(codes + i * some.size(), some.data(), bytes, cudaMemcpyHostToDevice);
  }
  std::vector<HistogramRow> list;
  for (int32_t l = 0; l < kLayers; ++l) {
    const int32_t first = l * (kBlocks / kLayers);
    list.push_back({int64_t{first} * 64 * kDim, first, l});
  }
  const DeviceArray<HistogramRow> rows(list);
  const DeviceArray<uint32_t> pairs(std::vector<uint32_t>(kLayers * kHistogramCounts));
  const DeviceArray<uint32_t> wide(std::vector<uint32_t>(kLayers * kHistogramCounts));
  CodeHistograms call;
  call.codes = codes;
  call.rows = rows.get();
  call.pairs = pairs.get();
  call.wide = wide.get();
  call.token_stride = call.head_dim = kDim;
  call.num_rows = kLayers;
  call.num_blocks = kBlocks;
  call.num_histograms = kLayers;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (const Component c : {Component::kKey, Component::kValue}) {
    call.component = c;
    float best = 1e9f;
    for (int32_t i = 0; i < 10; ++i) {
      cudaEventRecord(begin);
      ASSERT_TRUE(count_codes(call, nullptr).is_ok());
      cudaEventRecord(end);
      ASSERT_EQ(cudaEventSynchronize(end), cudaSuccess);
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      best = std::min(best, ms);
    }
    const double read = double{kBlocks} * 64 * kDim * 2;
    RecordProperty(c == Component::kKey ? "keys_gbps" : "values_gbps",
                   std::to_string(read / best * 1e-6));
    std::printf("%s: %.3f ms, %.0f GB/s of codes\n", c == Component::kKey ? "keys" : "values", best,
                read / best * 1e-6);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaFree(codes);
}

}  // namespace
}  // namespace tierkv
