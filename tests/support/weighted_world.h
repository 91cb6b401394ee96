// SPDX-License-Identifier: Apache-2.0
// Rows of random keys and values, with all that the kernels of coded blocks take, and what the
// host makes of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "codec/format/element.h"
#include "codec/gpu/coded/weighted_batch.h"
#include "codec/host/coded/weighted_books.h"
#include "codec/host/coded/weighted_rows.h"
#include "tools/analysis/scheme/importance.h"

namespace tierkv {

// An element as decoders write it.
inline uint16_t raw_element(DType dtype, float x) {
  return float_to_raw(dtype, dtype == DType::kFloat16 ? saturate_to_half_range(x) : x);
}

struct WeightedShape {
  int32_t head_dim = 128;
  int32_t rows = 2, sinks = 4, tokens = 200;  // positions 0 .. tokens - 1 of each row
  int32_t streams = 1;
  RopePairing pairing = RopePairing::kHalves;
  int32_t rotary_dims = 128;
  DType dtype = DType::kFloat16;
  bool means = true, weights = true, significance = true;
  bool outliers = true;
  double key_step = 0.5, value_step = 1.5;  // against deviations of 1
};

// A block as the host writes it.
struct HostBlock {
  int32_t row, block, first, last;  // positions [first, last)
  std::vector<uint8_t> bytes[2];    // by component
  std::vector<float> values[2];     // [tokens, head_dim] that they stand for, keys rotated
};

struct WeightedWorld {
  WeightedShape shape;
  RopeTable rope;
  std::vector<WeightedRow> rows;
  std::vector<uint16_t> x[2];       // [rows, tokens, stride]: keys, values
  std::vector<float> significance;  // [rows, tokens]
  std::vector<int16_t> codes[2];    // [rows, tokens, head_dim]
  std::vector<int8_t> exponents[2];
  std::vector<int8_t> importance;  // [rows, tokens]: exponents G
  BookChoice books[2];
  std::vector<HostBlock> blocks;

  int32_t stride() const { return shape.head_dim + 8; }
  int32_t row_blocks() const { return (shape.tokens + kBlockTokens - 1) / kBlockTokens; }
  size_t at(int32_t row, int32_t position) const {
    return (static_cast<size_t>(row) * shape.tokens + position) * stride();
  }

  WeightedWorld(std::mt19937& rng, const WeightedShape& s) : shape(s) {
    make_rows(rng);
    make_tokens(rng);
  }

  // Codes, codebooks and blocks; after changes of x.
  void encode() {
    for (int32_t c = 0; c < 2; ++c) {
      find_codes(c);
      choose(c);
    }
    encode_blocks();
  }
  void encode_blocks() {
    blocks.clear();
    for (int32_t r = 0; r < shape.rows; ++r) {
      for (int32_t b = 0; b < row_blocks(); ++b) add_block(r, b);
    }
  }

  // Codebooks that know little of these codes: of values of deviation 1 in usual steps.
  void use_strange_books(std::mt19937& rng) {
    WeightedShape usual;
    usual.head_dim = usual.rotary_dims = shape.head_dim;
    usual.streams = shape.streams;
    WeightedWorld other(rng, usual);
    other.encode();
    for (int32_t c = 0; c < 2; ++c) books[c].family = other.books[c].family;
  }

  const Codebook& book(int32_t c) const { return books[c].family.books.front(); }

  // What the calls take of the host's memory.
  std::vector<float> key_scales() const {
    std::vector<float> scales;
    for (const WeightedRow& row : rows) {
      for (int32_t d = 0; d < shape.head_dim; ++d) {
        scales.push_back(row.key_weight.empty() ? row.key_step
                                                : dim_scale(row.key_step, row.key_weight[d]));
      }
    }
    return scales;
  }
  std::vector<uint16_t> key_means() const {
    std::vector<uint16_t> means;
    for (const WeightedRow& row : rows) {
      means.insert(means.end(), row.key_mean.begin(), row.key_mean.end());
    }
    return means;
  }
  std::vector<float> value_steps() const {
    std::vector<float> steps;
    for (const WeightedRow& row : rows) steps.push_back(row.value_step);
    return steps;
  }
  // WeightedEncode::decided, [rows, tokens]: the importance alone.
  std::vector<std::array<uint8_t, 4>> decided() const {
    std::vector<std::array<uint8_t, 4>> words;
    for (const int8_t e : importance) words.push_back({static_cast<uint8_t>(e), 0, 0, 0});
    return words;
  }
  // Whole rows without their sinks.
  std::vector<WeightedRange> ranges() const {
    std::vector<WeightedRange> all;
    for (int32_t r = 0; r < shape.rows; ++r) {
      WeightedRange range;
      range.at = static_cast<int64_t>(at(r, shape.sinks));
      range.decided = int64_t{r} * shape.tokens + shape.sinks;
      range.first = range.body_first = shape.sinks;
      range.last = range.body_last = shape.tokens;
      range.row = r;
      range.first_block = r * row_blocks();
      all.push_back(range);
    }
    return all;
  }

