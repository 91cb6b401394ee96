// SPDX-License-Identifier: Apache-2.0
// The checks; the codes themselves are made and read in weighted_rows_simd.cc.
#include "codec/host/coded/weighted_rows.h"

#include <limits>
#include <string>

#include "codec/format/sound_halves.h"
#include "codec/host/coded/weighted_rows_checks.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "weighted steps: " + what);
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool positive(float x) {
  return is_finite(x) && x > 0;
}

Status check_tokens(int32_t head_dim, int32_t tokens, const void* x) {
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  if (tokens < 0) return invalid("tokens is negative");
  if (tokens > 0 && x == nullptr) return invalid("an array is null");
  return Status::ok();
}

}  // namespace

Status WeightedRow::validate() const {
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  if (!positive(key_step)) return invalid("key_step must be positive and finite");
  if (!positive(value_step)) return invalid("value_step must be positive and finite");
  const auto d = static_cast<size_t>(head_dim);
  if (!key_mean.empty() && key_mean.size() != d) return invalid("key_mean has another length");
  if (!key_weight.empty() && key_weight.size() != d)
    return invalid("key_weight has another length");
  // Without an early exit the loops are vectors.
  int32_t finite = 1, sound = 1;
  for (const uint16_t h : key_mean) finite &= is_finite_half(h) ? 1 : 0;
  if (finite == 0) return invalid("a key_mean is not finite");
  for (const float w : key_weight) {
    const float scale = dim_scale(key_step, w);
    sound &= (w > 0 ? 1 : 0) & (w < kInfinity ? 1 : 0) & (scale > 0 ? 1 : 0) &
             (scale < kInfinity ? 1 : 0);
  }
  if (sound == 0) return invalid("a key_weight is not positive and finite, or its step is not");
  if (rope != nullptr && 2 * rope->pairs > head_dim) return invalid("rope turns more dims");
  return Status::ok();
}

Status check_weighted_source(const WeightedRow& row, Component component,
                             const WeightedSource& source, const float* x) {
  if (Status s = row.validate(); !s) return s;
  if (Status s = check_tokens(row.head_dim, source.tokens, source.codes); !s) return s;
  if (Status s = check_tokens(row.head_dim, source.tokens, x); !s) return s;
  if (source.tokens == 0) return Status::ok();
  if (source.exponents == nullptr) return invalid("exponents is null");
  if (component != Component::kKey) return Status::ok();
  for (int32_t t = 0; t < source.tokens; ++t) {
    if (!is_importance_exponent(source.exponents[t])) {
      return invalid("a key's exponent is outside -8 to 4");
    }
  }
  if (row.rope == nullptr) return Status::ok();
  if (source.first_position < 0) return invalid("first_position is negative");
  if (source.first_position > row.rope->positions() - source.tokens) {
    return Status(StatusCode::kOutOfRange,
                  "weighted steps: the RoPE table has no position " +
                      std::to_string(source.first_position + source.tokens - 1));
  }
  return Status::ok();
}

Status check_importance(const WeightedTokens& tokens, int32_t head_dim, const int8_t* importance) {
  if (Status s = check_tokens(head_dim, tokens.tokens, tokens.x); !s) return s;
  for (int32_t t = 0; importance != nullptr && t < tokens.tokens; ++t) {
    if (!is_importance_exponent(importance[t])) {
      return invalid("an importance exponent is outside -8 to 4");
    }
  }
  return Status::ok();
}

ChannelScales::ChannelScales(const WeightedRow& row, Component component) {
  const auto d = static_cast<size_t>(row.head_dim);
  const bool key = component == Component::kKey;
  scale.assign(d, key ? row.key_step : row.value_step);
  mean.assign(d, 0.0f);
  if (!key) return;
  rope = row.rope != nullptr && row.rope->pairs > 0 ? row.rope : nullptr;
  for (size_t i = 0; i < row.key_weight.size(); ++i) {
    scale[i] = dim_scale(row.key_step, row.key_weight[i]);
  }
  for (size_t i = 0; i < row.key_mean.size(); ++i) mean[i] = half_to_float(row.key_mean[i]);
}

Status CodeFaults::status() const {
  if (non_finite) {
    return Status(StatusCode::kNonFinite, "weighted steps: NaN or infinity in the input");
  }
  if (out_of_range) {
    return Status(StatusCode::kOutOfRange, "weighted steps: a code does not fit 16 bits");
  }
  return Status::ok();
}

void undo_rope(const RopeTable& rope, int64_t position, float* key) {
  for (int32_t i = 0; i < rope.pairs; ++i) {
    unturn_pair(rope.at(position, i), key + pair_first(rope.pairing, i),
                key + pair_second(rope.pairing, rope.pairs, i));
  }
}

}  // namespace tierkv
