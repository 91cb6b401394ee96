// SPDX-License-Identifier: Apache-2.0
// Random caches for the tests of coded products (bench/baselines/matvec/coded_matvec.h), in host
// memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "bench/baselines/matvec/coded_matvec.h"
#include "codec/format/coded_block.h"
#include "tests/support/code_source.h"

namespace tierkv {

struct MatvecShape {
  Component component = Component::kKey;
  BlockMode mode = BlockMode::kPair;
  int32_t streams = 2;
  int32_t max_length = 10;
  int32_t head_dim = 128;
  int32_t columns = 4;
  double spread = 1.5;  // of codes; 12 with kSingle has more than 32 levels
  bool walk_tree = false;
};

inline constexpr uint16_t kHalfNan = 0x7e00;

struct MatvecWorld {
  MatvecShape shape;
  Codebook book;
  std::vector<CodedMatvecRow> rows;
  std::vector<uint8_t> bytes;
  std::vector<CodedBlockRef> refs;
  std::vector<uint16_t> units;  // what no product may use is not a number
  std::vector<uint16_t> x;      // likewise
  // Of all rows, [tokens, head_dim]: what was encoded.
  std::vector<std::vector<int16_t>> codes;
  int64_t token_stride = 0;
  int32_t items = 0, max_block_bytes = 16;

  bool is_key() const { return shape.component == Component::kKey; }
  size_t y_count() const {
    return rows.size() * static_cast<size_t>(shape.columns) *
           static_cast<size_t>(is_key() ? token_stride : shape.head_dim);
  }
  size_t status_count() const { return is_key() ? static_cast<size_t>(items) : rows.size(); }

