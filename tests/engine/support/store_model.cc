// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/support/store_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <variant>

#include "codec/format/channel_block.h"
#include "codec/format/element.h"
#include "codec/format/weighted_step.h"
#include "tests/engine/support/rounded_log.h"
#include "tests/support/plain_weighted_rows.h"

namespace tierkv::model {

CodedModel::CodedModel(const StoreConfig& config)
    : config_(config), has_books_(config.layout.num_layers) {
  if (const auto* channel = std::get_if<ChannelFormat>(&config.format)) {
    unit_ = block_ = channel->block_tokens;
    return;
  }
  const auto& format = std::get<CodedFormat>(config.format);
  unit_ = format.unit_tokens;
  const bool scales = config.profile != nullptr && !config.profile->key_sensitivity.empty() &&
                      !config.profile->rows[0].query_energy.empty();
  k_ = format.k != 0 ? format.k : scales ? 0.55 : 0.33;
  v_ = format.v != 0 ? format.v : scales ? 0.5 : 0.28;
  for (int32_t l = 0; l < config.layout.num_layers && !config.rope.empty(); ++l) {
    const Rope& rope = config.rope[config.rope.size() == 1 ? 0 : l];
    ropes_.push_back(*make_rope_table(rope, config.layout.head_dim, config.max_tokens + 64));
  }
}

bool CodedModel::is_raw(int32_t layer) const {
  return std::count(config_.raw_layers.begin(), config_.raw_layers.end(), layer) > 0;
}

Sequence CodedModel::empty() const {
  Sequence sequence(config_.layout.num_layers);
  for (Layer& layer : sequence) layer.rows.resize(config_.layout.num_kv_heads);
  return sequence;
}

// u is i times the significance of a prompt, or what was seen against the row's geometric mean, by
// tiles of 16 positions.
void CodedModel::decide(Row* row, int32_t first, int32_t end) const {
  for (int32_t p = first; p < end; ++p) {
    const Token& t = row->tokens[p];
    if (t.is_decided || t.from_prompt || t.count == 0) continue;
    const float seen = t.sum / static_cast<float>(t.count);  // 0 where a subnormal sum is halved
    if (seen <= 0) continue;
    row->log_sum += rounded_log(static_cast<double>(seen));
    ++row->seen;
  }
  const double mean = row->seen == 0 ? 1 : std::exp2(row->log_sum / row->seen);
  for (int32_t p = first; p < end; ++p) {
    Token& t = row->tokens[p];
    if (t.is_decided) continue;
    t.is_decided = true;
    if (t.from_prompt) {
      t.importance = static_cast<int8_t>(importance_exponent((p + 1.0) * t.sum));
    } else if (t.count > 0) {
      const float seen = t.sum / static_cast<float>(t.count);
      t.importance = static_cast<int8_t>(importance_exponent(static_cast<double>(seen) / mean));
    }
  }
}

void CodedModel::fit(Row* row, int32_t layer_index, int32_t kv_head, int32_t end) const {
  const int32_t sinks = config_.sink_tokens, dim = config_.layout.head_dim;
  std::vector<float> keys;
  for (int32_t p = sinks; p < std::min(end, 256); ++p) {
    for (const uint16_t x : row->tokens[p].k) keys.push_back(half_to_float(x));
  }
  WeightedFit fit;
  fit.k = k_;
  fit.v = v_;
  fit.sm_scale = config_.layout.sm_scale;
  std::vector<double> energy;
  std::vector<uint16_t> mean;
  if (config_.profile != nullptr) {
    const RowProfile& p = config_.profile->row(layer_index, kv_head);
    energy.assign(p.query_energy.begin(), p.query_energy.end());
    for (const float x : ropes_.empty() ? p.key_mean : p.key_mean_before_rope) {
      mean.push_back(float_to_half(x));
    }
    fit.key_scale = p.key_scale;
    fit.value_scale = p.value_scale;
    if (!energy.empty()) fit.query_energy = energy.data();
    if (!mean.empty()) fit.key_mean = mean.data();
  }
  const WeightedTokens tokens = {keys.data(), static_cast<int32_t>(keys.size()) / dim, sinks};
  const RopeTable* rope = ropes_.empty() ? nullptr : &ropes_[layer_index];
  row->weighted = *fit_weighted_row(fit, dim, tokens, rope);
}

void CodedModel::code(Row* row, int32_t position) const {
  Token& t = row->tokens[position];
  const int32_t dim = config_.layout.head_dim;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool key = c == Component::kKey;
    std::vector<float> x;
    for (const uint16_t h : key ? t.k : t.v) x.push_back(half_to_float(h));
    const WeightedTokens token = {x.data(), 1, position};
    int8_t exponent = 0;
    ASSERT_TRUE(reference::token_exponents(c, token, dim, &t.importance, &exponent));
    if (!key && t.has_value_exponent) exponent = t.value_exponent;
    if (!key) t.value_exponent = exponent;
    std::vector<int16_t> codes(dim);
    ASSERT_TRUE(reference::quantize_weighted(row->weighted, c, token, &exponent, codes.data()));
    std::vector<float>& to = key ? t.coded_k : t.coded_v;
    to.resize(dim);
    const WeightedSource source = {codes.data(), &exponent, 1, position};
    ASSERT_TRUE(reference::dequantize_weighted(row->weighted, c, source, to.data()));
  }
  t.has_value_exponent = true;
  t.is_coded = true;
}

