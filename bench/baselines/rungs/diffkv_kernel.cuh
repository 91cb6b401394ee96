// SPDX-License-Identifier: Apache-2.0
// Rung 1: CUDA cores over DiffKV's page layout, as its section 6.2 describes.
//
// A CTA takes one q head of a row (or of a split of it); its warps take whole pages, those of the
// first tier first. A page is read in two phases: four lanes share a key and reduce over its dims
// (partial dot products, then shuffles); eight lanes share a group of tokens and reduce values over
// them, each lane for 16 dims. Codes become fp32 one at a time. The q heads of a group read the
// same pages, each for itself.
#pragma once

#include "bench/baselines/rungs/diffkv_layout.h"
#include "bench/baselines/rungs/row_chunks.cuh"
#include "bench/baselines/rungs/row_parts.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kDiffkvWarps = 4;
inline constexpr int32_t kDiffkvThreads = kDiffkvWarps * 32;

// Offsets into the dynamic shared memory of a CTA.
struct DiffkvShared {
  int32_t query;   // float [128]
  int32_t scores;  // float [kDiffkvWarps][kDiffkvMaxPageTokens]
  int32_t parts;   // float [kDiffkvWarps][128]
  int32_t states;  // SoftmaxState [kDiffkvWarps]
  int32_t bytes;
};
TKV_HD constexpr DiffkvShared diffkv_shared() {
  DiffkvShared s{};
  s.scores = s.query + kRungHeadDim * 4;
  s.parts = s.scores + kDiffkvWarps * kDiffkvMaxPageTokens * 4;
  s.states = s.parts + kDiffkvWarps * kRungHeadDim * 4;
  s.bytes = s.states + kDiffkvWarps * 8;
  return s;
}

// One warp's attention of one q head over pages in DiffKV's layout.
class DiffkvWarp {
 public:
  __device__ __forceinline__ DiffkvWarp(const float* query, float* scores, float scale_log2)
      : query_(query), scores_(scores), scale_log2_(scale_log2), lane_(threadIdx.x % 32) {
    float sum = 0.0f;
    for (int32_t i = lane_; i < kRungHeadDim; i += 32) sum += query[i];
    query_sum_ = sum_of_lanes(sum) * scale_log2;
  }

  // A page that is there.
  __device__ __forceinline__ void attend(const uint8_t* page, int32_t tokens,
                                         const TierSource& tier) {
    const int32_t format = tier.format, page_tokens = tier.page_tiles * kTileTokens;
    const uint8_t* keys = page + tier.segment[0];
    const uint8_t* key_metadata = page + tier.segment[1];
    if (key_type(format).bits() == 16) {
      score_keys<16>(keys, key_metadata, page_tokens, tokens);
    } else if (key_type(format).bits() == 8) {
      score_keys<8>(keys, key_metadata, page_tokens, tokens);
    } else {
      score_keys<4>(keys, key_metadata, page_tokens, tokens);
    }
    __syncwarp();
    const uint8_t* values = page + tier.segment[2];
    weigh(value_type(format).bits() == 16 ? nullptr : page + tier.segment[3], tokens);
    __syncwarp();
    switch (value_type(format).bits()) {
      case 16:
        add_values<16>(values, page_tokens, tokens);
        break;
      case 8:
        add_values<8>(values, page_tokens, tokens);
        break;
      case 4:
        add_values<4>(values, page_tokens, tokens);
        break;
      default:
        add_values<2>(values, page_tokens, tokens);
    }
    __syncwarp();  // the scores may be written anew
  }

  // The part of the warp, in shared memory; not written where there were no tokens.
  __device__ __forceinline__ void store(SoftmaxState* state, float* part) {
    const float sum = sum_of_lanes(sum_), zero = sum_of_lanes(zero_);
    if (lane_ == 0) *state = {reference_, sum};
#pragma unroll
    for (int32_t o = 0; o < kOutDims; ++o) {
      float x = out_[o];
      x += __shfl_xor_sync(kFullWarp, x, 8);
      x += __shfl_xor_sync(kFullWarp, x, 16);
      if (lane_ < kDiffkvValueGroup) part[o * kDiffkvValueGroup + lane_] = x + zero;
    }
  }