  // With host pointers, without y and status.
  CodedMatvec call() const {
    CodedMatvec c;
    c.bytes = bytes.data();
    c.blocks = refs.data();
    c.units = units.data();
    c.rows = rows.data();
    c.x = x.data();
    c.codebook = device_codebook(book);
    c.size = static_cast<int64_t>(bytes.size());
    c.token_stride = token_stride;
    c.num_rows = static_cast<int32_t>(rows.size());
    c.num_items = items;
    c.num_blocks = static_cast<int32_t>(refs.size());
    c.columns = shape.columns;
    c.head_dim = shape.head_dim;
    c.scale = 0.25f;
    c.max_block_bytes = max_block_bytes;
    if (shape.walk_tree) c.tree = {book.tree.data(), static_cast<int32_t>(book.tree.size())};
    return c;
  }
};

struct Multiplied {
  std::vector<float> y;  // poisoned before
  std::vector<StatusCode> status;
};
inline constexpr float kPoisonFloat = 12345678.0f;

inline Multiplied poisoned(const MatvecWorld& w) {
  return {std::vector<float>(w.y_count(), kPoisonFloat),
          std::vector<StatusCode>(w.status_count(), StatusCode::kIo)};
}

inline Multiplied multiply_on_host(const MatvecWorld& w) {
  Multiplied m = poisoned(w);
  CodedMatvec call = w.call();
  call.y = m.y.data();
  call.status = m.status.data();
  const Status s = multiply_coded_host(call, w.book);
  EXPECT_TRUE(s.is_ok()) << s.message();
  return m;
}

// One block of random codes, mostly the codebook's kind, some with exceptions, some raw, some all
// the same.
inline std::vector<int16_t> random_block(CodeSource* source, const MatvecShape& shape,
                                         int32_t tokens) {
  const int32_t kind = source->below(10);
  const double wider[] = {1, 1.5, 4, 40, 1, 1, 1, 1, 1, 1};
  std::vector<int16_t> codes =
      source->bell(int64_t{tokens} * shape.head_dim, shape.spread * wider[kind], 0.3, false);
  if (kind == 4) codes.assign(codes.size(), static_cast<int16_t>(source->below(3)));
  return codes;
}

inline void add_matvec_block(MatvecWorld* w, CodeSource* source, int32_t tokens) {
  const std::vector<int16_t> codes = random_block(source, w->shape, tokens);
  w->codes.back().insert(w->codes.back().end(), codes.begin(), codes.end());
  const size_t begin = w->bytes.size();
  ASSERT_TRUE(encode_block(codes.data(), tokens, w->shape.head_dim, w->book, &w->bytes).is_ok());
  const auto size = static_cast<uint32_t>(w->bytes.size() - begin);
  if (!is_raw_mode(load_header(w->bytes.data() + begin).mode)) {
    w->max_block_bytes = std::max(w->max_block_bytes, static_cast<int32_t>(size));
  }
  w->refs.push_back({static_cast<uint32_t>(begin / 16), size / 16});
  // Steps of very different sizes, some of them zero: a channel or token of one value.
  const int32_t n = block_unit_count(w->shape.component, w->shape.head_dim) / 2;
  const int32_t used = w->is_key() ? n : tokens;
  const size_t at = w->units.size();
  w->units.resize(at + 2 * static_cast<size_t>(n), kHalfNan);
  for (int32_t i = 0; i < used; ++i) {
    const double step = source->below(16) == 0 ? 0 : std::exp2(-8 + 8 * source->uniform());
    w->units[at + static_cast<size_t>(i)] = float_to_half(static_cast<float>(step));
    w->units[at + static_cast<size_t>(n + i)] =
        float_to_half(static_cast<float>(8 * source->uniform() - 4));
  }
}

inline void add_matvec_row(MatvecWorld* w, CodeSource* source, int32_t tokens) {
  // Blocks that belong to no row lie between those of rows.
  w->codes.emplace_back();
  if (source->below(3) == 0) add_matvec_block(w, source, kBlockTokens);
  w->codes.back().clear();
  CodedMatvecRow row;
  row.first_item = w->items;
  row.first_block = static_cast<int32_t>(w->refs.size());
  row.tokens = tokens;
  for (int32_t t = 0; t < tokens; t += kBlockTokens) {
    add_matvec_block(w, source, std::min(kBlockTokens, tokens - t));
    ++w->items;
  }
  w->rows.push_back(row);
}

// Queries of very different sizes; weights as a softmax leaves them, close to uniform or not.
inline void add_inputs(MatvecWorld* w, CodeSource* source) {
  std::normal_distribution<double> normal(0, 1);
  for (const CodedMatvecRow& row : w->rows) {
    for (int32_t c = 0; c < w->shape.columns; ++c) {
      const double size = std::exp2(-14 + 20 * source->uniform());
      const double sharp = 4 * source->uniform();
      const int64_t count = w->is_key() ? w->shape.head_dim : w->token_stride;
      double total = 0;
      std::vector<double> x(static_cast<size_t>(count));
      for (double& v : x) {
        v = w->is_key() ? size * normal(source->rng()) : std::exp(sharp * normal(source->rng()));
      }
      for (int32_t t = 0; t < row.tokens; ++t) total += x[static_cast<size_t>(t) % x.size()];
      for (int64_t i = 0; i < count; ++i) {
        const double v =
            w->is_key() ? x[static_cast<size_t>(i)] : x[static_cast<size_t>(i)] / total;
        w->x.push_back(!w->is_key() && i >= row.tokens ? kHalfNan
                                                       : float_to_half(static_cast<float>(v)));
      }
    }
  }
}

inline MatvecWorld make_matvec_world(CodeSource* source, const MatvecShape& shape,
                                     const std::vector<int32_t>& tokens) {
  MatvecWorld w;
  w.shape = shape;
  CodeHistogram histogram(shape.component, shape.head_dim);
  histogram.add(source->bell(512 * shape.head_dim, shape.spread, 0.0, false).data(), 512);
  CodebookSpec spec;
  spec.mode = shape.mode;
  spec.streams_per_lane = shape.streams;
  spec.max_length = shape.max_length;
  spec.table_id = 9;
  auto book = build_codebook(histogram, spec);
  EXPECT_TRUE(book.is_ok()) << book.status().message();
  if (!book.is_ok()) return w;
  w.book = *book;
  for (int32_t n : tokens) w.token_stride = std::max<int64_t>(w.token_stride, (n + 1) / 2 * 2);
  for (int32_t n : tokens) add_matvec_row(&w, source, n);
  add_inputs(&w, source);
  return w;
}

// How far a product may be from the reference.
//
// Keys: a product of q and a step is rounded to fp16 (2^-11 of it), after q was scaled so that its
// largest entry lies in [1/4, 1/2): what is subnormal there is off by 2^-25, which is 2^-23 of the
// largest |q|. Digits of raw blocks and exceptions are rounded to 11 bits, too. Both products with
// the rounded one, of digits and of the base, have the same rounding, so together 2^-10 of the
// terms with |code| + |base|. Sums in fp32 lose at most 2^-19 of the magnitudes of their terms.
//
// Values: the same with p * step for q * step; what is subnormal lies 2^-26 below the largest
// weight and less. Sums over up to 2^12 steps of the tensor core lose 2^-11 of the terms'
// magnitudes at most.
struct MatvecTolerance {
  double terms = 0;   // sum of (|code| + |base|) |x step|
  double lows = 0;    // sum of |x low|
  double coarse = 0;  // sum of (|code| (1 + step) + |low|) times the largest |x|