// The first body token stands in the places of sinks.
void CodedModel::code_channel_block(Row* row, int32_t first) const {
  const auto& format = std::get<ChannelFormat>(config_.format);
  const int32_t dim = config_.layout.head_dim;
  const ChannelLayout layout = channel_layout(dim, format.k_bits, format.v_bits, unit_);
  std::vector<float> k, v;
  for (int32_t p = first; p < first + unit_; ++p) {
    const Token& t = row->tokens[std::max(p, config_.sink_tokens)];
    for (const uint16_t x : t.k) k.push_back(half_to_float(x));
    for (const uint16_t x : t.v) v.push_back(half_to_float(x));
  }
  std::vector<uint8_t> block(layout.bytes);
  encode_channel_block(layout, k.data(), v.data(), block.data());
  for (int32_t p = std::max(first, config_.sink_tokens); p < first + unit_; ++p) {
    Token& t = row->tokens[p];
    t.is_coded = true;
    t.coded_k.resize(dim);
    t.coded_v.resize(dim);
    for (int32_t d = 0; d < dim; ++d) {
      t.coded_k[d] = channel_value(layout, block.data(), Component::kKey, p - first, d);
      t.coded_v[d] = channel_value(layout, block.data(), Component::kValue, p - first, d);
    }
  }
}

void CodedModel::compress(Layer* layer, int32_t layer_index, int32_t tokens_after) {
  const int32_t left = tokens_after - config_.window_tokens;
  const int32_t before = layer->body_end;
  if (left < before + unit_) return;
  const int32_t end = left / unit_ * unit_;
  if (end <= config_.sink_tokens) return;
  layer->body_end = end;
  if (is_raw(layer_index)) return;
  if (std::holds_alternative<ChannelFormat>(config_.format)) {
    for (Row& row : layer->rows) {
      for (int32_t b = before; b < end; b += unit_) code_channel_block(&row, b);
    }
    return;
  }
  const int32_t sinks = config_.sink_tokens;
  for (Row& row : layer->rows) {
    for (int32_t b = before; b < end; b += 16) decide(&row, std::max(b, sinks), b + 16);
  }
  int32_t first = before;
  if (!layer->is_fixed) {
    bool ready = has_books_[layer_index] && config_.profile != nullptr;
    if (ready) {
      const RowProfile& p = config_.profile->row(layer_index, 0);
      ready = !p.query_energy.empty() &&
              !(ropes_.empty() ? p.key_mean : p.key_mean_before_rope).empty();
    }
    if (!ready && end < 256) return;
    for (size_t h = 0; h < layer->rows.size(); ++h) {
      fit(&layer->rows[h], layer_index, static_cast<int32_t>(h), end);
    }
    layer->is_fixed = true;
    has_books_[layer_index] = true;
    first = 0;
  }
  for (Row& row : layer->rows) {
    for (int32_t p = std::max(first, sinks); p < end; ++p) code(&row, p);
  }
}

