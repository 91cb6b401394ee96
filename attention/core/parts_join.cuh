// SPDX-License-Identifier: Apache-2.0
// Joining the parts of a row: what several warps of a CTA, or several CTAs, have summed of one
// column of queries. A warp joins a slice of a column's dims: lane l holds dims 4 * (l % kLanes) to
// 4 * (l % kLanes) + 3 of it, of every kGroups-th part from part l / kLanes on, and lanes of the
// same dims are joined at the end.
#pragma once

#include "attention/core/columns.h"
#include "attention/core/online_softmax.h"
#include "attention/core/prior_attention.h"
#include "attention/work/work.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// Slices of `dims` dims of a head; the last may have fewer.
TKV_HD constexpr int32_t slices_of(int32_t head_dim, int32_t dims) {
  return ceil_div(head_dim, dims);
}

// Parts of a column, whose accumulators are those of a slice. They lie at equal distances, but the
// first has a place of its own.
struct JoinedParts {
  const SoftmaxState *first_state, *states;  // the first, and where it would be
  const float *first_accumulator, *accumulators;
  int32_t state_stride, accumulator_stride;
  int32_t count;
  int32_t swizzle = 0;  // of a multiple of 4: dim d of the slice is at d ^ swizzle

  __device__ __forceinline__ const SoftmaxState* state(int32_t i) const {
    return i == 0 ? first_state : states + i * state_stride;
  }
  __device__ __forceinline__ const float* accumulator(int32_t i) const {
    return i == 0 ? first_accumulator : accumulators + i * accumulator_stride;
  }
};

// `count` parts at equal distances; the first has no place of its own.
__device__ __forceinline__ JoinedParts even_parts(const SoftmaxState* states,
                                                  const float* accumulators, int32_t state_stride,
                                                  int32_t accumulator_stride, int32_t count) {
  return {states, states, accumulators, accumulators, state_stride, accumulator_stride, count};
}

// kDims: of a slice, 32, 64 or 128. kBatch: parts of a lane in flight. kGlobal: parts are what
// other CTAs wrote, otherwise in shared memory.
template <int32_t kDims, int32_t kBatch, bool kGlobal>
class PartsJoin {
 public:
  // dims: of the slice, a multiple of 4.
  __device__ __forceinline__ explicit PartsJoin(int32_t dims) : has_dims_(first_dim() < dims) {}

  // By all lanes, once.
  __device__ __forceinline__ void join(const JoinedParts& parts) {
#pragma unroll 1
    for (int32_t first = 0; first < parts.count; first += kGroups * kBatch) {
      add_batch(parts, first + lane() / kLanes);
    }
    join_groups();
  }

  // Joins a finished output and its state, behind join(). Where that has no tokens, its slice may
  // hold anything. `slice` is read by the lanes that write() it.
  __device__ __forceinline__ void add(SoftmaxState part, const uint16_t* slice, bool is_bfloat16) {
    if (part.is_empty()) return;
    move_reference(fmaxf(state_.reference, part.reference));
    const float f = exp2_fast(part.reference - state_.reference);
    state_.sum = fmaf(f, part.sum, state_.sum);
    if (!writes()) return;
    const uint2 x = *reinterpret_cast<const uint2*>(slice + first_dim());
    const float2 low = is_bfloat16 ? unpack_bfloats(x.x) : unpack_halves(x.x);
    const float2 high = is_bfloat16 ? unpack_bfloats(x.y) : unpack_halves(x.y);
    x_.x = fmaf(f, low.x, x_.x);
    x_.y = fmaf(f, low.y, x_.y);
    x_.z = fmaf(f, high.x, x_.z);
    x_.w = fmaf(f, high.y, x_.w);
  }

  // The same in all lanes.
  __device__ __forceinline__ const SoftmaxState& state() const {
    return state_;
  }

  // As a part; state may be null: of a column's slices the first writes it.
  __device__ __forceinline__ void store(SoftmaxState* state, float* accumulator) const {
    if (state != nullptr && lane() == 0) *state = state_;
    if (writes()) *reinterpret_cast<float4*>(accumulator + first_dim()) = x_;
  }

