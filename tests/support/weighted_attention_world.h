// SPDX-License-Identifier: Apache-2.0
// Rows of coded blocks as attend_coded() takes them, what they decode to, and exact attention to
// compare with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "attention/coded/weighted_tables.h"
#include "codec/format/element.h"
#include "codec/host/coded/coded_block.h"
#include "codec/host/coded/weighted_books.h"
#include "codec/host/coded/weighted_rows.h"
#include "tests/support/code_source.h"

namespace tierkv::test::weighted {

inline constexpr int32_t kSteps = 3, kPositions = 4096;

struct Shape {
  int32_t head_dim = 128;
  int32_t columns = 4;
  int32_t q_len = 1;
  int32_t kv_heads = 1;
  DType dtype = DType::kFloat16;
  int32_t streams = 1;
  int32_t max_length = 10;
  BlockMode mode = BlockMode::kPair;
  RopePairing pairing = RopePairing::kHalves;
  int32_t rotary_dims = 0;  // 0: all
  int32_t sinks = 4;        // positions before the blocks
  bool importance = true;
  bool large_means = false;
  bool odd_blocks = true;  // some blocks have exceptions, or are raw, or all the same
  float coarseness = 1;    // of steps
  float query_size = 1;    // standard deviation of q, by which sm_scale is divided

  int32_t all_columns() const { return columns * q_len; }
  // The place of a row's column, in lines of head_dim elements.
  size_t place(size_t row, int32_t column) const {
    const size_t heads = static_cast<size_t>(kv_heads), entry = row / heads;
    const size_t line = entry * static_cast<size_t>(q_len) + static_cast<size_t>(column / columns);
    return (line * heads + row % heads) * static_cast<size_t>(columns) +
           static_cast<size_t>(column % columns);
  }
  double sm_scale() const { return 1 / (query_size * std::sqrt(double(head_dim))); }
  std::string name() const {
    return "head_dim " + std::to_string(head_dim) + " columns " + std::to_string(columns) +
           " q_len " + std::to_string(q_len) + " streams " + std::to_string(streams) + " mode " +
           block_mode_name(mode) + " pairing " + std::to_string(static_cast<int32_t>(pairing)) +
           " rotary " + std::to_string(rotary_dims) + " sinks " + std::to_string(sinks) +
           (importance ? " importance" : "") + " dtype " + dtype_name(dtype);
  }
};

// Everything of a call on the host.
struct World {
  Shape shape;
  RopeTable rope;
  std::vector<WeightedRow> steps;  // [kSteps]
  BookChoice books[2];
  std::vector<CodedRow> rows;
  std::vector<uint8_t> bytes[2];
  std::vector<CodedBlockRef> refs[2];
  std::vector<float> y[2];  // [tokens of all rows, head_dim], as decoded
  std::vector<uint16_t> q;
  WeightedTurns turns;
  std::vector<float> key_scales;
  std::vector<uint16_t> key_means;
  std::vector<float> units, value_steps;  // [kSteps]
  int32_t items = 0, max_block_bytes = 16;
};

inline WeightedRow random_row(CodeSource* source, const World& w) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  WeightedRow row;
  row.head_dim = w.shape.head_dim;
  row.key_step = w.shape.coarseness * static_cast<float>(0.3 + 0.4 * source->uniform());
  row.value_step = w.shape.coarseness * static_cast<float>(0.3 + 0.4 * source->uniform());
  for (int32_t d = 0; d < row.head_dim; ++d) {
    const float spread = w.shape.large_means ? 20.0f : 0.7f;
    row.key_mean.push_back(float_to_half(spread * normal(source->rng())));
    row.key_weight.push_back(std::exp2(0.7f * normal(source->rng())));
  }
  if (w.rope.pairing != RopePairing::kNone) row.rope = &w.rope;
  for (int32_t i = 0; i < w.rope.pairs; ++i) {
    row.key_weight[static_cast<size_t>(pair_second(w.rope.pairing, w.rope.pairs, i))] =
        row.key_weight[static_cast<size_t>(pair_first(w.rope.pairing, i))];
  }
  return row;
}

// Codes of one row and component.
struct RowCodesOf {
  std::vector<int16_t> codes;
  std::vector<int8_t> exponents;
};

