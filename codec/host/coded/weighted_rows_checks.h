// SPDX-License-Identifier: Apache-2.0
// What both forms of codec/host/coded/weighted_rows.h ask of their arguments, and what they share.
#pragma once

#include <algorithm>
#include <vector>

#include "codec/host/coded/weighted_rows.h"

namespace tierkv {

// kInvalidArgument for null arrays, negative sizes and exponents that a key cannot have;
// kOutOfRange for positions beyond the RoPE table.
Status check_weighted_source(const WeightedRow& row, Component component,
                             const WeightedSource& source, const float* x);
// kInvalidArgument for a shape that is not there or an importance exponent outside -8 to 4.
Status check_importance(const WeightedTokens& tokens, int32_t head_dim, const int8_t* importance);

// Scale and mean of every channel, and the rotation of a key; null for values.
struct ChannelScales {
  std::vector<float> scale, mean;  // [head_dim]
  const RopeTable* rope = nullptr;

  ChannelScales(const WeightedRow& row, Component component);
};

// What is wrong with the codes of a batch.
struct CodeFaults {
  bool non_finite = false, out_of_range = false;
  Status status() const;
};

// The loops over tokens that both forms have, around what each form does with one token.

// token_sum(x, head_dim, &non_finite): sum_of_squares().
template <class TokenSum>
Status find_token_exponents(Component component, const WeightedTokens& tokens, int32_t head_dim,
                            const int8_t* importance, int8_t* exponents,
                            const TokenSum& token_sum) {
  if (Status s = check_importance(tokens, head_dim, importance); !s) return s;
  CodeFaults faults;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    int32_t e = importance == nullptr ? 0 : importance[t];
    if (component == Component::kValue) {
      const float* x = tokens.x + int64_t{t} * head_dim;
      e = value_exponent(token_sum(x, head_dim, &faults.non_finite), head_dim, e);
    }
    exponents[t] = static_cast<int8_t>(e);
  }
  return faults.status();
}

// quantize_one(channels, position, factor, x, codes, &faults) may change x.
template <class QuantizeOne>
Status quantize_tokens(const WeightedRow& row, Component component, const WeightedTokens& tokens,
                       const int8_t* exponents, int16_t* codes, const QuantizeOne& quantize_one) {
  const WeightedSource shape{codes, exponents, tokens.tokens, tokens.first_position};
  if (Status s = check_weighted_source(row, component, shape, tokens.x); !s) return s;
  const ChannelScales channels(row, component);
  std::vector<float> token(static_cast<size_t>(row.head_dim));
  CodeFaults faults;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    const int64_t at = int64_t{t} * row.head_dim;
    std::copy_n(tokens.x + at, row.head_dim, token.data());
    quantize_one(channels, tokens.first_position + t, exponent_factor(exponents[t]), token.data(),
                 codes + at, &faults);
  }
  return faults.status();
}

// dequantize_one(channels, position, factor, codes, x).
template <class DequantizeOne>
Status dequantize_tokens(const WeightedRow& row, Component component, const WeightedSource& source,
                         float* x, const DequantizeOne& dequantize_one) {
  if (Status s = check_weighted_source(row, component, source, x); !s) return s;
  const ChannelScales channels(row, component);
  for (int32_t t = 0; t < source.tokens; ++t) {
    const int64_t at = int64_t{t} * row.head_dim;
    dequantize_one(channels, source.first_position + t, exponent_factor(source.exponents[t]),
                   source.codes + at, x + at);
  }
  return Status::ok();
}

namespace reference {

// A key [head_dim] before RoPE, in place, and after it again.
void undo_rope(const RopeTable& rope, int64_t position, float* key);
void redo_rope(const RopeTable& rope, int64_t position, float* key);
// One token, as the loops above take it.
float token_sum(const float* x, int32_t dims, bool* non_finite);
void quantize_one(const ChannelScales& channels, int64_t position, float factor, float* x,
                  int16_t* codes, CodeFaults* faults);
void dequantize_one(const ChannelScales& channels, int64_t position, float factor,
                    const int16_t* codes, float* x);

}  // namespace reference

}  // namespace tierkv
