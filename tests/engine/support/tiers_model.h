// SPDX-License-Identifier: Apache-2.0
// What a store of tiers must hold, by definition: every token of every row by itself, with its tier
// and what its codes stand for. It shares the codec's arithmetic of single tokens and the bases
// with the store, and nothing of pages, maps or places.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "codec/format/element.h"
#include "codec/format/quantize.h"
#include "codec/format/same_log.h"
#include "codec/policy/profile.h"
#include "tests/engine/support/rounded_log.h"
#include "tierkv/basis.h"
#include "tierkv/kv_store.h"

namespace tierkv::model {

enum class Fate { kRaw, kHigh, kLow, kPruned };

struct TiersToken {
  std::vector<float> k, v;  // fp16 values; of the body what is read
  bool is_known = false;    // a prompt's significance
  float sum = 0;            // of what counted queries gave it, or that significance times count
  int32_t count = 0;
  Fate fate = Fate::kRaw;
};
struct TiersModelRow {
  std::vector<TiersToken> tokens;
  double log_sum = 0;
  int32_t seen = 0;
};
struct TiersLayer {
  std::vector<TiersModelRow> rows;  // [num_kv_heads]
  int32_t body_end = 0;
  int32_t tokens() const { return static_cast<int32_t>(rows[0].tokens.size()); }
};
using TiersSequence = std::vector<TiersLayer>;

// One sequence and layer of an append.
struct TiersAdded {
  const uint16_t *k = nullptr, *v = nullptr;  // [tokens, num_kv_heads, head_dim]
  const float* significance = nullptr;        // [num_kv_heads, tokens]
  int32_t tokens = 0;
};

class TiersModel {
 public:
  explicit TiersModel(const StoreConfig& config)
      : config_(config), format_(std::get<TiersFormat>(config.format)) {}

  TiersSequence empty() const {
    TiersSequence s(config_.layout.num_layers);
    for (TiersLayer& layer : s) layer.rows.resize(config_.layout.num_kv_heads);
    return s;
  }

  // What leaves the window once there are so many tokens; `added` are behind those of the layer.
  void compress(TiersLayer* layer, int32_t layer_index, int32_t tokens_after) const {
    const int32_t end = std::max(layer->body_end, tokens_after - config_.window_tokens);
    for (int32_t h = 0; h < config_.layout.num_kv_heads; ++h) {
      TiersModelRow* row = &layer->rows[h];
      for (int32_t p = std::max(layer->body_end, config_.sink_tokens); p < end; ++p) {
        decide(row, layer_index, h, p);
      }
    }
    layer->body_end = end;
  }

  void append(TiersLayer* layer, int32_t layer_index, const TiersAdded& added) const {
    const CacheLayout& shape = config_.layout;
    const int32_t before = layer->tokens(), after = before + added.tokens;
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      for (int32_t t = 0; t < added.tokens; ++t) {
        TiersToken token;
        const int64_t at = (int64_t{t} * shape.num_kv_heads + h) * shape.head_dim;
        for (int32_t d = 0; d < shape.head_dim; ++d) {
          token.k.push_back(rounded(load_element(added.k, shape.dtype, at + d)));
          token.v.push_back(rounded(load_element(added.v, shape.dtype, at + d)));
        }
        if (added.significance != nullptr) {
          token.is_known = before == 0;
          token.count = token.is_known ? 0 : 1;
          token.sum = added.significance[h * added.tokens + t];
        }
        layer->rows[h].tokens.push_back(std::move(token));
      }
    }
    compress(layer, layer_index, after);
    // What stays raw was seen by those of the chunk behind it.
    for (TiersModelRow& row : layer->rows) {
      for (int32_t p = before; p < after; ++p) {
        TiersToken& token = row.tokens[p];
        if (token.fate != Fate::kRaw || added.significance == nullptr) continue;
        token.is_known = false;
        token.count = after - 1 - p;
        token.sum *= static_cast<float>(token.count);
      }
    }
  }

