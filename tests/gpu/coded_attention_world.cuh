// Rows of random coded and fixed-rate blocks and raw windows, as attend_coded() takes them, and
// what they decode to.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "attention/coded_attention.h"
#include "codec/coded_block.h"
#include "codec/element.h"
#include "codec/fixed_block.h"
#include "tests/codec/code_source.h"

namespace tierkv::test {

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
  FixedFormat fixed;   // any: every third whole block is at a fixed rate
  int32_t family = 1;  // codebooks of a component

  int32_t all_columns() const { return columns * q_len; }
  // Of a column of a row, in lines of head_dim elements.
  size_t place(size_t row, int32_t column) const {
    const size_t heads = static_cast<size_t>(kv_heads), entry = row / heads;
    const size_t line = entry * static_cast<size_t>(q_len) + static_cast<size_t>(column / columns);
    return (line * heads + row % heads) * static_cast<size_t>(columns) +
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
  std::vector<int16_t> codes =
      source->bell(int64_t{tokens} * dims, spread, 0.3 + 3.0 * member, false);
  if (kind == 4) codes.assign(codes.size(), static_cast<int16_t>(source->below(3)));
  std::vector<uint8_t>& bytes = w->bytes[component];
  const size_t begin = bytes.size();
  EXPECT_TRUE(encode_block(codes.data(), tokens, dims, book, &bytes).is_ok());
  const auto size = static_cast<uint32_t>(bytes.size() - begin);
  for (size_t at = begin; at < bytes.size();) {
    const CodedBlockHeader header = load_header(bytes.data() + at);
    const int32_t slice = header.units * kBlockAlignment;
    if (!is_raw_mode(header.mode)) w->max_block_bytes = std::max(w->max_block_bytes, slice);
    at += static_cast<size_t>(slice);
  }
  w->refs[component].push_back({static_cast<uint32_t>(begin / 16), size / 16});
  for (int16_t c : codes) w->y[component].push_back(step * static_cast<float>(c));
}

// Of tokens of different ranges.
inline void add_fixed_block(World* w, CodeSource* source, Component c) {
  const int32_t dims = w->shape.head_dim, bits = w->shape.fixed.bits(c);
  const auto i = static_cast<size_t>(c);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<uint16_t> y;
  for (int32_t t = 0; t < kBlockTokens; ++t) {
    const auto spread = static_cast<float>(std::exp2(4 * source->uniform() - 3));
    for (int32_t d = 0; d < dims; ++d) y.push_back(float_to_half(spread * normal(source->rng())));
  }
  std::vector<uint8_t>& bytes = w->bytes[i];
  const size_t begin = bytes.size();
  encode_fixed_block(y.data(), dims, c, bits, &bytes);
  const size_t size = bytes.size() - begin;
  w->refs[i].push_back({static_cast<uint32_t>(begin / 16), static_cast<uint32_t>(size / 16)});
  const Status s =
      decode_fixed_block(bytes.data() + begin, static_cast<int64_t>(size), dims, c, bits, y.data());
  EXPECT_TRUE(s.is_ok()) << s.message();
  for (const uint16_t x : y) w->y[i].push_back(half_to_float(x));
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
      if (shape.fixed.any() && r.coded - t >= kBlockTokens && source->below(3) == 0) {
        add_fixed_block(&w, source, Component::kKey);
        add_fixed_block(&w, source, Component::kValue);
        continue;
      }
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
  return w;
}

}  // namespace tierkv::test