  // As output of fp16 or bfloat16; lse may be null; sink is that of finish().
  struct Output {
    uint16_t* slice;
    float* lse;
    bool is_bfloat16;
    float sink = -INFINITY;
  };
  __device__ __forceinline__ void write(const Output& to) const {
    const FinishedState finished = finish(state_, to.sink);
    if (to.lse != nullptr && lane() == 0) *to.lse = finished.lse;
    if (!writes()) return;
    const float by = finished.scale;
    const float4 x = {x_.x * by, x_.y * by, x_.z * by, x_.w * by};
    *reinterpret_cast<uint2*>(to.slice + first_dim()) =
        uint2{pack_outputs(x.x, x.y, to.is_bfloat16), pack_outputs(x.z, x.w, to.is_bfloat16)};
  }
  // The vector at `place` of the outputs, joined with what is there. to.sink is prior's.
  __device__ __forceinline__ void write_joined(Output to, const PriorAttention& prior,
                                               int64_t place, int32_t q_head) {
    if (prior.lse != nullptr) add(state_of_lse(prior.lse[place]), to.slice, to.is_bfloat16);
    to.sink = prior.sink(q_head);
    write(to);
  }

 private:
  static constexpr int32_t kLanes = kDims / 4;     // of a part
  static constexpr int32_t kGroups = 32 / kLanes;  // of lanes, with parts of their own

  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }
  __device__ __forceinline__ static int32_t first_dim() {
    return lane() % kLanes * 4;
  }
  __device__ __forceinline__ bool writes() const {
    return has_dims_ && lane() < kLanes;
  }
  template <class T>
  __device__ __forceinline__ static T read(const T* from) {
    if constexpr (kGlobal) {
      return __ldcg(from);
    } else {
      return *from;
    }
  }

  // The lane's parts `first`, first + kGroups, ...
  __device__ __forceinline__ void add_batch(const JoinedParts& parts, int32_t first) {
    SoftmaxState state[kBatch];
    float4 x[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t part = first + i * kGroups;
      x[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (part >= parts.count) continue;
      const float2 s = read(reinterpret_cast<const float2*>(parts.state(part)));
      state[i] = {s.x, s.y};
      if (has_dims_) {
        x[i] = read(reinterpret_cast<const float4*>(parts.accumulator(part) +
                                                    (first_dim() ^ parts.swizzle)));
      }
    }
    float reference = state_.reference;
#pragma unroll
    for (const SoftmaxState& s : state) {
      if (!s.is_empty()) reference = fmaxf(reference, s.reference);
    }
    move_reference(reference);
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (state[i].is_empty()) continue;  // its accumulator may be anything
      const float f = exp2_fast(state[i].reference - reference);
      state_.sum = fmaf(f, state[i].sum, state_.sum);
      x_.x = fmaf(f, x[i].x, x_.x);
      x_.y = fmaf(f, x[i].y, x_.y);
      x_.z = fmaf(f, x[i].z, x_.z);
      x_.w = fmaf(f, x[i].w, x_.w);
    }
  }

  __device__ __forceinline__ void join_groups() {
    if constexpr (kGroups == 1) return;
    float reference = state_.reference;
#pragma unroll
    for (int32_t by = kLanes; by < 32; by *= 2) {
      reference = fmaxf(reference, __shfl_xor_sync(kFullWarp, reference, by));
    }
    move_reference(reference);
#pragma unroll
    for (int32_t by = kLanes; by < 32; by *= 2) {
      state_.sum += __shfl_xor_sync(kFullWarp, state_.sum, by);
      x_.x += __shfl_xor_sync(kFullWarp, x_.x, by);
      x_.y += __shfl_xor_sync(kFullWarp, x_.y, by);
      x_.z += __shfl_xor_sync(kFullWarp, x_.z, by);
      x_.w += __shfl_xor_sync(kFullWarp, x_.w, by);
    }
  }

  // While there is nothing, its sums are 0.
  __device__ __forceinline__ void move_reference(float reference) {
    const float factor = share(state_, {reference, 1.0f});
    state_ = {reference, state_.sum * factor};
    x_.x *= factor, x_.y *= factor, x_.z *= factor, x_.w *= factor;
  }

  bool has_dims_;
  SoftmaxState state_;
  float4 x_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

}  // namespace tierkv
