// What a basis and what keys per channel are worth: the attention error of stores with every token
// outside the window in the low tier, on a real cache, with Hadamard and without, and of stores of
// channel blocks.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "codec/element.h"
#include "datasets/dump.h"
#include "tierkv/store.h"

namespace tierkv::testing {
namespace {

using datasets::DumpReader;
using datasets::RowData;

// Prompts that end with one of the dumped queries.
constexpr int32_t kPrompts = 4, kApart = 40;

struct LayerRows {
  std::vector<RowData> k, v;  // [num_kv_heads]
  std::vector<float> q;       // [num_q_heads, queries, head_dim]
  std::vector<int32_t> positions;
};

LayerRows read_layer(const DumpReader& dump, int32_t layer) {
  const CacheLayout& layout = dump.info().layout;
  LayerRows rows;
  for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
    rows.k.emplace_back();
    rows.v.emplace_back();
    EXPECT_TRUE(dump.read_row(0, layer, h, Component::kKey, &rows.k.back()));
    EXPECT_TRUE(dump.read_row(0, layer, h, Component::kValue, &rows.v.back()));
  }
  EXPECT_TRUE(dump.read_queries(0, layer, 0, layout.num_q_heads, &rows.q));
  EXPECT_TRUE(dump.read_query_positions(0, layer, &rows.positions));
  return rows;
}

// fp16 [tokens, num_kv_heads, head_dim], as append() takes them.
std::vector<uint16_t> interleaved(const std::vector<RowData>& rows, int32_t tokens) {
  std::vector<uint16_t> x;
  for (int32_t t = 0; t < tokens; ++t) {
    for (const RowData& row : rows) {
      for (int32_t d = 0; d < row.head_dim; ++d) {
        x.push_back(float_to_half(
            load_element(row.bytes.data(), row.dtype, int64_t{t} * row.head_dim + d)));
      }
    }
  }
  return x;
}

// norm(out - exact) / norm(exact) of one query head, exact attention in double.
double relative_error(const CacheLayout& layout, const RowData& k, const RowData& v,
                      const uint16_t* q, const uint16_t* out, int32_t tokens) {
  const int32_t dim = layout.head_dim;
  std::vector<double> p(tokens), exact(dim, 0.0);
  double most = -INFINITY, sum = 0, error = 0, size = 0;
  for (int32_t t = 0; t < tokens; ++t) {
    double logit = 0;
    for (int32_t d = 0; d < dim; ++d) {
      logit += static_cast<double>(half_to_float(q[d])) *
               load_element(k.bytes.data(), k.dtype, int64_t{t} * dim + d);
    }
    p[t] = logit * layout.sm_scale;
    most = std::max(most, p[t]);
  }
  for (double& x : p) sum += x = std::exp(x - most);
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < dim; ++d) {
      exact[d] += p[t] / sum * load_element(v.bytes.data(), v.dtype, int64_t{t} * dim + d);
    }
  }
  for (int32_t d = 0; d < dim; ++d) {
    error += std::pow(half_to_float(out[d]) - exact[d], 2);
    size += exact[d] * exact[d];
  }
  return std::sqrt(error / size);
}

KvStoreConfig config_of(const CacheLayout& layout, int32_t v_bits, bool rotated) {
  KvStoreConfig c;
  c.layout = layout;
  c.layout.dtype = DType::kFloat16;
  c.low_format = token_wise_tier(4, v_bits);
  c.policy.alpha_high = 2;  // tokens that nobody scores are low
  c.num_pages = 400;
  c.max_sequences = 1;
  c.max_tokens = 1024;
  if (rotated) c.basis = std::make_shared<const CacheBasis>(CacheBasis::hadamard(c.layout));
  return c;
}

