// The kernel of shared_rows.h where rows are fewer than CTAs, so that many share each. A warp joins
// kFewRowsDims dims of a column of a row: lane 8k + d takes dims 4d to 4d + 3 of parts k, k + 4,
// k + 8 and so on, which all are on their way at once.
#pragma once

#include "attention/decode.h"
#include "attention/online_softmax.h"
#include "attention/ptx.cuh"
#include "attention/shared_rows.h"

namespace tierkv {

inline constexpr int32_t kFewRowsThreads = 128;
inline constexpr int32_t kFewRowsWarps = kFewRowsThreads / 32;
inline constexpr int32_t kFewRowsDims = 32;
inline constexpr int32_t kFewRowsBatch = 5;  // parts of a lane on their way

TKV_HD constexpr int32_t few_rows_warps(int32_t num_rows, int32_t of_row, int32_t head_dim) {
  return num_rows * of_row * (head_dim / kFewRowsDims);
}

// The CTAs that share a row: the first one where it begins, `count` in all; 0 where one CTA has it.
struct RowCtas {
  int32_t first, count;
};

// By a whole warp.
__device__ __forceinline__ RowCtas ctas_of_row(const SharedRowsParams& p, int32_t row) {
  RowCtas ctas{0, 0};
#pragma unroll 4
  for (int32_t first = 0; first < p.num_ctas; first += 32) {
    const int32_t cta = first + static_cast<int32_t>(threadIdx.x % 32);
    const bool is_inside = cta < p.num_ctas;
    const WorkItem& item = p.items[(is_inside ? cta : 0) * kDecodeWarps];
    const uint32_t goes_on =
        __ballot_sync(kFullWarp, is_inside && item.row == row && item.tile > 0);
    if (goes_on == 0) continue;
    if (ctas.count == 0) ctas = {first + lowest_bit(goes_on) - 1, 1};
    ctas.count += __popc(goes_on);
  }
  return ctas;
}

// Of one lane: the parts it has added, of its dims.
class LanePart {
 public:
  // Parts first + 4i of the row, i below kFewRowsBatch. dims: the lane's, of part 0.
  __device__ __forceinline__ void add(const SharedRowsParams& p, const RowCtas& ctas, int32_t first,
                                      int32_t column, const float* dims, int32_t head_dim) {
    SoftmaxState state[kFewRowsBatch];
    float4 x[kFewRowsBatch];
#pragma unroll
    for (int32_t i = 0; i < kFewRowsBatch; ++i) {
      const int32_t k = first + 4 * i;
      if (k >= ctas.count) continue;
      const int64_t place =
          static_cast<int64_t>(part_index(ctas.first + k, k > 0)) * p.columns.of_row + column;
      const float2 s = __ldcg(reinterpret_cast<const float2*>(p.part_states + place));
      state[i] = {s.x, s.y};
      x[i] = __ldcg(reinterpret_cast<const float4*>(dims + place * head_dim));
    }
    SoftmaxState whole = state_;
#pragma unroll
    for (int32_t i = 0; i < kFewRowsBatch; ++i) {
      if (!state[i].is_empty()) whole.reference = fmaxf(whole.reference, state[i].reference);
    }
    rescale(share(state_, whole), whole.reference);
#pragma unroll
    for (int32_t i = 0; i < kFewRowsBatch; ++i) {
      if (state[i].is_empty()) continue;  // its accumulator may be anything
      const float f = share(state[i], whole);
      state_.sum = fmaf(f, state[i].sum, state_.sum);
      x_.x = fmaf(f, x[i].x, x_.x);
      x_.y = fmaf(f, x[i].y, x_.y);
      x_.z = fmaf(f, x[i].z, x_.z);
      x_.w = fmaf(f, x[i].w, x_.w);
    }
  }

  // With the other three lanes of the same dims.
  __device__ __forceinline__ void join_lanes() {
    SoftmaxState whole = state_;
    whole.reference = fmaxf(whole.reference, __shfl_xor_sync(kFullWarp, whole.reference, 8));
    whole.reference = fmaxf(whole.reference, __shfl_xor_sync(kFullWarp, whole.reference, 16));
    rescale(share(state_, whole), whole.reference);
#pragma unroll
    for (int32_t by = 8; by < 32; by *= 2) {
      state_.sum += __shfl_xor_sync(kFullWarp, state_.sum, by);
      x_.x += __shfl_xor_sync(kFullWarp, x_.x, by);
      x_.y += __shfl_xor_sync(kFullWarp, x_.y, by);
      x_.z += __shfl_xor_sync(kFullWarp, x_.z, by);
      x_.w += __shfl_xor_sync(kFullWarp, x_.w, by);
    }
  }

  __device__ __forceinline__ const SoftmaxState& state() const {
    return state_;
  }
  __device__ __forceinline__ const float4& dims() const {
    return x_;
  }

 private:
  __device__ __forceinline__ void rescale(float factor, float reference) {
    state_ = {reference, state_.sum * factor};
    x_.x *= factor, x_.y *= factor, x_.z *= factor, x_.w *= factor;
  }

  SoftmaxState state_;
  float4 x_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kFewRowsThreads)
    few_rows_kernel(const __grid_constant__ SharedRowsParams p) {
  constexpr int32_t kSlices = kHeadDim / kFewRowsDims;
  touch_parameters(p, static_cast<int32_t>(threadIdx.x) / 32);
  let_next_kernel_start();
  const int32_t warp = static_cast<int32_t>(blockIdx.x * kFewRowsWarps + threadIdx.x / 32),
                lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t task = warp / kSlices, slice = warp - task * kSlices;
  const int32_t row = task / p.columns.of_row, column = task - row * p.columns.of_row;
  const int64_t place = row < p.num_rows ? p.columns.place(row, column) : -1;
  RowCtas ctas{0, 0};
  if (place >= 0) ctas = ctas_of_row(p, row);
  const int32_t q_head = p.columns.head(row, column);
  // Also without anything to do: whoever follows waits for the end of this kernel, and must not see
  // it before that of the decode kernel.
  wait_for_previous_kernel();
  if (ctas.count == 0) return;
  const float sink = p.sinks != nullptr ? p.sinks[q_head] : -INFINITY;
  const int32_t dim = slice * kFewRowsDims + lane % 8 * 4;
  LanePart part;
#pragma unroll 1
  for (int32_t first = lane / 8; first - lane / 8 < ctas.count; first += 4 * kFewRowsBatch) {
    part.add(p, ctas, first, column, p.parts + dim, kHeadDim);
  }
  part.join_lanes();
  const FinishedState finished = finish(part.state(), sink);
  if (lane == 0 && slice == 0 && p.lse != nullptr) p.lse[place] = finished.lse;
  if (lane >= 8) return;
  const float4 x = part.dims();
  const float by = finished.scale;
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + place * kHeadDim + dim) =
      p.is_bfloat16 ? uint2{pack_bfloats(x.x * by, x.y * by), pack_bfloats(x.z * by, x.w * by)}
                    : uint2{pack_halves(x.x * by, x.y * by), pack_halves(x.z * by, x.w * by)};
}

}  // namespace tierkv