inline RowCodesOf quantized(CodeSource* source, const World& w, const WeightedRow& row, Component c,
                            int32_t tokens) {
  const int32_t dims = w.shape.head_dim;
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> x;
  for (int32_t t = 0; t < tokens; ++t) {
    const float spread = std::exp2(static_cast<float>(4 * source->uniform() - 3));
    for (int32_t d = 0; d < dims; ++d)
      x.push_back(normal(source->rng()) * (c == Component::kKey ? 1.0f : spread));
  }
  if (c == Component::kKey) {  // around the means, which are those before RoPE
    std::vector<int16_t> none(x.size());
    std::vector<int8_t> flat(static_cast<size_t>(tokens));
    std::vector<float> means(x.size());
    EXPECT_TRUE(dequantize_weighted(row, c, {none.data(), flat.data(), tokens, w.shape.sinks},
                                    means.data()));
    for (size_t i = 0; i < x.size(); ++i) x[i] += means[i];
  }
  std::vector<int8_t> importance;
  for (int32_t t = 0; t < tokens; ++t) {
    importance.push_back(static_cast<int8_t>(w.shape.importance ? source->below(13) - 8 : 0));
  }
  RowCodesOf out{std::vector<int16_t>(x.size()), std::vector<int8_t>(static_cast<size_t>(tokens))};
  const WeightedTokens in{x.data(), tokens, w.shape.sinks};
  EXPECT_TRUE(token_exponents(c, in, dims, importance.data(), out.exponents.data()));
  const Status s = quantize_weighted(row, c, in, out.exponents.data(), out.codes.data());
  EXPECT_TRUE(s) << s.message();
  return out;
}

// Blocks of other kinds than the usual one: with exceptions, raw, or all the same.
inline void disturb(CodeSource* source, int32_t dims, int32_t tokens, int16_t* codes) {
  const int32_t kind = source->below(8);
  const int64_t count = int64_t{tokens} * dims;
  const double spread = kind == 1 ? 3.5 : kind == 2 ? 9.0 : kind == 3 ? 90.0 : 0;
  if (spread > 0) {
    const std::vector<int16_t> other = source->bell(count, spread, 0.4, false);
    std::copy(other.begin(), other.end(), codes);
  }
  if (kind == 4) std::fill_n(codes, count, static_cast<int16_t>(source->below(3)));
  if (kind == 5) {
    for (int32_t i = 0; i < 5; ++i)
      codes[source->below(static_cast<int32_t>(count))] =
          static_cast<int16_t>(30 + source->below(200));
  }
}

inline void add_blocks(World* w, CodeSource* source, int32_t c, const WeightedRow& row,
                       const RowCodesOf& from) {
  const int32_t dims = w->shape.head_dim, tokens = static_cast<int32_t>(from.exponents.size());
  std::vector<int16_t> codes = from.codes;
  for (int32_t t = 0; t < tokens;) {
    const int32_t here = std::min(kBlockTokens - (t == 0 ? w->shape.sinks : 0), tokens - t);
    int16_t* block = codes.data() + int64_t{t} * dims;
    if (w->shape.odd_blocks) disturb(source, dims, here, block);
    std::vector<uint8_t>& bytes = w->bytes[c];
    const size_t begin = bytes.size();
    const Status s = encode_block({block, from.exponents.data() + t, here, dims},
                                  w->books[c].family.books, nullptr, &bytes);
    EXPECT_TRUE(s) << s.message();
    bool coded = false;
    for (size_t at = begin; at < bytes.size();) {
      const BlockHeader h = load_header(bytes.data() + at);
      coded |= !is_raw_mode(h.mode);
      at += size_t{h.units} * kBlockAlignment;
    }
    const auto size = static_cast<uint32_t>(bytes.size() - begin);
    const int32_t slices = slice_count(dims);
    if (coded)
      w->max_block_bytes =
          std::max(w->max_block_bytes,
                   static_cast<int32_t>(size + static_cast<uint32_t>(slices) - 1) / slices);
    w->refs[c].push_back({static_cast<uint32_t>(begin / 16), size / 16});
    t += here;
  }
  std::vector<float> x(codes.size());
  const Status s =
      dequantize_weighted(row, static_cast<Component>(c),
                          {codes.data(), from.exponents.data(), tokens, w->shape.sinks}, x.data());
  EXPECT_TRUE(s) << s.message();
  w->y[c].insert(w->y[c].end(), x.begin(), x.end());
}

