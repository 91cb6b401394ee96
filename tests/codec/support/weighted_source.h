// SPDX-License-Identifier: Apache-2.0
// Rows of random keys and values, and blocks of random codes, for the tests of weighted steps.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "codec/host/coded/weighted_books.h"
#include "codec/host/coded/weighted_rows.h"
#include "tests/support/code_source.h"

namespace tierkv {

class WeightedSourceOfRows {
 public:
  explicit WeightedSourceOfRows(uint32_t seed) : source(seed) {}

  // Normal numbers whose spread and mean differ from channel to channel, as fp16 holds them.
  std::vector<float> rows(int32_t tokens, int32_t head_dim, double size = 1) {
    std::normal_distribution<double> normal;
    std::vector<double> spread, mean;
    for (int32_t d = 0; d < head_dim; ++d) {
      spread.push_back(size * std::exp(normal(source.rng())));
      mean.push_back(2 * size * normal(source.rng()));
    }
    std::vector<float> x;
    for (int32_t t = 0; t < tokens; ++t) {
      for (int32_t d = 0; d < head_dim; ++d) {
        const double y = mean[d] + spread[d] * normal(source.rng());
        x.push_back(half_to_float(float_to_half(static_cast<float>(y))));
      }
    }
    return x;
  }
  std::vector<double> energies(int32_t head_dim) {
    std::vector<double> e;
    for (int32_t d = 0; d < head_dim; ++d) e.push_back(std::exp(4 * source.uniform() - 2));
    return e;
  }
  std::vector<int8_t> key_exponents(int32_t tokens) {
    std::vector<int8_t> e;
    for (int32_t t = 0; t < tokens; ++t) e.push_back(static_cast<int8_t>(source.below(13) - 8));
    return e;
  }
  // A few of them or all.
  std::vector<int8_t> value_exponents(int32_t tokens) {
    const int32_t range = 1 + source.below(source.below(2) ? 256 : 20);
    const int32_t least = source.below(257 - range) - 128;
    std::vector<int8_t> e;
    for (int32_t t = 0; t < tokens; ++t) {
      e.push_back(static_cast<int8_t>(least + source.below(range)));
    }
    return e;
  }
  // A family whose books were made for codes of different spreads around a centre.
  BookFamily family(Component component, int32_t books, BlockMode mode, int32_t streams,
                    double spread, double centre) {
    BookFamily family;
    for (int32_t i = 0; i < books; ++i) {
      CodebookSpec spec;
      spec.mode = mode;
      spec.streams_per_lane = streams;
      spec.table_id = static_cast<uint8_t>(40 + i);
      spec.max_length = 8 + source.below(7);
      CodeHistogram h(component, 64);
      const auto seen = source.bell(64 * 64 * 4, spread * (1 + i) / 2, centre, false);
      h.add(seen.data(), 64 * 4);
      family.books.push_back(*build_codebook(h, spec));
    }
    return family;
  }
  std::vector<uint8_t> book_of(int32_t head_dim, size_t books) {
    std::vector<uint8_t> of;
    for (int32_t f = 0; f < dim_block_count(head_dim); ++f) {
      of.push_back(static_cast<uint8_t>(source.below(static_cast<int32_t>(books))));
    }
    return of;
  }
  Rope rope(RopePairing pairing, int32_t rotary_dims) {
    Rope r;
    r.pairing = pairing;
    r.rotary_dims = rotary_dims;
    for (int32_t i = 0; i < rotary_dims / 2; ++i) {
      r.inv_freq.push_back(static_cast<float>(std::pow(10000.0, -2.0 * i / rotary_dims)));
    }
    return r;
  }

  CodeSource source;
};

}  // namespace tierkv
