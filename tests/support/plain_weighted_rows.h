// SPDX-License-Identifier: Apache-2.0
// The functions of codec/host/coded/weighted_rows.h one value at a time, with the same bits.
#pragma once

#include <vector>

#include "codec/format/weighted_step.h"
#include "codec/host/coded/weighted_rows_checks.h"
#include "tierkv/half.h"

namespace tierkv::reference {

inline void redo_rope(const RopeTable& rope, int64_t position, float* key) {
  for (int32_t i = 0; i < rope.pairs; ++i) {
    turn_pair(rope.at(position, i), key + pair_first(rope.pairing, i),
              key + pair_second(rope.pairing, rope.pairs, i));
  }
}

inline Status token_exponents(Component component, const WeightedTokens& tokens, int32_t head_dim,
                              const int8_t* importance, int8_t* exponents) {
  if (Status s = check_importance(tokens, head_dim, importance); !s) return s;
  CodeFaults faults;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    const float* x = tokens.x + int64_t{t} * head_dim;
    int32_t e = importance == nullptr ? 0 : importance[t];
    if (component == Component::kValue) {
      for (int32_t d = 0; d < head_dim; ++d) faults.non_finite |= !is_finite(x[d]);
      e = value_exponent(sum_of_squares(x, head_dim), head_dim, e);
    }
    exponents[t] = static_cast<int8_t>(e);
  }
  return faults.status();
}

inline Status quantize_weighted(const WeightedRow& row, Component component,
                                const WeightedTokens& tokens, const int8_t* exponents,
                                int16_t* codes) {
  const WeightedSource shape{codes, exponents, tokens.tokens, tokens.first_position};
  if (Status s = check_weighted_source(row, component, shape, tokens.x); !s) return s;
  const ChannelScales channels(row, component);
  CodeFaults faults;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    const float* from = tokens.x + int64_t{t} * row.head_dim;
    std::vector<float> x(from, from + row.head_dim);
    for (const float value : x) faults.non_finite |= !is_finite(value);
    if (channels.rope != nullptr) undo_rope(*channels.rope, tokens.first_position + t, x.data());
    for (size_t d = 0; d < x.size(); ++d) {
      const float c =
          weighted_code(x[d], channels.mean[d], channels.scale[d], exponent_factor(exponents[t]));
      faults.out_of_range |= !is_code(c);
      *codes++ = is_code(c) ? static_cast<int16_t>(c) : int16_t{0};
    }
  }
  return faults.status();
}

inline Status dequantize_weighted(const WeightedRow& row, Component component,
                                  const WeightedSource& source, float* x) {
  if (Status s = check_weighted_source(row, component, source, x); !s) return s;
  const ChannelScales channels(row, component);
  const int16_t* code = source.codes;
  for (int32_t t = 0; t < source.tokens; ++t, x += row.head_dim) {
    for (size_t d = 0; d < channels.scale.size(); ++d) {
      x[d] = weighted_value(*code++, channels.mean[d], channels.scale[d],
                            exponent_factor(source.exponents[t]));
    }
    if (channels.rope != nullptr) redo_rope(*channels.rope, source.first_position + t, x);
  }
  return Status::ok();
}

}  // namespace tierkv::reference