// Everything but a raw window, token-wise or in channel blocks.
KvStoreConfig raw_window_config(const CacheLayout& layout, int32_t bits) {
  KvStoreConfig c = config_of(layout, bits, false);
  c.low_format = token_wise_tier(bits, bits);
  c.window_format = raw_tier();
  c.num_pages = 2000;
  return c;
}
KvStoreConfig channel_config(const CacheLayout& layout, int32_t bits) {
  KvStoreConfig c;
  c.layout = layout;
  c.layout.dtype = DType::kFloat16;
  c.policy.window_tokens = 32;  // raw: 32 to 95 tokens, as many as 64 in the mean
  c.channel.enabled = true;
  c.channel.k_bits = c.channel.v_bits = bits;
  c.num_pages = 2000;
  c.max_sequences = 1;
  c.max_tokens = 1024;
  return c;
}

// The mean over layers, query heads and prompts.
double store_error(const DumpReader& dump, const KvStoreConfig& config) {
  const CacheLayout& layout = config.layout;
  const int32_t dim = layout.head_dim, heads = layout.num_q_heads;
  double sum = 0;
  for (int32_t i = 0; i < kPrompts; ++i) {
    const Result<std::unique_ptr<KvStore>> store = KvStore::create(config);
    EXPECT_TRUE(store.is_ok()) << store.status().message();
    const SequenceId id = *(*store)->add_sequence();
    const SequenceList list = {&id, 1};
    std::vector<LayerRows> layers;
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      layers.push_back(read_layer(dump, layer));
    }
    const size_t at = layers[0].positions.size() - 1 - static_cast<size_t>(i) * kApart;
    const int32_t tokens = layers[0].positions[at] + 1;
    EXPECT_TRUE((*store)->begin_prompt(list, tokens));
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      const std::vector<uint16_t> k = interleaved(layers[layer].k, tokens);
      const std::vector<uint16_t> v = interleaved(layers[layer].v, tokens);
      EXPECT_TRUE((*store)->append({list, layer, tokens, k.data(), v.data()}));
    }
    EXPECT_TRUE((*store)->end_prompt(list));
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      const LayerRows& rows = layers[layer];
      std::vector<uint16_t> q(heads * dim), out(heads * dim);
      for (int32_t h = 0; h < heads; ++h) {
        for (int32_t d = 0; d < dim; ++d) {
          q[h * dim + d] = float_to_half(rows.q[(h * rows.positions.size() + at) * dim + d]);
        }
      }
      AttendRequest request;
      request.sequences = list;
      request.layer = layer;
      request.q = q.data();
      request.out = out.data();
      EXPECT_TRUE((*store)->attend(request));
      for (int32_t h = 0; h < heads; ++h) {
        const int32_t kv = h / layout.group_size();
        sum += relative_error(layout, rows.k[kv], rows.v[kv], &q[h * dim], &out[h * dim], tokens);
      }
    }
  }
  return sum / (kPrompts * layout.num_layers * heads);
}

TEST(StoreBasisError, HadamardLowersTheErrorOfFourBits) {
  const auto dump = DumpReader::open(std::string(TIERKV_SOURCE_DIR) + "/datasets/sample_1k.h5");
  ASSERT_TRUE(dump.is_ok()) << dump.status().message();
  for (const int32_t v_bits : {4, 2}) {
    const double plain = store_error(*dump, config_of(dump->info().layout, v_bits, false));
    const double rotated = store_error(*dump, config_of(dump->info().layout, v_bits, true));
    std::printf("k4v%d: attention error %.4f, with hadamard %.4f\n", v_bits, plain, rotated);
    EXPECT_LT(rotated, 0.95 * plain);
    EXPECT_GT(plain, 0);
  }
}

TEST(StoreBasisError, ChannelWiseKeysLowerIt) {
  const auto dump = DumpReader::open(std::string(TIERKV_SOURCE_DIR) + "/datasets/sample_1k.h5");
  ASSERT_TRUE(dump.is_ok()) << dump.status().message();
  for (const int32_t bits : {4, 2}) {
    const double token = store_error(*dump, raw_window_config(dump->info().layout, bits));
    const double channel = store_error(*dump, channel_config(dump->info().layout, bits));
    std::printf("%d bits: attention error %.4f, keys per channel %.4f\n", bits, token, channel);
    EXPECT_LT(channel, token);
  }
}

}  // namespace
}  // namespace tierkv::testing