// WeightedRows::key_scales and key_means of a row and its unit.
struct KeyChannels {
  float unit = 1;
  std::vector<float> scales;
  std::vector<uint16_t> means;
};
inline KeyChannels key_channels(const WeightedRow& row) {
  const auto scale = [&](size_t d) { return dim_scale(row.key_step, row.key_weight[d]); };
  const auto dims = static_cast<size_t>(row.head_dim);
  KeyChannels channels;
  float largest = 0;
  for (size_t d = 0; d < dims; ++d) largest = std::max(largest, scale(d));
  channels.unit = 0x1p10f * largest;
  for (size_t d = 0; d < dims; ++d) channels.scales.push_back(scale(d) / (2 * largest));
  // Per (two dim blocks in their order, lane % 4): the means of a lane's four pairs of dims.
  for (int32_t i = 0; i < row.head_dim; ++i) {
    const int32_t pair = i / 2 % 4, lane = i / 8 % 4;
    const int32_t f = key_block_at(row.head_dim / kDimBlock, i / 32 * 2 + pair / 2);
    const auto d = static_cast<size_t>(f * kDimBlock + pair % 2 * 8 + lane * 2 + i % 2);
    channels.means.push_back(float_to_half(0x1p-9f * half_to_float(row.key_mean[d]) / scale(d)));
  }
  return channels;
}

inline void make_tables(World* w) {
  auto turns = weighted_turns(w->rope, w->shape.head_dim, w->shape.sinks);
  ASSERT_TRUE(turns.is_ok()) << turns.status().message();
  w->turns = *turns;
  for (const WeightedRow& row : w->steps) {
    const Status usable = check_weighted_keys(row);
    ASSERT_TRUE(usable) << usable.message();
    const KeyChannels channels = key_channels(row);
    w->units.push_back(channels.unit);
    w->value_steps.push_back(row.value_step);
    w->key_scales.insert(w->key_scales.end(), channels.scales.begin(), channels.scales.end());
    w->key_means.insert(w->key_means.end(), channels.means.begin(), channels.means.end());
  }
}

// The codes of all rows of a component, from which its codebook is chosen.
inline void choose_book(World* w, int32_t c, const std::vector<RowCodesOf>& codes) {
  std::vector<RowCodes> all;
  for (const RowCodesOf& x : codes)
    all.push_back({x.codes.data(), static_cast<int64_t>(x.exponents.size())});
  BookSpec spec;
  spec.books = 1;
  spec.code.mode = w->shape.mode;
  spec.code.streams_per_lane = w->shape.streams;
  spec.code.max_length = w->shape.max_length;
  spec.code.table_id = static_cast<uint8_t>(7 + c);
  auto choice = choose_books(static_cast<Component>(c), w->shape.head_dim, all, spec);
  ASSERT_TRUE(choice.is_ok()) << choice.status().message();
  w->books[c] = *choice;
}

// A row of the codes of both components, with queries.
inline void add_row(World* w, CodeSource* source, int32_t step, const RowCodesOf& keys,
                    const RowCodesOf& values) {
  const Shape& shape = w->shape;
  CodedRow row;
  row.first_item = w->items;
  row.first_block = static_cast<int32_t>(w->refs[0].size());
  row.coded_tokens = static_cast<int32_t>(keys.exponents.size());
  row.step = step;
  row.sink_tokens = row.coded_tokens > 0 ? shape.sinks : source->below(shape.sinks + 1);
  add_blocks(w, source, 0, w->steps[static_cast<size_t>(step)], keys);
  add_blocks(w, source, 1, w->steps[static_cast<size_t>(step)], values);
  w->items += coded_row_blocks(row.coded_tokens, row.sink_tokens);
  w->rows.push_back(row);
  std::normal_distribution<float> normal(0.0f, shape.query_size);
  for (int32_t i = 0; i < shape.all_columns() * shape.head_dim; ++i) {
    const float x = normal(source->rng());
    w->q.push_back(float_to_raw(shape.dtype, std::clamp(x, -65504.0f, 65504.0f)));
  }
}