 private:
  static constexpr int32_t kOutDims = kRungHeadDim / kDiffkvValueGroup;

  __device__ __forceinline__ static float sum_of_lanes(float x) {
#pragma unroll
    for (int32_t i = 1; i < 32; i *= 2) x += __shfl_xor_sync(kFullWarp, x, i);
    return x;
  }
  // Code i of a run of words.
  template <int32_t kBits>
  __device__ __forceinline__ static float value_of(const uint32_t* words, int32_t i) {
    constexpr int32_t kPerWord = 32 / kBits;
    const uint32_t code = words[i / kPerWord] >> i % kPerWord * kBits & ((1u << kBits) - 1);
    if constexpr (kBits == 16) {
      return half_to_float(static_cast<uint16_t>(code));
    } else {
      return static_cast<float>(code);
    }
  }
  __device__ __forceinline__ static float2 metadata_of(const uint8_t* metadata, int32_t token) {
    return unpack_halves(*reinterpret_cast<const uint32_t*>(metadata + 4 * token));
  }

  // Scores of a page's tokens in log2 units, to shared memory.
  template <int32_t kBits>
  __device__ __forceinline__ void score_keys(const uint8_t* codes, const uint8_t* metadata,
                                             int32_t page_tokens, int32_t tokens) {
    constexpr int32_t kVector = diffkv_key_vector(kBits);
    constexpr int32_t kChunks = kRungHeadDim / (kVector * kDiffkvKeyGroup);
    const int32_t in_group = lane_ % kDiffkvKeyGroup;
    float q[kRungHeadDim / kDiffkvKeyGroup];
#pragma unroll
    for (int32_t i = 0; i < kChunks * kVector; ++i) {
      q[i] = query_[(i / kVector * kDiffkvKeyGroup + in_group) * kVector + i % kVector];
    }
    for (int32_t first = 0; first < tokens; first += 32 / kDiffkvKeyGroup) {
      const int32_t token = first + lane_ / kDiffkvKeyGroup;
      float dot = 0.0f;
#pragma unroll
      for (int32_t c = 0; c < kChunks; ++c) {
        const int32_t piece = (c * page_tokens + token) * kDiffkvKeyGroup + in_group;
        const auto x = *reinterpret_cast<const uint4*>(codes + 16 * piece);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int32_t i = 0; i < kVector; ++i) {
          dot = fmaf(q[c * kVector + i], value_of<kBits>(words, i), dot);
        }
      }
      dot += __shfl_xor_sync(kFullWarp, dot, 1);
      dot += __shfl_xor_sync(kFullWarp, dot, 2);
      float2 scale_zero = {1.0f, 0.0f};
      if constexpr (kBits != 16) scale_zero = metadata_of(metadata, token);
      const float score = fmaf(dot * scale_log2_, scale_zero.x, query_sum_ * scale_zero.y);
      if (in_group == 0 && token < tokens) scores_[token] = score;
    }
  }

  // Scores become weights: p times the scale of the value. v_metadata is null for raw values.
  __device__ __forceinline__ void weigh(const uint8_t* v_metadata, int32_t tokens) {
    float largest = reference_;
    for (int32_t i = lane_; i < tokens; i += 32) largest = fmaxf(largest, scores_[i]);
#pragma unroll
    for (int32_t i = 1; i < 32; i *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, i));
    }
    const float kept = exp2_fast(reference_ - largest);
    reference_ = largest;
    sum_ *= kept;
    zero_ *= kept;
