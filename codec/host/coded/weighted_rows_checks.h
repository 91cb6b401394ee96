// SPDX-License-Identifier: Apache-2.0
// What the functions of codec/host/coded/weighted_rows.h ask of their arguments, and what they
// share.
#pragma once

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

// A key [head_dim] before RoPE, in place.
void undo_rope(const RopeTable& rope, int64_t position, float* key);

}  // namespace tierkv