void CodedModel::append(Layer* layer, int32_t layer_index, const NewTokens& added) {
  const int32_t dim = config_.layout.head_dim;
  const auto heads = static_cast<int32_t>(layer->rows.size());
  const int32_t end = layer->tokens() + added.tokens;
  for (int32_t t = 0; t < added.tokens; ++t) {
    for (int32_t h = 0; h < heads; ++h) {
      Token token;
      const int64_t at = (int64_t{t} * heads + h) * dim;
      for (int32_t d = 0; d < dim; ++d) {
        const auto half = [&](uint16_t x) {
          return float_to_half(raw_to_float(config_.layout.dtype, x));
        };
        token.k.push_back(half(added.k[at + d]));
        token.v.push_back(half(added.v[at + d]));
      }
      if (added.significance != nullptr) {
        token.from_prompt = end == added.tokens;
        token.count = token.from_prompt ? 0 : 1;
        token.sum = added.significance[h * added.stride + t];
      }
      layer->rows[h].tokens.push_back(token);
    }
  }
  compress(layer, layer_index, end);
  // What stays raw was seen by those of the chunk behind it.
  for (Row& row : layer->rows) {
    for (int32_t p = end - added.tokens; p < end; ++p) {
      Token& t = row.tokens[p];
      if (p < layer->body_end || added.significance == nullptr) continue;
      t.from_prompt = false;
      t.count = end - 1 - p;
      t.sum *= static_cast<float>(t.count);
    }
  }
}

void CodedModel::truncate(Sequence* sequence, int32_t tokens) const {
  if (tokens == 0) *sequence = empty();
  for (size_t l = 0; l < sequence->size(); ++l) {
    Layer& layer = (*sequence)[l];
    const int32_t before = layer.body_end;
    if (tokens < before) layer.body_end = tokens / block_ * block_;
    for (Row& row : layer.rows) {
      row.tokens.resize(tokens);
      for (int32_t p = std::max(layer.body_end, config_.sink_tokens); p < std::min(before, tokens);
           ++p) {
        Token& t = row.tokens[p];
        if (is_raw(static_cast<int32_t>(l)) ||
            std::holds_alternative<ChannelFormat>(config_.format)) {
          t.sum = 0;
          t.count = 0;
          t.from_prompt = false;
        }
        if (!t.is_coded) continue;
        t.is_coded = false;
        for (size_t d = 0; d < t.k.size(); ++d) {
          t.k[d] = float_to_half(saturate_to_half_range(t.coded_k[d]));
          t.v[d] = float_to_half(saturate_to_half_range(t.coded_v[d]));
        }
      }
    }
  }
}

void CodedModel::count_query(Row* row, int32_t body_end, int32_t position,
                             const float* probabilities) const {
  for (int32_t p = std::max(body_end, config_.sink_tokens); p < position; ++p) {
    Token& t = row->tokens[p];
    if (t.is_decided) continue;
    t.sum += probabilities[p];
    ++t.count;
  }
}

float CodedModel::key(const Row& row, int32_t position, int32_t d) const {
  const Token& t = row.tokens[position];
  return t.is_coded ? t.coded_k[d] : half_to_float(t.k[d]);
}
float CodedModel::value(const Row& row, int32_t position, int32_t d) const {
  const Token& t = row.tokens[position];
  return t.is_coded ? t.coded_v[d] : half_to_float(t.v[d]);
}

}  // namespace tierkv::model
