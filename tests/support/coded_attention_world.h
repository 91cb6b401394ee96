// SPDX-License-Identifier: Apache-2.0
// Rows of random coded blocks and raw windows, as attend_coded() takes them, what
// they decode to, and exact attention to compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "codec/format/coded_block.h"
#include "codec/format/element.h"
#include "tests/support/code_source.h"

namespace tierkv::test::coded {

struct Shape {
  int32_t head_dim = 128;
  int32_t columns = 4;
  int32_t streams = 2;
  int32_t max_length = 10;
  bool means = true;
  BlockMode mode = BlockMode::kPair;
  bool huge_codes = false;  // blocks of 16 bits, which lose bits in fp16
  int32_t q_len = 1;
  int32_t kv_heads = 1;
  DType dtype = DType::kFloat16;
  int32_t family = 1;    // codebooks of a component
  bool all_raw = false;  // codes that no codebook has a word for
  bool sinks = false;

  int32_t all_columns() const { return columns * q_len; }
  // Of a column of a row, in lines of head_dim elements.
  size_t place(size_t row, int32_t column) const {
    const size_t heads = static_cast<size_t>(kv_heads), entry = row / heads;
    const size_t line = entry * static_cast<size_t>(q_len) + static_cast<size_t>(column / columns);
    return (line * heads + row % heads) * static_cast<size_t>(columns) +
           static_cast<size_t>(column % columns);
  }
  size_t head(size_t row, int32_t column) const {
    return row % static_cast<size_t>(kv_heads) * static_cast<size_t>(columns) +
           static_cast<size_t>(column % columns);
  }
};

struct RowData {
  int32_t coded = 0, window = 0, step = 0, mean = 0;  // mean -1: none
  bool corrupt = false;
};

// Everything of a call on the host.
struct World {
  Shape shape;
  std::vector<Codebook> books[2];
  std::vector<RowData> data;
  std::vector<CodedRow> rows;
  std::vector<uint8_t> bytes[2];  // keys, values
  std::vector<CodedBlockRef> refs[2];
  std::vector<float> steps[2], means[2];
  std::vector<uint8_t> window;  // pages, with something behind each
  std::vector<int32_t> window_pages;
  std::vector<float> y[2];  // [tokens of all rows, head_dim]: blocks as decoded, then window
  std::vector<uint16_t> q;
  std::vector<float> sinks;  // [kv_heads * columns]; empty: none
  int32_t items = 0, max_block_bytes = 16;
};

inline constexpr int32_t kSteps = 3;

// Member i of a family: codes that lie elsewhere, and wider.
inline Codebook make_book(CodeSource* source, Component component, const Shape& shape, int32_t i) {
  CodeHistogram histogram(component, shape.head_dim);
  histogram.add(source->bell(512 * shape.head_dim, 1.5 + 0.2 * i, 3.0 * i, false).data(), 512);
  CodebookSpec spec;
  spec.mode = shape.mode;
  spec.streams_per_lane = shape.streams;
  spec.max_length = shape.max_length;
  spec.table_id = static_cast<uint8_t>(7 + 3 * i);
  auto book = build_codebook(histogram, spec);
  EXPECT_TRUE(book.is_ok()) << book.status().message();
  return *book;
}

// One block of random codes: mostly the codebook's kind, some with exceptions, some raw.
inline void add_block(World* w, CodeSource* source, int32_t component, int32_t tokens, float step) {
  const int32_t member = source->below(w->shape.family);
  const Codebook& book = w->books[component][static_cast<size_t>(member)];
  const int32_t kind = source->below(8), dims = w->shape.head_dim;
  double spread = kind == 1 ? 2.2 : kind == 2 ? 5.0 : kind == 3 ? 60.0 : 1.4;
  if (kind == 3 && w->shape.huge_codes) spread = 3000;
  if (kind == 5 && w->shape.all_raw) spread = 0.35;
  std::vector<int16_t> codes =
      source->bell(int64_t{tokens} * dims, spread, 0.3 + 3.0 * member, false);
  if (kind == 4) codes.assign(codes.size(), static_cast<int16_t>(source->below(3)));
  if (w->shape.all_raw) {
    for (int16_t& code : codes) code = static_cast<int16_t>(code + (spread < 10 ? 64 : 512));
  }
  std::vector<uint8_t>& bytes = w->bytes[component];
  const size_t begin = bytes.size();
  EXPECT_TRUE(encode_block(codes.data(), tokens, dims, book, &bytes).is_ok());
  const auto size = static_cast<uint32_t>(bytes.size() - begin);
  for (size_t at = begin; at < bytes.size();) {
    const CodedBlockHeader header = load_header(bytes.data() + at);
    const int32_t slice = header.units * kBlockAlignment;
    // A few tokens cost less as exceptions.
    EXPECT_TRUE(is_raw_mode(header.mode) || !w->shape.all_raw ||
                tokens * header.dims <= kMaxExceptions);
    if (!is_raw_mode(header.mode)) w->max_block_bytes = std::max(w->max_block_bytes, slice);
    at += static_cast<size_t>(slice);
  }
  w->refs[component].push_back({static_cast<uint32_t>(begin / 16), size / 16});
  for (int16_t c : codes) w->y[component].push_back(step * static_cast<float>(c));
}

inline int64_t window_page_bytes(int32_t head_dim) {
  return kBlockTokens * 4 * head_dim + 48;
}

// Poison where nothing may be read: behind the tiles in use.
inline void add_window(World* w, CodeSource* source, int32_t tokens) {
  const int32_t dims = w->shape.head_dim;
  const TileLayout tile = raw_tile(16, dims / kDimBlock);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const size_t first_page = w->window_pages.size();
  for (int32_t t = 0; t < tokens; t += kBlockTokens) {
    w->window_pages.push_back(0);  // numbered when there are all of them
    w->window.resize(w->window.size() + static_cast<size_t>(window_page_bytes(dims)), 0x7f);
  }
  for (int32_t component = 0; component < 2; ++component) {
    for (int32_t t = 0; t < tokens; ++t) {
      const size_t page = first_page + static_cast<size_t>(t / kBlockTokens);
      uint8_t* tiles = w->window.data() + page * static_cast<size_t>(window_page_bytes(dims)) +
                       (component * 4 + t % kBlockTokens / kTileTokens) * tile.bytes();
      if (t % kTileTokens == 0) std::fill_n(tiles, tile.bytes(), uint8_t{0});
      for (int32_t d = 0; d < dims; ++d) {
        const uint16_t half = float_to_half(normal(source->rng()));
        const CodePosition at =
            code_position(tile, static_cast<Component>(component), t % kTileTokens, d);
        store_u16(tiles + at.byte + at.bit / 8, half);
        w->y[component].push_back(half_to_float(half));
      }
    }
  }
}

// Pages in any order.
inline void shuffle_window(World* w, CodeSource* source) {
  const size_t bytes = static_cast<size_t>(window_page_bytes(w->shape.head_dim));
  std::vector<int32_t>& pages = w->window_pages;
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), source->rng());
  const std::vector<uint8_t> from = w->window;
  for (size_t i = 0; i < pages.size(); ++i) {
    std::copy_n(from.data() + i * bytes, bytes,
                w->window.data() + static_cast<size_t>(pages[i]) * bytes);
  }
}