  void add(double code, double base, double step, double low, double x, double largest) {
    terms += (std::abs(code) + std::abs(base)) * std::abs(x * step);
    lows += std::abs(x * low);
    coarse += (std::abs(code) * (1 + step) + std::abs(low)) * largest;
  }
  double keys() const { return 0x1p-10 * terms + 0x1p-19 * lows + 0x1p-22 * coarse; }
  double values() const { return 0x1.8p-10 * terms + 0x1p-11 * lows + 0x1p-34 * coarse; }
};

// Compares what a row of `got` holds with the reference's, and that nothing else was written. Rows
// with a status other than kOk have zeros (values), or blocks of zeros (keys).
class MatvecComparison {
 public:
  MatvecComparison(const MatvecWorld& w, const Multiplied& want, const Multiplied& got)
      : w_(w), want_(want), got_(got) {}

  void row(size_t r) const {
    for (int32_t c = 0; c < w_.shape.columns; ++c) {
      if (w_.is_key()) {
        keys(r, c);
      } else {
        values(r, c);
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  double unit(int32_t block, int32_t i, int32_t which) const {
    const int32_t count = block_unit_count(w_.shape.component, w_.shape.head_dim);
    return half_to_float(w_.units[static_cast<size_t>(block * count + which * count / 2 + i)]);
  }
  double x(size_t r, int32_t c, int64_t i) const {
    const int64_t count = w_.is_key() ? w_.shape.head_dim : w_.token_stride;
    const int64_t column = static_cast<int64_t>(r) * w_.shape.columns + c;
    return half_to_float(w_.x[static_cast<size_t>(column * count + i)]);
  }
  double largest_x(size_t r, int32_t c, int64_t count) const {
    double largest = 0;
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::abs(x(r, c, i)));
    return largest;
  }

  void keys(size_t r, int32_t c) const {
    const CodedMatvecRow& row = w_.rows[r];
    const int32_t dims = w_.shape.head_dim;
    const double largest = largest_x(r, c, dims);
    const size_t at = (r * static_cast<size_t>(w_.shape.columns) + static_cast<size_t>(c)) *
                      static_cast<size_t>(w_.token_stride);
    for (int32_t t = 0; t < w_.token_stride; ++t) {
      const float got = got_.y[at + static_cast<size_t>(t)];
      if (t >= row.tokens) {
        ASSERT_EQ(got, kPoisonFloat) << "row " << r << " behind its end, token " << t;
        continue;
      }
      const auto item = static_cast<size_t>(row.first_item + t / kBlockTokens);
      if (got_.status[item] != StatusCode::kOk) {
        ASSERT_EQ(got, 0.0f) << "row " << r << " token " << t;
        continue;
      }
      MatvecTolerance tolerance;
      const int32_t block = row.first_block + t / kBlockTokens;
      for (int32_t d = 0; d < dims; ++d) {
        tolerance.add(w_.codes[r][static_cast<size_t>(t * dims + d)], w_.book.base,
                      unit(block, d, 0), unit(block, d, 1), x(r, c, d), largest);
      }
      ASSERT_NEAR(got, want_.y[at + static_cast<size_t>(t)], 0.25 * tolerance.keys())
          << "row " << r << " column " << c << " token " << t;
    }
  }

  void values(size_t r, int32_t c) const {
    const CodedMatvecRow& row = w_.rows[r];
    const int32_t dims = w_.shape.head_dim;
    const double largest = largest_x(r, c, row.tokens);
    std::vector<MatvecTolerance> tolerances(static_cast<size_t>(dims));
    for (int32_t t = 0; t < row.tokens; ++t) {
      const int32_t block = row.first_block + t / kBlockTokens, i = t % kBlockTokens;
      for (int32_t d = 0; d < dims; ++d) {
        tolerances[static_cast<size_t>(d)].add(w_.codes[r][static_cast<size_t>(t * dims + d)],
                                               w_.book.base, unit(block, i, 0), unit(block, i, 1),
                                               x(r, c, t), largest);
      }
    }
    const size_t at = (r * static_cast<size_t>(w_.shape.columns) + static_cast<size_t>(c)) *
                      static_cast<size_t>(dims);
    for (size_t d = 0; d < tolerances.size(); ++d) {
      const bool valid = got_.status[r] == StatusCode::kOk;
      ASSERT_NEAR(got_.y[at + d], valid ? want_.y[at + d] : 0.0f,
                  valid ? 0.25 * tolerances[d].values() : 0.0)
          << "row " << r << " column " << c << " dim " << d;
    }
  }

  const MatvecWorld& w_;
  const Multiplied &want_, &got_;
};

}  // namespace tierkv
