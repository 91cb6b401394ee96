// SPDX-License-Identifier: Apache-2.0
// The kernels that build codebooks, their source on the host, against build_codebook(): the same
// codebooks and the tables that follow from them.
#include <gtest/gtest.h>

#include <vector>

#include "codec/gpu/coded/codebook_kernels.cuh"
#include "tests/support/code_source.h"
#include "tests/support/fresh_random.h"

namespace tierkv {
namespace {

// As a CodeCounter leaves them.
struct Counts {
  std::vector<uint32_t> pairs = std::vector<uint32_t>(kHistogramCounts, 0);
  std::vector<uint32_t> wide = std::vector<uint32_t>(kHistogramCounts, 0);

  void add(const std::vector<int16_t>& codes) {
    for (size_t i = 0; i + 1 < codes.size(); i += 2) {
      ++pairs[(codes[i] & 255) << 8 | (codes[i + 1] & 255)];
      for (const int16_t code : {codes[i], codes[i + 1]}) {
        if (code < -128 || code > 127) ++wide[static_cast<uint16_t>(code)];
      }
    }
  }
};

struct Built {
  DeviceCodebook book;
  std::vector<uint32_t> table, words;
  std::vector<uint16_t> cheapest;
  std::vector<uint8_t> lengths;
};

// The last book; those before it are of no codes.
Built build_by_kernels(const Counts& counts, int32_t max_length, int32_t num_books) {
  std::vector<uint32_t> pairs(int64_t{num_books - 1} * kHistogramCounts, 0), wide = pairs;
  pairs.insert(pairs.end(), counts.pairs.begin(), counts.pairs.end());
  wide.insert(wide.end(), counts.wide.begin(), counts.wide.end());
  std::vector<DeviceCodebook> books(num_books);
  std::vector<uint32_t> tables(num_books << max_length, 0xdeadbeef),
      words(num_books * kMaxSymbols, 7);
  std::vector<uint16_t> cheapest(num_books * kCheapestEntries, 7);
  std::vector<uint8_t> lengths(num_books * kMaxSymbols, 0xa5);
  std::vector<CodeSummary> work(num_books +
                                (num_books * kTries * sizeof(BookTry)) / sizeof(CodeSummary) + 1);
  std::memset(work.data(), 0xa5, work.size() * sizeof(CodeSummary));
  CodebookBuild call;
  call.pairs = pairs.data();
  call.wide = wide.data();
  call.books = books.data();
  call.tables = tables.data();
  call.words = words.data();
  call.cheapest = cheapest.data();
  call.lengths = lengths.data();
  call.workspace = work.data();
  call.num_books = num_books;
  call.max_length = max_length;
  call.component = Component::kValue;
  call.table_id = 9;
  EXPECT_TRUE(call.validate());
  const auto run = [](int32_t block, const auto& kernel) {
    emulator::cta().run(block, kBookThreads, kernel);
  };
  auto summary = std::make_unique<SummaryShared>();
  auto attempt = std::make_unique<TryShared>();
  auto finish = std::make_unique<FinishShared>();
  std::memset(attempt.get(), 0xa5, sizeof(TryShared));
  for (int32_t b = 0; b < num_books; ++b) {
    run(b, [&] {
      const int64_t first = int64_t{b} * kHistogramCounts;
      summarise_counts(call.pairs + first, call.wide + first, summary.get(),
                       book_workspace(call).summaries + b);
    });
  }
  for (int32_t i = 0; i < num_books * kTries; ++i) {
    run(i, [&] { try_alphabet(call, i, attempt.get()); });
  }
  for (int32_t b = 0; b < num_books; ++b) run(b, [&] { finish_book(call, b, finish.get()); });
  Built out;
  out.book = books.back();
  out.table.assign(tables.end() - (1 << max_length), tables.end());
  out.words.assign(words.end() - kMaxSymbols, words.end());
  out.cheapest.assign(cheapest.end() - kCheapestEntries, cheapest.end());
  out.lengths.assign(lengths.end() - kMaxSymbols, lengths.end());
  return out;
}

class EmulatedCodebook : public RandomTest {
 protected:
  EmulatedCodebook() : source_(seed_) {}

  void expect_equal(const Counts& counts, int32_t max_length, int32_t num_books = 1) {
    CodebookSpec spec;
    spec.mode = BlockMode::kPair;
    spec.max_length = max_length;
    spec.table_id = 9;
    const Result<Codebook> built = build_codebook(
        histogram_of_counts(Component::kValue, 128, counts.pairs.data(), counts.wide.data()), spec);
    ASSERT_TRUE(built.is_ok()) << built.status().message();
    const Codebook& expected = *built;
    const Built got = build_by_kernels(counts, max_length, num_books);
    const Result<Codebook> book = codebook_of_device(got.book, got.lengths.data());
    ASSERT_TRUE(book.is_ok()) << book.status().message();
    std::vector<uint8_t> a, b;
    serialize_codebook(expected, &a);
    serialize_codebook(*book, &b);
    EXPECT_EQ(a, b);
    std::vector<uint32_t> table = device_table(expected), words = encoder_words(expected);
    table.resize(size_t{1} << max_length, 0);
    words.resize(kMaxSymbols, 0);
    std::vector<uint16_t> cheapest = expected.cheapest;
    cheapest.resize(kCheapestEntries, Codebook::kNoSymbol);
    EXPECT_EQ(got.table, table);
    EXPECT_EQ(got.words, words);
    EXPECT_EQ(got.cheapest, cheapest);
  }

  CodeSource source_;
};

TEST_F(EmulatedCodebook, Bells) {
  for (const double spread : {0.1, 1.0, 3.0, 12.0}) {
    Counts counts;
    counts.add(source_.bell(20000, spread * (0.7 + 0.6 * source_.uniform()), source_.below(21) - 10,
                            source_.below(2) == 0));
    expect_equal(counts, 8 + source_.below(7));
  }
}

// Codes beyond 8 bits: pairs are exact while the range is narrow, or taken as independent.
TEST_F(EmulatedCodebook, WideCodes) {
  for (const double spread : {3.0, 400.0}) {
    Counts counts;
    counts.add(source_.bell(20000, spread, spread < 10 ? 200 : 32760, false));
    expect_equal(counts, 12);
  }
}

TEST_F(EmulatedCodebook, FewCodes) {
  for (const int32_t codes : {0, 4}) {
    Counts counts;
    counts.add(source_.bell(codes, 1.5, 0, false));
    expect_equal(counts, 11);
  }
  Counts equal;
  equal.add(source_.uniform_codes(4096, 5, 1));
  expect_equal(equal, 11);
}

// Counts beyond 32 bits in all, and a book behind another.
TEST_F(EmulatedCodebook, ManyCodes) {
  Counts counts;
  for (int32_t a = -6; a < 7; ++a) {
    for (int32_t b = -6; b < 7; ++b) {
      counts.pairs[(a & 255) << 8 | (b & 255)] =
          static_cast<uint32_t>(4.2e9 * source_.uniform() / (1 + a * a + b * b));
    }
  }
  expect_equal(counts, 11, 2);
}

}  // namespace
}  // namespace tierkv