inline World make_world(CodeSource* source, const Shape& shape, const std::vector<RowData>& data) {
  World w;
  w.shape = shape;
  w.data = data;
  for (int32_t i = 0; i < shape.family; ++i) {
    w.books[0].push_back(make_book(source, Component::kKey, shape, i));
    w.books[1].push_back(make_book(source, Component::kValue, shape, i));
  }
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (int32_t c = 0; c < 2; ++c) {
    for (int32_t i = 0; i < kSteps; ++i) {
      w.steps[c].push_back(static_cast<float>(0.2 + 0.4 * source->uniform()));
      for (int32_t d = 0; d < shape.head_dim; ++d) w.means[c].push_back(normal(source->rng()));
    }
  }
  for (const RowData& r : data) {
    CodedRow row;
    row.first_item = w.items;
    row.first_block = static_cast<int32_t>(w.refs[0].size());
    row.coded_tokens = r.coded;
    row.window_tokens = r.window;
    row.first_page = static_cast<int64_t>(w.window_pages.size());
    row.step = r.step;
    row.mean = r.mean;
    for (int32_t t = 0; t < r.coded; t += kBlockTokens) {
      for (int32_t c = 0; c < 2; ++c) {
        add_block(&w, source, c, std::min(kBlockTokens, r.coded - t),
                  w.steps[c][static_cast<size_t>(r.step)]);
      }
    }
    add_window(&w, source, r.window);
    w.rows.push_back(row);
    w.items += coded_row_items(r.coded, r.window);
    // Of several queries none may see less than all that is coded.
    w.data[w.rows.size() - 1].corrupt = r.coded > 0 && r.window < shape.q_len - 1;
    for (int32_t i = 0; i < shape.all_columns() * shape.head_dim; ++i) {
      w.q.push_back(float_to_raw(shape.dtype, normal(source->rng())));
    }
  }
  shuffle_window(&w, source);
  for (int32_t h = 0; shape.sinks && h < shape.kv_heads * shape.columns; ++h) {
    const bool none = source->below(6) == 0;
    w.sinks.push_back(none ? -INFINITY : static_cast<float>(12 * source->uniform() - 3));
  }
  return w;
}

