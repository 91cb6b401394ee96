// Joining the parts of a row: what several warps of a CTA, or several CTAs, have summed of one
// column of queries. A warp joins kJoinDims dims of a column; lane l holds dims 4l to 4l + 3 of
// them.
#pragma once

#include "attention/columns.h"
#include "attention/online_softmax.h"
#include "attention/ptx.cuh"
#include "attention/work.h"

namespace tierkv {

inline constexpr int32_t kJoinDims = 128;
TKV_HD constexpr int32_t slices_of(int32_t head_dim) {
  return ceil_div(head_dim, kJoinDims);
}

// Parts of a column, whose accumulators are those of a slice. They lie at equal distances, but the
// first has a place of its own.
struct JoinedParts {
  const SoftmaxState *first_state, *states;  // the first, and where it would be
  const float *first_accumulator, *accumulators;
  int32_t state_stride, accumulator_stride;
  int32_t count;

  __device__ __forceinline__ const SoftmaxState* state(int32_t i) const {
    return i == 0 ? first_state : states + i * state_stride;
  }
  __device__ __forceinline__ const float* accumulator(int32_t i) const {
    return i == 0 ? first_accumulator : accumulators + i * accumulator_stride;
  }
};

// kBatch: parts in flight, a power of two; lane i sees to the state of one. kGlobal: parts are what
// other CTAs wrote, otherwise in shared memory.
template <int32_t kBatch, bool kGlobal>
class PartsJoin {
 public:
  // By all lanes; has_dims: this lane's are dims of the head.
  __device__ __forceinline__ void add(const JoinedParts& parts, bool has_dims) {
#pragma unroll 1
    for (int32_t first = 0; first < parts.count; first += kBatch) add_batch(parts, first, has_dims);
  }

  // As a part: of a column's slices the first writes the state.
  __device__ __forceinline__ void store(SoftmaxState* state, float* accumulator,
                                        bool has_dims) const {
    if (has_dims) *(reinterpret_cast<float4*>(accumulator) + lane()) = x_;
    if (state != nullptr && lane() == 0) *state = state_;
  }

  // As output of fp16 or bfloat16; lse may be null; sink is that of finish().
  struct Output {
    uint16_t* slice;
    float* lse;
    bool is_bfloat16;
    float sink;
  };
  __device__ __forceinline__ void write(const Output& to, bool has_dims) const {
    const FinishedState finished = finish(state_, to.sink);
    if (to.lse != nullptr && lane() == 0) *to.lse = finished.lse;
    if (!has_dims) return;
    const float by = finished.scale;
    const float4 x = {x_.x * by, x_.y * by, x_.z * by, x_.w * by};
    *(reinterpret_cast<uint2*>(to.slice) + lane()) =
        to.is_bfloat16 ? uint2{pack_bfloats(x.x, x.y), pack_bfloats(x.z, x.w)}
                       : uint2{pack_halves(x.x, x.y), pack_halves(x.z, x.w)};
  }

 private:
  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }
  template <class T>
  __device__ __forceinline__ static T read(const T* from) {
    if constexpr (kGlobal) {
      return __ldcg(from);
    } else {
      return *from;
    }
  }

  __device__ __forceinline__ void add_batch(const JoinedParts& parts, int32_t first,
                                            bool has_dims) {
    SoftmaxState own;
    if (lane() < kBatch && first + lane() < parts.count) {
      const float2 s = read(reinterpret_cast<const float2*>(parts.state(first + lane())));
      own = {s.x, s.y};
    }
    float4 x[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (first + i >= parts.count || !has_dims) continue;
      x[i] = read(reinterpret_cast<const float4*>(parts.accumulator(first + i)) + lane());
    }
    const float factor = add_states(own);
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const float f = __shfl_sync(kFullWarp, factor, i);
      if (f == 0.0f) continue;  // the accumulator of an empty state may be anything
      x_.x = fmaf(f, x[i].x, x_.x);
      x_.y = fmaf(f, x[i].y, x_.y);
      x_.z = fmaf(f, x[i].z, x_.z);
      x_.w = fmaf(f, x[i].w, x_.w);
    }
  }

  // Joins the states of the first kBatch lanes to this one and brings the dims to the new
  // reference; the factor of the lane's own part.
  __device__ __forceinline__ float add_states(SoftmaxState own) {
    SoftmaxState whole{own.is_empty() ? kNoReference : own.reference, 1.0f};
#pragma unroll
    for (int32_t by = kBatch / 2; by > 0; by /= 2) {
      whole.reference = fmaxf(whole.reference, __shfl_xor_sync(kFullWarp, whole.reference, by));
    }
    whole.reference = fmaxf(__shfl_sync(kFullWarp, whole.reference, 0), state_.reference);
    const float factor = share(own, whole), kept = share(state_, whole);
    float sum = factor * own.sum;
#pragma unroll
    for (int32_t by = kBatch / 2; by > 0; by /= 2) sum += __shfl_xor_sync(kFullWarp, sum, by);
    state_ = {whole.reference, fmaf(kept, state_.sum, __shfl_sync(kFullWarp, sum, 0))};
    x_.x *= kept, x_.y *= kept, x_.z *= kept, x_.w *= kept;
    return factor;
  }

  SoftmaxState state_;
  float4 x_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

}  // namespace tierkv
