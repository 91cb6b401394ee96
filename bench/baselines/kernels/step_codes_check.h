// SPDX-License-Identifier: Apache-2.0
// What host and device say about a row of bench/baselines/kernels/step_codes.h. Internal to codec/.
#pragma once

#include "bench/baselines/kernels/step_codes.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr int32_t kCodesPerAccess = 8;  // 16 bytes of codes

TKV_HD StatusCode check_step_row(const StepCodes& s, const StepRow& row) {
  const bool in_range = row.input >= 0 && row.output >= 0 && row.num_tokens >= 0 &&
                        row.num_tokens <= s.max_tokens && row.step >= 0 && row.step < s.num_steps;
  if (!in_range || row.input % kCodesPerAccess != 0 || row.output % kCodesPerAccess != 0) {
    return StatusCode::kInvalidArgument;
  }
  const float step = s.steps[row.step];
  return is_finite(step) && step > 0 ? StatusCode::kOk : StatusCode::kInvalidArgument;
}

}  // namespace tierkv