struct Attended {
  std::vector<uint16_t> out;
  std::vector<float> lse;
  std::vector<StatusCode> status;
  CodedAttentionGrid grid;
};

// A product of 16 deep is off by at most this times the larger of its accumulator and of the sum of
// its terms' magnitudes: a tensor core adds 8 or 16 terms and the accumulator after cutting each
// off at 2^-24 of the largest, or further down, and cuts the sum off at 2^-23: 20 * 2^-24 < 2^-19.
inline constexpr double kProductError = 0x1p-19;

// How far digits reach: those of codes lie between the least base and the last level of a family,
// those of raw blocks and exceptions between the least and the largest of a row's numbers. That is
// what accumulators hold before the base comes off, also where all numbers are 0.
inline double digit_reach(const World& w, int32_t component, float step, double largest) {
  if (is_raw_mode(w.shape.mode)) return 2 * largest;
  int32_t least = INT32_MAX, end = INT32_MIN;
  for (const Codebook& book : w.books[component]) {
    least = std::min(least, book.base), end = std::max(end, book.base + book.levels);
  }
  return (end - least) * double{step} + 2 * largest;
}

// What a column of a row amounts to.
struct ExactColumn {
  std::vector<double> p;    // of the tokens it sees
  std::vector<double> out;  // [head_dim]
  double lse = -INFINITY;
  double score_error = 0;  // of a score, in what is compared
  double largest = 0;      // |value|, without means
};
// Of a score: q scaled, reach that of keys, terms the largest sum of |q k|.
//
// Products run over 16 dims after another, and each is off by kProductError of what is summed until
// then: at most, in whatever order, with the largest first. Scales, the base's part and 2^x are off
// by a few 2^-24 of what they are multiplied by, and of 2^8, which the argument of 2^x stays below.
// Codes of 16 bits are rounded to 11.
inline double score_error(const World& w, const std::vector<double>& q, double reach,
                          double terms) {
  std::vector<double> blocks(q.size() / 16);
  for (size_t d = 0; d < q.size(); ++d) blocks[d / 16] += std::abs(q[d]) * reach;
  std::sort(blocks.rbegin(), blocks.rend());
  double sum = 0, error = 0;
  for (const double block : blocks) sum += block, error += kProductError * sum;
  error += 0x1p-21 * sum + 0x1p-15;
  return error + (w.shape.huge_codes ? 0x1p-11 * terms : 0);
}
// first_token: of the row, in World::y.
inline ExactColumn exact_column(const World& w, size_t r, size_t first_token, int32_t c) {
  const auto dims = static_cast<size_t>(w.shape.head_dim);
  const double scale = 1 / std::sqrt(w.shape.head_dim);
  const auto all = static_cast<size_t>(w.data[r].coded + w.data[r].window);
  const auto hidden = static_cast<size_t>(w.shape.q_len - 1 - c / w.shape.columns);
  const size_t n = all - std::min(all, hidden);
  const float *keys = w.y[0].data() + first_token * dims,
              *values = w.y[1].data() + first_token * dims;
  ExactColumn x;
  x.out.resize(dims);
  if (w.data[r].corrupt) return x;
  const uint16_t* bits = w.q.data() + w.shape.place(r, c) * dims;
  const auto mean = [&](int32_t component, size_t d) {
    if (!w.shape.means || w.data[r].mean < 0) return 0.0;
    return double(w.means[component][static_cast<size_t>(w.data[r].mean) * dims + d]);
  };
  std::vector<double> q;
  double shift = 0, widest = 0, largest_key = 0;
  for (size_t d = 0; d < dims; ++d) {
    q.push_back(scale * double(raw_to_float(w.shape.dtype, bits[d])));
    shift += q[d] * mean(0, d);
  }
  // A sink is part of the denominator alone.
  const double sink = w.sinks.empty() ? -INFINITY : w.sinks[w.shape.head(r, c)];
  double top = sink;
  for (size_t i = 0; i < n; ++i) {
    double score = shift, terms = 0;
    for (size_t d = 0; d < dims; ++d) {
      score += q[d] * keys[i * dims + d];
      terms += std::abs(q[d] * keys[i * dims + d]);
      largest_key = std::max(largest_key, std::abs(double(keys[i * dims + d])));
      x.largest = std::max(x.largest, std::abs(double(values[i * dims + d])));
    }
    x.p.push_back(score);
    widest = std::max(widest, terms);
    top = std::max(top, score);
  }
  if (std::isinf(top)) return x;
  double sum = std::exp(sink - top);
  for (const double score : x.p) sum += std::exp(score - top);
  x.lse = top + std::log(sum);
  for (size_t i = 0; i < n; ++i) {
    x.p[i] = std::exp(x.p[i] - x.lse);
    for (size_t d = 0; d < dims; ++d) x.out[d] += x.p[i] * (values[i * dims + d] + mean(1, d));
  }
  const float step = w.steps[0][static_cast<size_t>(w.data[r].step)];
  x.score_error = score_error(w, q, digit_reach(w, 0, step, largest_key), widest);
  return x;
}

