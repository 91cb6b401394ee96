// SPDX-License-Identifier: Apache-2.0
// The functions of codec/host/coded/weighted_rows.h in their plain forms.
#pragma once

#include "codec/host/coded/weighted_rows_checks.h"

namespace tierkv::reference {

inline Status token_exponents(Component component, const WeightedTokens& tokens, int32_t head_dim,
                              const int8_t* importance, int8_t* exponents) {
  return find_token_exponents(component, tokens, head_dim, importance, exponents, token_sum);
}
inline Status quantize_weighted(const WeightedRow& row, Component component,
                                const WeightedTokens& tokens, const int8_t* exponents,
                                int16_t* codes) {
  return quantize_tokens(row, component, tokens, exponents, codes, quantize_one);
}
inline Status dequantize_weighted(const WeightedRow& row, Component component,
                                  const WeightedSource& source, float* x) {
  return dequantize_tokens(row, component, source, x, dequantize_one);
}

}  // namespace tierkv::reference
