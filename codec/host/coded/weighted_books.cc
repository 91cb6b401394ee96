// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/weighted_books.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "tierkv/layout.h"

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "weighted books: " + what);
}

// The codes of a layer by (row, dim block).
class Layer {
 public:
  Layer(Component component, int32_t head_dim, const std::vector<RowCodes>& rows)
      : component_(component), head_dim_(head_dim), rows_(rows) {}

  int32_t blocks() const { return dim_block_count(head_dim_); }
  int32_t count() const { return blocks() * static_cast<int32_t>(rows_.size()); }

  // Mean squared code of each.
  std::vector<double> spreads() const {
    std::vector<double> spreads;
    for (int32_t i = 0; i < count(); ++i) {
      double sum = 0;
      const int32_t dims = this->dims(i);
      for (int64_t t = 0; t < row(i).tokens; ++t) {
        const int16_t* codes = at(i, t);
        for (int32_t d = 0; d < dims; ++d) sum += codes[d] * static_cast<double>(codes[d]);
      }
      const auto n = static_cast<double>(row(i).tokens * dims);
      spreads.push_back(n > 0 ? sum / n : 0);
    }
    return spreads;
  }

  // Adds the codes of one to a histogram of kDimBlock channels or, at the end of a head, fewer.
  void add(int32_t i, CodeHistogram* histogram) const {
    const int32_t dims = this->dims(i);
    std::vector<int16_t> block(static_cast<size_t>(row(i).tokens) * dims);
    for (int64_t t = 0; t < row(i).tokens; ++t) std::copy_n(at(i, t), dims, &block[t * dims]);
    if (dims == kDimBlock) return histogram->add(block.data(), row(i).tokens);
    CodeHistogram narrow(component_, dims);
    narrow.add(block.data(), row(i).tokens);
    histogram->merge(narrow);
  }

 private:
  const RowCodes& row(int32_t i) const { return rows_[static_cast<size_t>(i / blocks())]; }
  int32_t dims(int32_t i) const { return std::min(kDimBlock, head_dim_ - first(i)); }
  int32_t first(int32_t i) const { return i % blocks() * kDimBlock; }
  const int16_t* at(int32_t i, int64_t token) const {
    return row(i).codes + token * head_dim_ + first(i);
  }

  Component component_;
  int32_t head_dim_;
  const std::vector<RowCodes>& rows_;
};

// The mode that holds what all of these do: the widest.
BlockMode widest_mode(const std::vector<Codebook>& books) {
  const auto width = [](BlockMode m) {
    return m == BlockMode::kQuad ? 0 : m == BlockMode::kPair ? 1 : m == BlockMode::kSingle ? 2 : 3;
  };
  BlockMode widest = BlockMode::kQuad;
  for (const Codebook& book : books) {
    if (width(book.mode) > width(widest)) widest = book.mode;
  }
  return widest;
}

Result<std::vector<Codebook>> build_all(const std::vector<CodeHistogram>& histograms,
                                        CodebookSpec spec) {
  std::vector<Codebook> books;
  for (const CodeHistogram& histogram : histograms) {
    Result<Codebook> book = build_codebook(histogram, spec);
    if (!book) return book.status();
    books.push_back(std::move(*book));
    ++spec.table_id;
  }
  return books;
}

constexpr int32_t kSmoothLow = -128, kSmoothHigh = 127;

// Counts of single codes [65536] times 4096, with tails.
std::vector<uint64_t> smoothed_singles(const CodeHistogram& sample) {
  std::vector<uint64_t> singles(65536, 0);
  const auto at = [&](int32_t code) -> uint64_t& { return singles[static_cast<uint16_t>(code)]; };
  int32_t mode = sample.min_code();
  for (int32_t c = sample.min_code(); c <= sample.max_code(); ++c) {
    at(c) = sample.count(c) << 12;
    if (sample.count(c) > sample.count(mode)) mode = c;
  }
  for (int32_t c = mode + 1; c <= kSmoothHigh; ++c) at(c) = std::max(at(c), at(c - 1) / 8);
  for (int32_t c = mode - 1; c >= kSmoothLow; --c) at(c) = std::max(at(c), at(c + 1) / 8);
  return singles;
}

}  // namespace

CodeHistogram smoothed(const CodeHistogram& sample) {
  if (sample.empty() || sample.min_code() < kSmoothLow || sample.max_code() > kSmoothHigh) {
    return sample;
  }
  std::vector<uint64_t> singles = smoothed_singles(sample);
  const auto single = [&](int32_t code) { return singles[static_cast<uint16_t>(code)]; };
  const uint64_t total = std::accumulate(singles.begin(), singles.end(), uint64_t{0});
  std::vector<uint64_t> pairs(65536, 0);
  for (int32_t a = kSmoothLow; a <= kSmoothHigh; ++a) {
    for (int32_t b = kSmoothLow; b <= kSmoothHigh; ++b) {
      const uint64_t expected = expected_count(single(a), single(b), total) / 4;
      pairs[CodeHistogram::pair_index(a, b)] = (sample.pair_count(a, b) << 11) + expected;
    }
  }
  return CodeHistogram(sample.component(), sample.head_dim(), std::move(singles), std::move(pairs));
}

Result<BookChoice> choose_books(Component component, int32_t head_dim,
                                const std::vector<RowCodes>& rows, const BookSpec& spec) {
  const int32_t books = spec.books;
  if (books < 1 || books > kMaxFamilyBooks) return invalid("a family has 1 to 4 books");
  if (spec.code.table_id + books > 256) return invalid("table ids end at 255");
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  for (const RowCodes& row : rows) {
    if (row.tokens < 0 || (row.tokens > 0 && row.codes == nullptr)) return invalid("a row is null");
  }
  const Layer layer(component, head_dim, rows);
  const std::vector<double> spreads = layer.spreads();
  std::vector<int32_t> order(spreads.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return spreads[a] < spreads[b]; });
  BookChoice choice;
  choice.book_of.resize(spreads.size());
  std::vector<CodeHistogram> histograms(static_cast<size_t>(books),
                                        CodeHistogram(component, kDimBlock));
  for (int32_t i = 0; i < layer.count(); ++i) {
    const auto book = static_cast<int32_t>(int64_t{i} * books / layer.count());
    choice.book_of[order[i]] = static_cast<uint8_t>(book);
    layer.add(order[i], &histograms[book]);
  }
  if (spec.sample) {
    for (CodeHistogram& histogram : histograms) histogram = smoothed(histogram);
  }
  Result<std::vector<Codebook>> built = build_all(histograms, spec.code);
  if (!built) return built.status();
  CodebookSpec same = spec.code;
  same.mode = widest_mode(*built);
  built = build_all(histograms, same);
  if (!built) return built.status();
  choice.family.books = std::move(*built);
  return choice;
}

}  // namespace tierkv