// tokens: of each row. The world must stay where it is: its rows refer to its RoPE.
inline void make_world(CodeSource* source, const Shape& shape, const std::vector<int32_t>& tokens,
                       World* w) {
  w->shape = shape;
  Rope rope;
  if (shape.pairing != RopePairing::kNone) {
    rope = Rope::plain(10000, shape.rotary_dims == 0 ? shape.head_dim : shape.rotary_dims);
    rope.pairing = shape.pairing;
  }
  auto table = make_rope_table(rope, shape.head_dim, kPositions);
  ASSERT_TRUE(table.is_ok()) << table.status().message();
  w->rope = *table;
  for (int32_t i = 0; i < kSteps; ++i) w->steps.push_back(random_row(source, *w));
  std::vector<RowCodesOf> codes[2];
  std::vector<int32_t> step;
  for (const int32_t n : tokens) {
    step.push_back(source->below(kSteps));
    for (int32_t c = 0; c < 2; ++c) {
      codes[c].push_back(quantized(source, *w, w->steps[static_cast<size_t>(step.back())],
                                   static_cast<Component>(c), n));
    }
  }
  for (int32_t c = 0; c < 2; ++c) choose_book(w, c, codes[c]);
  if (testing::Test::HasFatalFailure()) return;
  for (size_t r = 0; r < tokens.size(); ++r) {
    add_row(w, source, step[r], codes[0][r], codes[1][r]);
  }
  make_tables(w);
}

// The scalars of a call, and pointers into `w`: a test on a device replaces those.
inline CodedAttention call_of(const World& w) {
  CodedAttention call;
  for (int32_t c = 0; c < 2; ++c) {
    CodedComponent& x = c == 0 ? call.keys : call.values;
    x.bytes = w.bytes[c].data();
    x.blocks = w.refs[c].data();
    x.size = static_cast<int64_t>(w.bytes[c].size());
    x.steps = (c == 0 ? w.units : w.value_steps).data();
    x.codebook = device_codebook(w.books[c].family.books.front());
  }
  WeightedRows& rows = call.weighted;
  rows.key_scales = w.key_scales.data();
  rows.key_means = w.key_means.data();
  rows.place_turns = w.turns.place.data();
  rows.block_turns = w.turns.block.data();
  rows.pairing = w.rope.pairing;
  rows.pairs = w.rope.pairs;
  rows.num_block_turns = w.rope.pairing == RopePairing::kNone ? 0 : w.rope.blocks;
  rows.sink_tokens = w.shape.sinks;
  call.rows = w.rows.data();
  call.num_rows = static_cast<int32_t>(w.rows.size());
  call.num_items = w.items;
  call.num_blocks = static_cast<int32_t>(w.refs[0].size());
  call.num_steps = kSteps;
  call.columns = w.shape.columns;
  call.q_len = w.shape.q_len;
  call.num_kv_heads = w.shape.kv_heads;
  call.head_dim = w.shape.head_dim;
  call.sm_scale = static_cast<float>(w.shape.sm_scale());
  call.max_block_bytes = w.max_block_bytes;
  call.dtype = w.shape.dtype;
  return call;
}

struct Attended {
  std::vector<uint16_t> out;
  std::vector<float> lse;
  std::vector<StatusCode> status;
  CodedAttentionGrid grid;
};