 private:
  void make_rows(std::mt19937& rng) {
    std::uniform_real_distribution<float> unit(0.5f, 2.0f);
    if (shape.pairing != RopePairing::kNone) {
      Rope turning = Rope::plain(10000, shape.rotary_dims);
      turning.pairing = shape.pairing;
      rope = *make_rope_table(turning, shape.head_dim, shape.tokens);
    }
    for (int32_t r = 0; r < shape.rows; ++r) {
      WeightedRow row;
      row.head_dim = shape.head_dim;
      row.key_step = static_cast<float>(shape.key_step) * unit(rng);
      row.value_step = static_cast<float>(shape.value_step) * unit(rng);
      for (int32_t d = 0; shape.weights && d < shape.head_dim; ++d) {
        row.key_weight.push_back(unit(rng));
      }
      for (int32_t d = 0; shape.means && d < shape.head_dim; ++d) {
        row.key_mean.push_back(float_to_half(3 * unit(rng) - 3));
      }
      row.rope = shape.pairing == RopePairing::kNone ? nullptr : &rope;
      rows.push_back(row);
    }
  }

  void make_tokens(std::mt19937& rng) {
    std::normal_distribution<float> normal;
    for (int32_t c = 0; c < 2; ++c) {
      x[c].assign(at(shape.rows, 0) + 8, 0);
      for (int32_t r = 0; r < shape.rows; ++r) {
        for (int32_t t = 0; t < shape.tokens; ++t) {
          const bool zeros = c == 1 && rng() % 40 == 0;
          const float spread = shape.outliers && rng() % 30 == 0 ? 8.0f : 1.0f;
          for (int32_t d = 0; d < shape.head_dim; ++d) {
            const float outlier = shape.outliers && rng() % 400 == 0 ? 30.0f : 1.0f;
            const float value = zeros ? 0.0f : spread * outlier * normal(rng);
            x[c][at(r, t) + d] = float_to_raw(shape.dtype, value);
          }
        }
      }
    }
    for (int32_t i = 0; shape.significance && i < shape.rows * shape.tokens; ++i) {
      significance.push_back(rng() % 20 == 0 ? 0.0f : std::exp2(8 * normal(rng) / 3 - 6));
    }
  }

  std::vector<float> floats(int32_t c, int32_t r) const {
    std::vector<float> out;
    for (int32_t t = shape.sinks; t < shape.tokens; ++t) {
      for (int32_t d = 0; d < shape.head_dim; ++d) {
        out.push_back(raw_to_float(shape.dtype, x[c][at(r, t) + d]));
      }
    }
    return out;
  }

  void find_codes(int32_t c) {
    const int32_t body = shape.tokens - shape.sinks;
    codes[c].assign(static_cast<size_t>(shape.rows) * shape.tokens * shape.head_dim, 0);
    exponents[c].assign(static_cast<size_t>(shape.rows) * shape.tokens, 0);
    importance.assign(exponents[c].size(), 0);
    for (int32_t r = 0; r < shape.rows; ++r) {
      const std::vector<float> values = floats(c, r);
      const size_t first = static_cast<size_t>(r) * shape.tokens + shape.sinks;
      if (shape.significance) {
        ASSERT_TRUE(
            importance_exponents(&significance[first], body, shape.sinks, &importance[first]));
      }
      const WeightedTokens tokens{values.data(), body, shape.sinks};
      const auto component = static_cast<Component>(c);
      ASSERT_TRUE(token_exponents(component, tokens, shape.head_dim,
                                  shape.significance ? &importance[first] : nullptr,
                                  &exponents[c][first]));
      const Status s = quantize_weighted(rows[r], component, tokens, &exponents[c][first],
                                         &codes[c][first * shape.head_dim]);
      ASSERT_TRUE(s) << s.message();
    }
  }

  void choose(int32_t c) {
    std::vector<RowCodes> from;
    for (int32_t r = 0; r < shape.rows; ++r) {
      const size_t first = static_cast<size_t>(r) * shape.tokens + shape.sinks;
      from.push_back({&codes[c][first * shape.head_dim], shape.tokens - shape.sinks});
    }
    BookSpec spec;
    spec.books = 1;
    spec.code.mode = BlockMode::kPair;
    spec.code.streams_per_lane = shape.streams;
    spec.code.table_id = static_cast<uint8_t>(17 + c);
    Result<BookChoice> choice = choose_books(static_cast<Component>(c), shape.head_dim, from, spec);
    ASSERT_TRUE(choice.is_ok()) << choice.status().message();
    books[c] = std::move(*choice);
  }

  void add_block(int32_t r, int32_t b) {
    HostBlock block{r,
                    b,
                    std::max(shape.sinks, b * kBlockTokens),
                    std::min(shape.tokens, (b + 1) * kBlockTokens),
                    {},
                    {}};
    const size_t first = static_cast<size_t>(r) * shape.tokens + block.first;
    const int32_t tokens = block.last - block.first;
    for (int32_t c = 0; c < 2; ++c) {
      const int16_t* from = &codes[c][first * shape.head_dim];
      ASSERT_TRUE(encode_block({from, &exponents[c][first], tokens, shape.head_dim},
                               books[c].family.books, nullptr, &block.bytes[c]));
      block.values[c].resize(static_cast<size_t>(tokens) * shape.head_dim);
      ASSERT_TRUE(dequantize_weighted(rows[r], static_cast<Component>(c),
                                      {from, &exponents[c][first], tokens, block.first},
                                      block.values[c].data()));
    }
    blocks.push_back(std::move(block));
  }
};

// The arrays of a codebook, in host memory.
struct HostBook {
  std::vector<uint32_t> words, table;
  DeviceCodebook codebook;

  explicit HostBook(const Codebook& book)
      : words(encoder_words(book)), table(device_table(book)), codebook(device_codebook(book)) {
    codebook.words = words.data(), codebook.table = table.data();
    codebook.cheapest = book.cheapest.data();
  }
};

}  // namespace tierkv
