// SPDX-License-Identifier: Apache-2.0
#include "tests/support/page_world.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/core/workspace.h"
#include "attention/work/work.h"
#include "codec/format/page_layout.h"
#include "codec/format/quantize.h"

namespace tierkv::test {
namespace {

uint16_t bits_of_value(float x, DType dtype) {
  return dtype == DType::kBFloat16 ? float_to_bfloat16(x) : float_to_half(x);
}

void put_code(const PageLayout& layout, uint8_t* page, Component component, int32_t slot,
              int32_t dim, uint32_t code) {
  const TileLayout& tile = layout.tile(component);
  const CodePosition at = code_position(tile, component, slot % kTileTokens, dim);
  uint8_t* word_bytes = page + layout.tile_codes_byte(component, slot / kTileTokens) + at.byte;
  uint32_t word;
  std::memcpy(&word, word_bytes, 4);
  word &= ~(((1u << tile.type.bits()) - 1) << at.bit);
  word |= code << at.bit;
  std::memcpy(word_bytes, &word, 4);
}

// A page and its layout, with the format's rules.
struct Page {
  const PageLayout& layout;
  const TierFormat& format;
  uint8_t* bytes;
};

void put_vector(const Page& to, Component component, int32_t slot, const std::vector<float>& x,
                DType dtype) {
  const PageLayout& layout = to.layout;
  uint8_t* page = to.bytes;
  const int32_t bits = layout.tile(component).type.bits();
  if (bits == 16) {
    for (int32_t d = 0; d < layout.head_dim(); ++d) {
      put_code(layout, page, component, slot, d, bits_of_value(x[d], dtype));
    }
    return;
  }
  QuantParams params;
  std::vector<uint8_t> codes(x.size());
  const auto dims = static_cast<int32_t>(x.size());
  (void)(to.format.of(component).step_rule == StepRule::kNorm
             ? quantize_norm(x.data(), dims, &params, codes.data())
             : quantize_minmax(x.data(), dims, 1, 1 << bits, &params, codes.data()));
  for (int32_t d = 0; d < layout.head_dim(); ++d) {
    put_code(layout, page, component, slot, d, codes[d]);
  }
  uint8_t* metadata = page + layout.tile_metadata_byte(component, slot / kTileTokens) +
                      token_metadata_byte(0, slot % kTileTokens);
  std::memcpy(metadata, &params.scale, 2);
  std::memcpy(metadata + 2, &params.zero_point, 2);
}

// Keys with a few large channels, values with a spread of ranges: what min-max quantisation meets.
struct TokenSource {
  std::mt19937_64& rng;
  std::normal_distribution<float> normal;

  std::vector<float> next(int32_t head_dim, double scale, bool outliers) {
    std::vector<float> x(head_dim);
    const double spread = scale * std::exp2(0.5 * normal(rng));
    for (int32_t d = 0; d < head_dim; ++d) {
      const double offset = outliers && d % 32 == 5 ? 4.0 * scale : 0.0;
      x[d] = static_cast<float>(std::clamp(spread * normal(rng) + offset, -6e4, 6e4));
    }
    return x;
  }
};

int32_t row_tokens_of(const WorldShape& shape, int32_t sequence, size_t tier,
                      std::mt19937_64& rng) {
  const int32_t tokens = shape.tokens[sequence][tier];
  if (shape.jitter == 0 || tokens == 0) return tokens;
  return std::max(
      0, tokens + std::uniform_int_distribution<int32_t>(-shape.jitter, shape.jitter)(rng));
}

// Layouts of the tiers of a class.
std::vector<PageLayout> layouts_of(const AttentionConfig& config, int32_t head_class) {
  std::vector<PageLayout> layouts;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    layouts.push_back(*tier_layout(config, t, head_class));
  }
  return layouts;
}

void fill_table_shape(const WorldShape& shape, const AttentionConfig& config,
                      PageTableShape& table) {
  const std::vector<PageLayout> layouts = layouts_of(config, 0);
  table.num_sequences = static_cast<int32_t>(shape.tokens.size());
  table.rows_per_sequence = shape.num_layers * shape.num_kv_heads;
  table.num_sides = 0;
  for (size_t t = 0; t < layouts.size(); ++t) {
    const int32_t side = shape.tiers[t].side;
    table.num_sides = std::max(table.num_sides, side + 1);
    table.tokens_per_page[side] = layouts[t].tokens;
    int32_t most = 1;
    for (const auto& sequence : shape.tokens) {
      for (int32_t c = 0; c < config.classes.count; ++c) {
        const int32_t of_page = tier_layout(config, static_cast<int32_t>(t), c)->tokens;
        most = std::max(most, ceil_div(sequence[t] + shape.jitter, of_page));
      }
    }
    table.table_slots[side / 2] += most + 1;
  }
}

}  // namespace

