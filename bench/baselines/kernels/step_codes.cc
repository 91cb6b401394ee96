// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/kernels/step_codes.h"

#include <algorithm>
#include <vector>

#include "bench/baselines/kernels/step_codes_check.h"
#include "codec/format/element.h"
#include "codec/format/quantize.h"

namespace tierkv {
namespace {

Status invalid(const char* why) {
  return Status(StatusCode::kInvalidArgument, why);
}
bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

StatusCode encode_row(const StepCodes& s, const StepRow& row) {
  auto worst = StatusCode::kOk;
  const float* mean =
      s.means == nullptr ? nullptr : s.means + static_cast<int64_t>(row.step) * s.head_dim;
  for (int32_t t = 0; t < row.num_tokens; ++t) {
    int16_t* codes = s.codes + row.output + t * s.codes_token_stride;
    for (int32_t d = 0; d < s.head_dim; ++d) {
      float x = load_element(s.x, s.dtype, row.input + t * s.x_token_stride + d);
      if (mean != nullptr) x = add_rn(x, -mean[d]);
      worst = std::max(worst, quantize_absolute(&x, 1, s.steps[row.step], codes + d));
    }
  }
  return worst;
}

}  // namespace

Status StepCodes::validate() const {
  if (num_rows < 0) return invalid("num_rows is negative");
  if (num_rows == 0) return Status::ok();
  if (!x || !codes || !rows || !steps || !status) {
    return invalid("x, codes, rows, steps or status is null");
  }
  if (!is_aligned(x) || !is_aligned(codes) || !is_aligned(rows)) {
    return invalid("x, codes or rows are not aligned to 16 bytes");
  }
  if (num_steps < 1) return invalid("num_steps must be positive");
  if (max_tokens < 0) return invalid("max_tokens is negative");
  if (head_dim < kCodesPerAccess || head_dim > kMaxHeadDim || head_dim % kCodesPerAccess != 0) {
    return invalid("head_dim must be a multiple of 8, at most 4096");
  }
  for (const int64_t stride : {x_token_stride, codes_token_stride}) {
    if (stride < head_dim || stride % kCodesPerAccess != 0) {
      return invalid("a stride is below head_dim or no multiple of 8");
    }
  }
  if (dtype != DType::kFloat32 && !is_raw_dtype(dtype)) return invalid("bad dtype");
  return Status::ok();
}

Status step_codes_host(const StepCodes& s) {
  if (Status v = s.validate(); !v) return v;
  for (int32_t i = 0; i < s.num_rows; ++i) {
    const StatusCode code = check_step_row(s, s.rows[i]);
    s.status[i] = code == StatusCode::kOk ? encode_row(s, s.rows[i]) : code;
  }
  return Status::ok();
}

}  // namespace tierkv