// How far off a score may be. Each pair of dims of a decoded key takes about eight roundings of
// 2^-11 of the norms of key and mean: the scale, the product with the code, the sum with the mean,
// a cosine and a sine, two products and a sum of the turn. A query takes seven: its scale, the
// product with it, and those of its turn. A rounding is uniform within half a unit, so fifteen have
// a deviation of sqrt(15 / 12) < 1.2 units; a score is held to 6 units over all pairs, five
// deviations. Accumulators are off by less than 2^-16 of the terms.
inline double score_error(const World& w, const WeightedRow& row, const std::vector<double>& q,
                          const float* k) {
  const auto turning = static_cast<size_t>(w.rope.pairs);
  const bool halves = w.shape.pairing == RopePairing::kHalves;
  double squares = 0, terms = 0;
  for (size_t p = 0; p < q.size() / 2; ++p) {
    const bool apart = halves && p < turning;
    const size_t a = apart ? p : 2 * p, b = apart ? p + turning : a + 1;
    const double mean = std::hypot(half_to_float(row.key_mean[a]), half_to_float(row.key_mean[b]));
    const double term = std::hypot(q[a], q[b]) * (std::hypot(k[a], k[b]) + mean);
    squares += term * term, terms += term;
  }
  return 6 * 0x1p-11 * std::sqrt(squares) + 0x1p-16 * terms + 0x1p-15;
}
// What a column of a row amounts to, and how far off it may be: an output by what its weights are
// off times what their values differ from it by. Weights are rounded to 2^-11 of themselves, or to
// 2^-25 of the largest there may be; the sums of tiles lose less than 2^-22 of the largest for a
// token.
struct Exact {
  std::vector<double> out, error;
  double lse = -INFINITY, lse_error = 0;
};
inline Exact exact_column(const World& w, size_t r, size_t first_token, int32_t c) {
  const auto dims = static_cast<size_t>(w.shape.head_dim);
  const auto n = static_cast<size_t>(w.rows[r].coded_tokens);
  const double scale = w.shape.sm_scale();
  const uint16_t* bits = w.q.data() + w.shape.place(r, c) * dims;
  const WeightedRow& row = w.steps[static_cast<size_t>(w.rows[r].step)];
  const float *keys = w.y[0].data() + first_token * dims,
              *values = w.y[1].data() + first_token * dims;
  Exact x{std::vector<double>(dims), std::vector<double>(dims)};
  std::vector<double> q, p, off;
  for (size_t d = 0; d < dims; ++d) q.push_back(scale * raw_to_float(w.shape.dtype, bits[d]));
  double top = -INFINITY, largest = 0;
  for (size_t i = 0; i < n; ++i) {
    p.push_back(0);
    for (size_t d = 0; d < dims; ++d) {
      p[i] += q[d] * keys[i * dims + d];
      largest = std::max(largest, std::abs(double(values[i * dims + d])));
    }
    off.push_back(score_error(w, row, q, keys + i * dims));
    top = std::max(top, p[i]);
  }
  if (std::isinf(top)) return x;
  double sum = 0;
  for (const double s : p) sum += std::exp(s - top);
  x.lse = top + std::log(sum);
  for (size_t i = 0; i < n; ++i) {
    p[i] = std::exp(p[i] - x.lse);
    off[i] = p[i] * (std::expm1(off[i]) + 0x1p-10);
    x.lse_error += off[i];
    for (size_t d = 0; d < dims; ++d) x.out[d] += p[i] * values[i * dims + d];
  }
  const double stored = w.shape.dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  for (size_t d = 0; d < dims; ++d) {
    x.error[d] = (stored + 0x1p-11) * std::abs(x.out[d]) + 0x1p-25 + 0x1p-22 * double(n) * largest;
    for (size_t i = 0; i < n; ++i) x.error[d] += off[i] * std::abs(values[i * dims + d] - x.out[d]);
  }
  return x;
}

inline void compare(const World& w, const Attended& got) {
  const auto dims = static_cast<size_t>(w.shape.head_dim);
  size_t token = 0;
  for (size_t r = 0; r < w.rows.size(); ++r) {
    ASSERT_EQ(got.status[r], StatusCode::kOk) << "row " << r;
    for (int32_t c = 0; c < w.shape.all_columns(); ++c) {
      const Exact exact = exact_column(w, r, token, c);
      const size_t place = w.shape.place(r, c);
      if (std::isinf(exact.lse)) {
        ASSERT_EQ(got.lse[place], -INFINITY) << "row " << r;
      } else {
        ASSERT_NEAR(got.lse[place], exact.lse,
                    0x1p-20 * std::abs(exact.lse) + 0x1p-12 + exact.lse_error)
            << "row " << r;
      }
      for (size_t d = 0; d < dims; ++d) {
        ASSERT_NEAR(raw_to_float(w.shape.dtype, got.out[place * dims + d]), exact.out[d],
                    exact.error[d])
            << "row " << r << " column " << c << " dim " << d;
      }
    }
    token += static_cast<size_t>(w.rows[r].coded_tokens);
  }
}

}  // namespace tierkv::test::weighted