PageView World::pages() {
  const auto start = reinterpret_cast<uintptr_t>(pool_bytes.data());
  const auto aligned = (start + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
  return {pool_bytes.data() + (aligned - start), config.page_bytes, num_pages};
}

AttendCall World::call() {
  AttendCall call;
  call.table = table();
  call.pages = pages();
  call.batch = {nullptr, sequences()};
  call.q = q.data();
  call.tail = tail;
  call.sinks = sinks.empty() ? nullptr : sinks.data();
  return call;
}

World make_world(const WorldShape& shape, std::mt19937_64& rng) {
  World w;
  AttentionConfig& config = w.config;
  w.newest = shape.newest;
  w.tail = shape.tail;
  if (!w.newest.empty()) w.tail.newest = w.newest.data();
  config.num_layers = shape.num_layers;
  config.num_kv_heads = shape.num_kv_heads;
  config.num_q_heads = shape.num_kv_heads * shape.group;
  config.head_dim = shape.head_dim;
  config.q_len = shape.q_len;
  config.dtype = shape.dtype;
  config.sm_scale =
      shape.sm_scale != 0 ? shape.sm_scale : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
  config.num_tiers = static_cast<int32_t>(shape.tiers.size());
  std::copy(shape.tiers.begin(), shape.tiers.end(), config.tiers);
  config.page_bytes = shape.page_bytes;
  config.page_records = shape.page_records;
  config.classes.count = 1 + static_cast<int32_t>(shape.classes.size());
  for (size_t c = 0; c < shape.classes.size(); ++c) {
    std::copy(shape.classes[c].begin(), shape.classes[c].end(), config.classes.format[c]);
  }
  for (int32_t i = 0; i < shape.num_layers * shape.num_kv_heads; ++i) {
    w.head_classes.push_back(static_cast<uint8_t>(rng() % config.classes.count));
  }
  config.classes.of_head = w.head_classes.data();
  if (config.page_bytes == 0) {
    std::vector<TierFormat> formats;
    for (int32_t c = 0; c < config.classes.count; ++c) {
      for (int32_t t = 0; t < config.num_tiers; ++t) formats.push_back(tier_format(config, t, c));
    }
    PageSizing sizing;
    sizing.records = shape.page_records;
    config.page_bytes = choose_page_size(formats, shape.head_dim, sizing)->page_bytes;
  }
  std::vector<std::vector<PageLayout>> class_layouts;
  for (int32_t c = 0; c < config.classes.count; ++c) class_layouts.push_back(layouts_of(config, c));
  fill_table_shape(shape, config, w.table_shape);

  const int32_t rows = w.table_shape.num_rows();
  const auto class_of = [&](int32_t row) {
    return w.head_classes[row % w.table_shape.rows_per_sequence];
  };
  w.slots.assign(static_cast<size_t>(rows) * w.table_shape.row_stride(), kNoPage);
  w.tokens.assign(rows, {});
  w.num_pages = 3;  // some belong to nobody
  for (int32_t row = 0; row < rows; ++row) {
    const std::vector<PageLayout>& layouts = class_layouts[class_of(row)];
    for (size_t t = 0; t < layouts.size(); ++t) {
      const int32_t tokens = row_tokens_of(shape, row / w.table_shape.rows_per_sequence, t, rng);
      w.tokens[row].of[shape.tiers[t].side] = tokens;
      w.num_pages += ceil_div(tokens, layouts[t].tokens);
    }
  }
  w.pool_bytes.assign(w.num_pages * config.page_bytes + kPageAlignment, 0xff);
  std::vector<int32_t> free_pages(w.num_pages);
  std::iota(free_pages.begin(), free_pages.end(), 0);
  std::shuffle(free_pages.begin(), free_pages.end(), rng);

  TokenSource source{rng, {}};
  for (int32_t row = 0; row < rows; ++row) {
    int32_t first = 0;  // token of the tier
    const std::vector<PageLayout>& layouts = class_layouts[class_of(row)];
    for (size_t t = 0; t < layouts.size(); ++t) {
      const int32_t side = shape.tiers[t].side;
      for (int32_t i = 0; i < w.tokens[row].of[side]; ++i) {
        int32_t& slot = w.slots[static_cast<int64_t>(row) * w.table_shape.row_stride() +
                                w.table_shape.slot_of(side, i / layouts[t].tokens)];
        if (i % layouts[t].tokens == 0) {
          slot = free_pages.back();
          free_pages.pop_back();
        }
        uint8_t* page = w.pages().base + slot * config.page_bytes;
        const auto token = [&](const std::vector<float>& given, double scale, bool outliers) {
          if (given.empty()) return source.next(shape.head_dim, scale, outliers);
          const size_t tokens = given.size() / shape.num_kv_heads / shape.head_dim;
          const auto from = given.begin() + (row * tokens + first + i) * shape.head_dim;
          return std::vector<float>(from, from + shape.head_dim);
        };
        const Page to{layouts[t], tier_format(config, static_cast<int32_t>(t), class_of(row)),
                      page};
        put_vector(to, Component::kKey, i % layouts[t].tokens,
                   token(shape.keys, shape.key_scale, true), shape.dtype);
        put_vector(to, Component::kValue, i % layouts[t].tokens,
                   token(shape.values, shape.value_scale, false), shape.dtype);
      }
      first += w.tokens[row].of[side];
    }
  }
  std::normal_distribution<float> normal;
  for (int32_t h = 0; shape.sink_scale != 0 && h < config.num_q_heads; ++h) {
    const bool none = std::bernoulli_distribution(0.1)(rng);
    w.sinks.push_back(none ? -INFINITY : static_cast<float>(shape.sink_scale) * normal(rng));
  }
  w.q.resize(static_cast<size_t>(w.sequences()) * config.q_len * config.num_q_heads *
             config.head_dim);
  const auto scale = static_cast<float>(shape.query_scale);
  for (size_t i = 0; i < w.q.size(); ++i) {
    const float x = shape.queries.empty() ? scale * normal(rng) : shape.queries[i];
    w.q[i] = bits_of_value(x, shape.dtype);
  }
  return w;
}

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace tierkv::test