#pragma unroll
    for (int32_t o = 0; o < kOutDims; ++o) out_[o] *= kept;
    for (int32_t i = lane_; i < tokens; i += 32) {
      const float p = exp2_fast(scores_[i] - largest);
      float2 scale_zero = {1.0f, 0.0f};
      if (v_metadata != nullptr) scale_zero = metadata_of(v_metadata, i);
      sum_ += p;
      zero_ = fmaf(p, scale_zero.y, zero_);
      scores_[i] = p * scale_zero.x;
    }
  }

  // Tokens behind `tokens` are not looked at: raw ones may be NaN.
  template <int32_t kBits>
  __device__ __forceinline__ void add_values(const uint8_t* codes, int32_t page_tokens,
                                             int32_t tokens) {
    constexpr int32_t kVector = diffkv_value_vector(kBits);
    constexpr int32_t kGroups = 32 / kDiffkvValueGroup, kWords = kVector * kBits / 32;
    const int32_t in_group = lane_ % kDiffkvValueGroup;
    for (int32_t v = lane_ / kDiffkvValueGroup; v * kVector < tokens; v += kGroups) {
      float weights[kVector];
#pragma unroll
      for (int32_t i = 0; i < kVector; ++i) {
        weights[i] = v * kVector + i < tokens ? scores_[v * kVector + i] : 0.0f;
      }
#pragma unroll
      for (int32_t o = 0; o < kOutDims; ++o) {
        const int32_t piece = (o * (page_tokens / kVector) + v) * kDiffkvValueGroup + in_group;
        uint32_t words[kWords];
        load_words<kWords>(codes + piece * kWords * 4, words);
#pragma unroll
        for (int32_t i = 0; i < kVector; ++i) {
          const bool counts = kBits != 16 || v * kVector + i < tokens;
          const float x = counts ? value_of<kBits>(words, i) : 0.0f;
          out_[o] = fmaf(weights[i], x, out_[o]);
        }
      }
    }
  }
  template <int32_t kWords>
  __device__ __forceinline__ static void load_words(const uint8_t* from, uint32_t (&to)[kWords]) {
    if constexpr (kWords == 4) {
      const auto x = *reinterpret_cast<const uint4*>(from);
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (kWords == 2) {
      const auto x = *reinterpret_cast<const uint2*>(from);
      to[0] = x.x, to[1] = x.y;
    } else {
      to[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }

  const float* query_;
  float* scores_;
  float scale_log2_, query_sum_;
  int32_t lane_;
  float reference_ = kNoReference, sum_ = 0.0f, zero_ = 0.0f;  // sums of this lane's tokens
  float out_[kOutDims] = {};                                   // of this lane's tokens
};

// Grid: [rows][splits][group], the heads of a group side by side.
__global__ void __launch_bounds__(kDiffkvThreads, 4)
    diffkv_kernel(const __grid_constant__ RungParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  constexpr DiffkvShared kAt = diffkv_shared();
  auto* query = reinterpret_cast<float*>(shared_bytes + kAt.query);
  auto* parts = reinterpret_cast<float*>(shared_bytes + kAt.parts);
  auto* states = reinterpret_cast<SoftmaxState*>(shared_bytes + kAt.states);
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int32_t warp = threadIdx.x / 32;
  const int32_t head = blockIdx.x % p.group, part = blockIdx.x / p.group;
  const int32_t row = part / p.splits, split = part - row * p.splits;
  const int64_t column = static_cast<int64_t>(row) * p.group + head;
  query[threadIdx.x] = __half2float(
      static_cast<const __half*>(p.q)[column * kRungHeadDim + static_cast<int32_t>(threadIdx.x)]);
  __syncthreads();
  auto* scores = reinterpret_cast<float*>(shared_bytes + kAt.scores);
  DiffkvWarp attention(query, scores + warp * kDiffkvMaxPageTokens, p.scale_log2);
  const RowChunks pages(p, row);
  const int32_t end = pages.part_begin(split + 1, p.splits);
  for (int32_t i = pages.part_begin(split, p.splits) + warp; i < end; i += kDiffkvWarps) {
    const RowChunk chunk = pages.at(i);
    const uint8_t* page = page_of(p, chunk);
    if (page != nullptr) attention.attend(page, chunk.tokens, p.rows.tiers[chunk.tier]);
  }
  attention.store(states + warp, parts + warp * kRungHeadDim);
  __syncthreads();
  if (warp != 0) return;
  leave_head(p, row, split, head, even_parts(states, parts, 1, kRungHeadDim, kDiffkvWarps));
}

}  // namespace tierkv
