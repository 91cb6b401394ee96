// SPDX-License-Identifier: Apache-2.0
// The geometric mean of importances that were seen, as sums that come out alike in every order: a
// device adds them in parallel, the host one by one.
#pragma once

#include <cstdint>

#include "codec/format/same_log.h"
#include "codec/format/weighted_step.h"
#include "store/place/raw_tokens.h"

namespace tierkv::store {

inline constexpr double kLogUnit = 1.0 / 16777216;  // of logarithms to base 2

struct LogMean {
  int32_t seen = 0;  // at most kMostCounted
  int32_t unused = 0;
  int64_t logs = 0;  // in kLogUnit, each rounded

  TKV_HD void add(const LogMean& other) {
    seen += other.seen;
    logs += other.logs;
  }
  // The mean; 1 where nothing was seen.
  TKV_HD double value() const {
    if (seen == 0) return 1;
    return same_exp2(double_div(double_mul(static_cast<double>(logs), kLogUnit), seen));
  }
  // What sums of logarithms of floats can be.
  bool is_sound() const {
    const int64_t most_logs = int64_t{160} << 24;
    return seen >= 0 && seen <= kMostCounted && logs <= most_logs * seen &&
           logs >= -most_logs * seen;
  }
};
static_assert(sizeof(LogMean) == 16);

// The mean of a single importance, which is > 0.
TKV_HD LogMean log_mean_of(float importance) {
  const double units = double_mul(same_log2(static_cast<double>(importance)), 1 / kLogUnit);
  return {1, 0, static_cast<int64_t>(double_add(units, units < 0 ? -0.5 : 0.5))};
}

// The importance that decides about a token that leaves the window; 1 is neutral. Where the first
// chunk's queries have seen token i (from 1), it is i * significance. Where later queries have, it
// is what they saw over the row's mean, this token included. The format may have decided already.
TKV_HD double relative_importance(const Importance& known, int32_t position, const LogMean& mean) {
  if (known.kind == ImportanceKind::kPrompt) return token_importance(position, known.value);
  if (known.kind != ImportanceKind::kSeen) return 1;
  return is_averaged(known) ? double_div(static_cast<double>(known.value), mean.value()) : 0;
}

}  // namespace tierkv::store
