// SPDX-License-Identifier: Apache-2.0
// Evenly spaced tokens of a sequence: the queries that sampled significance counts.
#pragma once

#include <cstdint>

#include "tierkv/half.h"

namespace tierkv {

// Tokens first, first + stride, ... of a sequence. Host and device choose the same.
struct TokenSample {
  int32_t first, stride, count;

  TKV_HD int32_t position(int32_t index) const { return first + stride * index; }
  // Index of the first of them at or after a position; from `count` on there is none.
  TKV_HD int32_t index_from(int32_t position) const {
    return position <= first ? 0 : (position - first + stride - 1) / stride;
  }
  TKV_HD int32_t behind(int32_t token) const {
    const int32_t next = index_from(token + 1);
    return next < count ? count - next : 0;
  }
};
// Every stride-th token, counted from the last one, so that each other token has one behind it.
TKV_HD TokenSample sample_tokens(int32_t num_tokens, int32_t stride) {
  if (num_tokens <= 0) return {0, stride, 0};
  return {(num_tokens - 1) % stride, stride, (num_tokens - 1) / stride + 1};
}

}  // namespace tierkv