  void truncate(TiersSequence* sequence, int32_t tokens) const {
    if (tokens == 0) *sequence = empty();
    for (TiersLayer& layer : *sequence) {
      for (TiersModelRow& row : layer.rows) row.tokens.resize(tokens);
      layer.body_end = std::min(layer.body_end, tokens);
    }
  }

  // probabilities: of the query at `position` for the positions before it.
  void count_query(TiersModelRow* row, int32_t body_end, int32_t position,
                   const float* probabilities) const {
    for (int32_t p = std::max(body_end, config_.sink_tokens); p < position; ++p) {
      row->tokens[p].sum += probabilities[p];
      ++row->tokens[p].count;
    }
  }

  bool is_raw(int32_t layer) const {
    return std::count(config_.raw_layers.begin(), config_.raw_layers.end(), layer) > 0;
  }

 private:
  static float rounded(float x) { return half_to_float(float_to_half(x)); }

  const TierClass& class_of(int32_t layer, int32_t kv_head) const {
    if (format_.class_of_head.empty()) return format_.classes[0];
    return format_.classes[format_.class_of_head[layer * config_.layout.num_kv_heads + kv_head]];
  }

  void decide(TiersModelRow* row, int32_t layer, int32_t kv_head, int32_t position) const {
    TiersToken& token = row->tokens[position];
    if (is_raw(layer)) {
      token.fate = Fate::kHigh;
      return;
    }
    const TierClass& c = class_of(layer, kv_head);
    double u = 1;
    if (token.is_known) {
      u = (position + 1.0) * static_cast<double>(token.sum);
    } else if (token.count > 0) {
      const auto mean = static_cast<double>(token.sum / static_cast<float>(token.count));
      if (mean > 0) row->log_sum += rounded_log(mean), ++row->seen;
      u = mean > 0 ? mean / same_exp2(row->log_sum / row->seen) : 0;
    }
    token.fate = u >= c.alpha_high ? Fate::kHigh : u >= c.alpha_low ? Fate::kLow : Fate::kPruned;
    if (token.fate == Fate::kPruned) {
      std::fill(token.k.begin(), token.k.end(), 0.0f);
      std::fill(token.v.begin(), token.v.end(), 0.0f);
      return;
    }
    const TierFormat& tier = token.fate == Fate::kHigh ? c.high : c.low;
    const auto r = static_cast<size_t>(layer * config_.layout.num_kv_heads + kv_head);
    const Basis keys =
        config_.profile == nullptr
            ? Basis::hadamard(config_.layout.head_dim)
            : Basis::hadamard(config_.layout.head_dim, config_.profile->rows[r].key_mean);
    squeeze(tier.k, format_.rotate_keys ? &keys : nullptr, &token.k);
    const Basis values = Basis::hadamard(config_.layout.head_dim);
    squeeze(tier.v, format_.rotate_values ? &values : nullptr, &token.v);
  }

  void squeeze(const ComponentFormat& format, const Basis* basis, std::vector<float>* x) const {
    if (basis != nullptr) basis->apply(x->data(), 1);
    const auto dims = static_cast<int32_t>(x->size());
    QuantParams p;
    std::vector<uint8_t> codes(x->size());
    const StatusCode s =
        format.type.bits() == 2
            ? quantize_norm(x->data(), dims, &p, codes.data())
            : quantize_minmax(x->data(), dims, 1, format.type.levels(), &p, codes.data());
    if (s != StatusCode::kOk) std::abort();
    for (int32_t d = 0; d < dims; ++d) {
      (*x)[d] = dequantize(codes[d], half_to_float(p.scale), half_to_float(p.zero_point));
    }
    if (basis != nullptr) basis->undo(x->data(), 1);
  }

  const StoreConfig& config_;
  const TiersFormat& format_;
};

}  // namespace tierkv::model