// Compares with exact attention over the decoded values.
//
// An output is sum p y / sum p, p rounded to fp16 after a value close to their maximum is taken
// off, and the sum is that of the rounded ones.
// - Rounding: each p is off by 2^-11 of itself, or, where it is subnormal, by 2^-25 of the largest,
//   which is at least 1. A weight that is off by a share e moves the output by e |y - out| of its
//   own weight: at most 2^-10 and, for n tokens, n 2^-24 of the largest |y|. Codes of 16 bits
//   are rounded to 11 bits on top.
// - Scores: a probability is off by what its score and the lse are.
// - Products: accumulators hold sums of digits, of magnitude reach, whatever is left of them when
//   the base comes off: an output that is exactly 0 has their error, too. Every tile of 16 tokens
//   adds a product; the sum of p, which multiplies the base, is off by those of an item, 4, and by
//   the additions of items, 2^-24 each.
// - The output is rounded when it is stored, to 2^-25 where it is subnormal; what a sink leaves of
//   it is off by what the sum of the rounded p is. bfloat16 queries are exact.
inline void compare_column(const World& w, const Attended& got, size_t r, int32_t c,
                           const ExactColumn& exact) {
  const double rounding = w.shape.dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  const size_t place = w.shape.place(r, c), dims = static_cast<size_t>(w.shape.head_dim);
  if (std::isinf(exact.lse)) {
    ASSERT_EQ(got.lse[place], -INFINITY) << "row " << r;
  } else {
    ASSERT_NEAR(got.lse[place], exact.lse, 2e-3 + exact.score_error) << "row " << r;
  }
  const int32_t tokens = w.data[r].coded + w.data[r].window, products = (tokens + 15) / 16 + 5;
  const float step = w.steps[1][static_cast<size_t>(w.data[r].step)];
  const double rounded =
      0x1p-10 * (1 + w.shape.huge_codes) + 0x1p-24 * tokens + 2 * std::expm1(2 * exact.score_error);
  const double summed = products * kProductError * digit_reach(w, 1, step, exact.largest);
  for (size_t d = 0; d < dims; ++d) {
    const double stored =
        (rounding + (w.sinks.empty() ? 0 : 0x1p-11)) * std::abs(exact.out[d]) + 0x1p-25;
    const double tolerance = exact.p.empty() ? 0.0 : rounded * exact.largest + summed + stored;
    ASSERT_NEAR(raw_to_float(w.shape.dtype, got.out[place * dims + d]), exact.out[d], tolerance)
        << "row " << r << " column " << c << " dim " << d;
  }
}
inline void compare(const World& w, const Attended& got) {
  const int32_t columns = w.shape.all_columns();
  size_t token = 0;
  for (size_t r = 0; r < w.rows.size(); ++r) {
    const auto all = static_cast<size_t>(w.data[r].coded + w.data[r].window);
    const bool corrupt = w.data[r].corrupt;
    ASSERT_EQ(got.status[r], corrupt ? StatusCode::kCorrupt : StatusCode::kOk) << "row " << r;
    for (int32_t c = 0; c < columns; ++c) {
      const ExactColumn exact = exact_column(w, r, token, c);
      compare_column(w, got, r, c, exact);
      if (::testing::Test::HasFatalFailure()) return;
    }
    token += all;
  }
}

}  // namespace tierkv::test::coded
