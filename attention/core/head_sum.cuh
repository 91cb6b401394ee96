// SPDX-License-Identifier: Apache-2.0
// One head of a row spread over a warp: the accumulator, and its joining with others.
#pragma once

#include "attention/core/online_softmax.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"

namespace tierkv {

// Lane l holds dims 4l .. 4l + 3 of every 128 of an accumulator of kHeadDim floats; every lane
// holds the state.
template <int32_t kHeadDim>
class HeadSum {
 public:
  // A part somewhere in memory.
  struct Part {
    const SoftmaxState* state;  // null: none
    const float* accumulator;   // not read where the state is empty
  };

  // Adds kCount parts; their loads are in flight together. kGlobal: what other CTAs wrote,
  // otherwise shared memory.
  template <int32_t kCount, bool kGlobal>
  __device__ __forceinline__ void add(const Part (&parts)[kCount]) {
    SoftmaxState states[kCount];
    float4 x[kCount][kQuads];
#pragma unroll
    for (int32_t p = 0; p < kCount; ++p) {
      states[p] = {};
#pragma unroll
      for (int32_t i = 0; i < kQuads; ++i) x[p][i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (parts[p].state == nullptr) continue;
      const float2 state = read<kGlobal>(reinterpret_cast<const float2*>(parts[p].state));
      states[p] = {state.x, state.y};
#pragma unroll
      for (int32_t i = 0; i < kQuads; ++i) {
        const auto* from = reinterpret_cast<const float4*>(parts[p].accumulator + dim(i));
        if (has(i)) x[p][i] = read<kGlobal>(from);
      }
    }
    SoftmaxState whole = state_;
#pragma unroll
    for (int32_t p = 0; p < kCount; ++p) {
      if (!states[p].is_empty()) whole.reference = fmaxf(whole.reference, states[p].reference);
    }
    const float kept = share(state_, whole);
    state_ = {whole.reference, kept * state_.sum};
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      x_[i].x *= kept, x_[i].y *= kept, x_[i].z *= kept, x_[i].w *= kept;
    }
#pragma unroll
    for (int32_t p = 0; p < kCount; ++p) {
      if (states[p].is_empty()) continue;  // its accumulator may be anything
      const float factor = share(states[p], whole);
      state_.sum = fmaf(factor, states[p].sum, state_.sum);
#pragma unroll
      for (int32_t i = 0; i < kQuads; ++i) {
        x_[i].x = fmaf(factor, x[p][i].x, x_[i].x);
        x_[i].y = fmaf(factor, x[p][i].y, x_[i].y);
        x_[i].z = fmaf(factor, x[p][i].z, x_[i].z);
        x_[i].w = fmaf(factor, x[p][i].w, x_[i].w);
      }
    }
  }

  // As a part.
  __device__ __forceinline__ void store(SoftmaxState* state, float* accumulator) const {
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      if (has(i)) *reinterpret_cast<float4*>(accumulator + dim(i)) = x_[i];
    }
    if (threadIdx.x % 32 == 0) *state = state_;
  }

  // As output: out is [kHeadDim] of fp16 or bfloat16, lse may be null.
  __device__ __forceinline__ void write(__half* out, float* lse, bool is_bfloat16 = false) const {
    const FinishedState finished = finish(state_, -INFINITY);
    const float factor = finished.scale;
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      if (!has(i)) continue;
      const float4 x = {x_[i].x * factor, x_[i].y * factor, x_[i].z * factor, x_[i].w * factor};
      const uint2 halves = {pack_outputs(x.x, x.y, is_bfloat16),
                            pack_outputs(x.z, x.w, is_bfloat16)};
      *reinterpret_cast<uint2*>(out + dim(i)) = halves;
    }
    if (threadIdx.x % 32 == 0 && lse != nullptr) *lse = finished.lse;
  }

 private:
  static constexpr int32_t kQuads = (kHeadDim + 127) / 128;

  __device__ __forceinline__ static int32_t dim(int32_t i) {
    return 128 * i + 4 * static_cast<int32_t>(threadIdx.x % 32);
  }
  __device__ __forceinline__ static bool has(int32_t i) {
    return kHeadDim % 128 == 0 || dim(i) < kHeadDim;
  }

  template <bool kGlobal, class T>
  __device__ __forceinline__ static T read(const T* from) {
    if constexpr (kGlobal) {
      return __ldcg(from);
    } else {
      return *from;
    }
  }

  SoftmaxState state_;
  float4 x_[kQuads] = {};
};

}  // namespace tierkv
