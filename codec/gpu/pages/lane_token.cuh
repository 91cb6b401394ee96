// SPDX-License-Identifier: Apache-2.0
// One token in the registers of a warp: quantised and dequantised as codec/format/quantize.h says,
// in the formats of pages.
//
// Lane l holds the dims 32 c + l % 8 + 8 j, j < 4, of the chunks c = l / 8 and l / 8 + 4: whole
// bytes in every format.
#pragma once

#include <cstdint>

#include "codec/format/element.h"
#include "codec/format/fragment_codes.h"
#include "codec/format/page_layout.h"
#include "gpu/math.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kLaneChunks = 2;  // head_dim 256

// A page on the device.
struct PageRef {
  uint8_t* bytes;
  const PageLayout* layout;  // checked by the caller: is_page_layout()
  DType raw_dtype;
};

// One component of a token, spread over the warp. Pages on a device have no sub-groups.
struct LaneSide {
  uint32_t codes[kLaneChunks][4];
  QuantParams params;  // of the head; none of raw elements
};
using LaneValues = float[kLaneChunks][4];

__device__ __forceinline__ int32_t lane_chunk(int32_t i) {
  return lane_index() / 8 + 4 * i;
}
__device__ __forceinline__ int32_t lane_dim(int32_t i) {
  return 32 * lane_chunk(i) + lane_index() % 8;
}

// False for a chunk that no lane has: most of the work of head_dim 256 is skipped below.
__device__ __forceinline__ bool has_chunk(int32_t i, int32_t head_dim) {
  return i == 0 || 128 * i < head_dim;
}

__device__ __forceinline__ void load_lane_values(const void* row, DType dtype, int32_t head_dim,
                                                 LaneValues& x) {
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      x[i][j] = lane_dim(i) < head_dim ? load_element(row, dtype, lane_dim(i) + 8 * j) : 0.0f;
    }
  }
}

// ---- quantise ----

// Extrema of a whole row.
__device__ __forceinline__ void row_extrema(const LaneValues& x, int32_t head_dim, float* lo,
                                            float* hi) {
  *lo = INFINITY;
  *hi = -INFINITY;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim) || lane_dim(i) >= head_dim) continue;
    const float* y = x[i];
    *lo = nan_min(*lo, nan_min(nan_min(y[0], y[1]), nan_min(y[2], y[3])));
    *hi = nan_max(*hi, nan_max(nan_max(y[0], y[1]), nan_max(y[2], y[3])));
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) {
    *lo = nan_min(*lo, __shfl_xor_sync(kFullWarp, *lo, lanes));
    *hi = nan_max(*hi, __shfl_xor_sync(kFullWarp, *hi, lanes));
  }
}

__device__ __forceinline__ StatusCode params_status(float lo, float hi, QuantParams p) {
  if (!is_finite(lo) || !is_finite(hi)) return StatusCode::kNonFinite;
  return params_in_range(p) ? StatusCode::kOk : StatusCode::kOutOfRange;
}

__device__ __forceinline__ StatusCode take_raw_codes(const PageRef& page, int32_t head_dim,
                                                     const LaneValues& x, LaneSide* side) {
  StatusCode code = StatusCode::kOk;
#pragma unroll
  for (int32_t i = 0; i < kLaneChunks; ++i) {
    if (!has_chunk(i, head_dim)) continue;
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const uint16_t raw = float_to_raw(page.raw_dtype, x[i][j]);
      if (!is_finite(x[i][j])) {
        code = greater(code, StatusCode::kNonFinite);
      } else if (!is_finite(raw_to_float(page.raw_dtype, raw))) {
        code = greater(code, StatusCode::kOutOfRange);
      }
      side->codes[i][j] = raw;
    }
  }
  return code;
}

__device__ __forceinline__ void dequantize_lane(const PageRef& page, Component c,
                                                const LaneSide& side, LaneValues& x) {
  const bool is_raw = page.layout->tile(c).type.is_raw();
  const float scale = half_to_float(side.params.scale);
  const float zero_point = half_to_float(side.params.zero_point);
#pragma unroll
  for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
    const uint32_t code = side.codes[i / 4][i % 4];
    x[i / 4][i % 4] = is_raw ? raw_to_float(page.raw_dtype, static_cast<uint16_t>(code))
                             : dequantize(static_cast<int32_t>(code), scale, zero_point);
  }
}

}  // namespace tierkv
