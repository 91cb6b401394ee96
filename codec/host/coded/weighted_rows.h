// SPDX-License-Identifier: Apache-2.0
// The format `coded` with weighted steps, on the host: rows of keys and values to codes and
// exponents, and back. docs/reference/format.md, "Weighted steps", has the laws;
// codec/format/weighted_step.h has them as code that kernels share.
//
// A caller with a prompt does, for each (layer, kv_head):
//   1. fit_weighted_row() on the first 256 body tokens: means and steps;
//   2. importance_exponent() of each token whose significance is known;
//   3. token_exponents() and quantize_weighted(): exponents and codes, any number of tokens;
//   4. choose_books() (codec/host/coded/weighted_books.h) over the codes of a layer: the family;
//   5. encode_block() (codec/host/coded/coded_block.h) for every 64 positions.
// Reading goes through decode_block() and dequantize_weighted().
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/rope_turn.h"
#include "tierkv/format.h"
#include "tierkv/rope.h"
#include "tierkv/status.h"

namespace tierkv {

// What fixes the codes of one row: one (sequence, layer, kv_head).
struct WeightedRow {
  int32_t head_dim = 0;
  float key_step = 0;               // S of keys, positive and finite; head scale included
  float value_step = 0;             // S of values: relative to the root mean square of a token
  std::vector<uint16_t> key_mean;   // [head_dim] fp16 before RoPE; empty: zeros
  std::vector<float> key_weight;    // [head_dim], positive; empty: ones
  const RopeTable* rope = nullptr;  // covers the positions used; null: keys are not rotated

  // kInvalidArgument with the field.
  Status validate() const;
};

// Tokens of one row and component, one after the other: x [tokens, head_dim], keys as the model
// stores them (after RoPE).
struct WeightedTokens {
  const float* x = nullptr;
  int32_t tokens = 0;
  int64_t first_position = 0;  // of x[0] in the sequence; keys only
};

// e of each token. Keys: G. Values: clamp(R + G, -128, 127), -128 for a token of zeros. importance:
// [tokens], G of each; null: 0. kNonFinite for NaN or infinity in values; kInvalidArgument for a G
// outside -8 to 4.
Status token_exponents(Component component, const WeightedTokens& tokens, int32_t head_dim,
                       const int8_t* importance, int8_t* exponents);

// codes: [tokens, head_dim]. kNonFinite for NaN or infinity, kOutOfRange for a code beyond 16 bits
// or a position beyond the RoPE table; the codes are then not defined.
Status quantize_weighted(const WeightedRow& row, Component component, const WeightedTokens& tokens,
                         const int8_t* exponents, int16_t* codes);

// The tokens that codes stand for. Keys are rotated to their positions again.
struct WeightedSource {
  const int16_t* codes = nullptr;     // [tokens, head_dim]
  const int8_t* exponents = nullptr;  // [tokens]
  int32_t tokens = 0;
  int64_t first_position = 0;
};
// x: [tokens, head_dim]. kOutOfRange for a position beyond the RoPE table.
Status dequantize_weighted(const WeightedRow& row, Component component,
                           const WeightedSource& source, float* x);

// How large steps are. k of keys: the deviation of a logit with query energies, k' without. v of
// values: a share of the token.
struct StepSizes {
  double k, v;
};
// The defaults: with head scales, and without.
inline constexpr StepSizes kProfileSteps = {0.55, 0.5}, kOwnSteps = {0.33, 0.28};

// How steps and means are found. Everything is optional but head_dim, k and v.
struct WeightedFit {
  double k = kProfileSteps.k, v = kProfileSteps.v;
  double key_scale = 1, value_scale = 1;  // head scales a
  double sm_scale = 0;                    // 0: 1 / sqrt(head_dim)
  const double* query_energy = nullptr;   // [head_dim] mean squared query before RoPE; null: none
  const uint16_t* key_mean = nullptr;     // [head_dim] fp16 of a profile; null: of the tokens given
};

// The row's weights, means and steps. keys: the row's first body tokens (256 where there are as
// many), read for the means without a profile and for the step without query energies. rope may be
// null. kNonFinite, kOutOfRange (a mean beyond fp16), kInvalidArgument.
Result<WeightedRow> fit_weighted_row(const WeightedFit& fit, int32_t head_dim,
                                     const WeightedTokens& keys, const RopeTable* rope);

}  // namespace tierkv
