// SPDX-License-Identifier: Apache-2.0
// Rung 2: tensor cores in BitDecoding's form (its sections IV and V).
//
// The four warps of a CTA take a tile of 16 tokens each for the scores and 32 dims each for the
// output (query_as_a_tile.cuh); between the two they agree on the maximum and exchange the weights
// through shared memory (cooperative softmax). Two chunks at a time arrive by cp.async, one step
// ahead. Every CTA takes a split of one row; a second kernel merges.
#pragma once

#include "bench/baselines/rungs/query_as_a_tile.cuh"
#include "bench/baselines/rungs/row_chunks.cuh"
#include "bench/baselines/rungs/row_parts.cuh"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

class CoopCta {
 public:
  __device__ __forceinline__ CoopCta(const RungParams& p, uint8_t* shared, int32_t slot_bytes)
      : p_(p),
        stages_(shared),
        slot_bytes_(slot_bytes),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {
    const CoopShared at = coop_shared(slot_bytes);
    chunks_ = reinterpret_cast<CoopChunk*>(shared + at.chunks);
    weights_ = reinterpret_cast<__half*>(shared + at.weights);
    maxima_ = reinterpret_cast<float*>(shared + at.maxima);
    sums_ = reinterpret_cast<float*>(shared + at.sums);
    states_ = reinterpret_cast<SoftmaxState*>(shared + at.states);
    parts_ = reinterpret_cast<float*>(shared);
  }

  // Two threads look up the chunks of a step while the one before it is attended; what they found
  // lies in shared memory when all meet.
  __device__ __forceinline__ void run() {
    const int32_t row = blockIdx.x / p_.splits, split = blockIdx.x - row * p_.splits;
    const RowChunks chunks(p_, row);
    const int32_t begin = chunks.part_begin(split, p_.splits);
    const int32_t end = chunks.part_begin(split + 1, p_.splits);
    const int32_t steps = ceil_div(end - begin, kCoopChunks);
    const auto c = static_cast<int32_t>(threadIdx.x);
    const auto look_up = [&](int32_t step) {
      const int32_t i = begin + step * kCoopChunks + c;
      return i < end ? chunks.at(i) : kNoChunk;
    };
    const auto show = [&](int32_t step, const RowChunk& chunk) {
      const uint8_t* page = page_of(p_, chunk);
      const bool is_there = page != nullptr && chunk.tokens > 0;
      chunks_[step % kCoopSteps * kCoopChunks + c] = {
          page, chunk.tier, chunk.tile, is_there ? chunk.tiles : 0, is_there ? chunk.tokens : 0};
    };
    query_.load(p_, row, lane_);
    for (int32_t step = 0; step < 2 && c < kCoopChunks; ++step) show(step, look_up(step));
    __syncthreads();
    start_copies(0);
    for (int32_t step = 0; step < steps; ++step) {
      wait_copies<0>();
      __syncthreads();  // the step is here for all, and all are done with the one before it
      start_copies(step + 1);
      RowChunk ahead = kNoChunk;
      if (c < kCoopChunks) ahead = look_up(step + 2);
      attend(step);
      if (c < kCoopChunks) show(step + 2, ahead);
    }
    leave(row, split);
  }

 private:
  __device__ __forceinline__ void copy_run(uint8_t* to, const uint8_t* from, int32_t bytes) const {
#pragma unroll 4
    for (int32_t at = 16 * threadIdx.x; at < bytes; at += 16 * kCoopThreads) {
      copy_async_16(to + at, from + at, true);
    }
  }

  __device__ __forceinline__ uint8_t* slot(int32_t step, int32_t c) const {
    return stages_ + (step % kCoopStages * kCoopChunks + c) * slot_bytes_;
  }

  // A page is one run of bytes, a part of one four, one behind another.
  __device__ __forceinline__ void start_copies(int32_t step) {
#pragma unroll 1
    for (int32_t c = 0; c < kCoopChunks; ++c) {
      const CoopChunk& chunk = chunks_[step % kCoopSteps * kCoopChunks + c];
      if (chunk.tokens == 0) continue;
      const TierSource& tier = p_.rows.tiers[chunk.tier];
      uint8_t* to = slot(step, c);
      if (chunk.tiles == tier.page_tiles) {
        copy_run(to, chunk.page + tier.segment[0], tier.page_bytes);
        continue;
      }
      for (int32_t s = 0; s < 4; ++s) {
        const int32_t tile_bytes = tier.segment_tile[s];
        copy_run(to, chunk.page + tier.segment[s] + chunk.tile * tile_bytes,
                 chunk.tiles * tile_bytes);
        to += chunk.tiles * tile_bytes;
      }
    }
    close_copy_group();
  }

  // Chunks of two formats go one by one.
  __device__ __forceinline__ void attend(int32_t step) {
    const CoopChunk* both = chunks_ + step % kCoopSteps * kCoopChunks;
    const bool has_a = both[0].tokens > 0, has_b = both[1].tokens > 0;
    if (has_a && has_b && both[0].tier != both[1].tier) {
      attend_format(step, both[0].tier, 0, 1);
      attend_format(step, both[1].tier, 1, 2);
    } else if (has_a || has_b) {
      attend_format(step, both[has_a ? 0 : 1].tier, 0, 2);
    }
  }

  // Chunks first .. last - 1 of a step, at least one with tokens, all of these of one tier.
  __device__ __forceinline__ void attend_format(int32_t step, int32_t tier, int32_t first,
                                                int32_t last) {
    switch (p_.rows.tiers[tier].format) {
      case pair_format(kRawCodes, kRawCodes):
        return attend_step<kRawCodes, kRawCodes>(step, first, last);
      case pair_format(kCodes8, kCodes4):
        return attend_step<kCodes8, kCodes4>(step, first, last);
      case pair_format(kCodes4, kCodes4):
        return attend_step<kCodes4, kCodes4>(step, first, last);
      default:
        return attend_step<kCodes4, kCodes2>(step, first, last);
    }
  }

  template <CodeType kKeys, CodeType kValues>
  __device__ __forceinline__ void attend_step(int32_t step, int32_t first, int32_t last) {
    using At = CoopSegments<kKeys, kValues>;
    const CoopChunk* chunks = chunks_ + step % kCoopSteps * kCoopChunks;
    int32_t tiles[kCoopChunks], tokens[kCoopChunks];
#pragma unroll
    for (int32_t c = 0; c < kCoopChunks; ++c) {
      const bool counts = c >= first && c < last;
      tiles[c] = counts ? chunks[c].tiles : 0;
      tokens[c] = counts ? chunks[c].tokens : 0;
    }
    float scores[kCoopChunks][2][2];  // [token half]: row g, tokens 2t and 2t + 1 of a tile
#pragma unroll
    for (int32_t c = 0; c < kCoopChunks; ++c) {
      scores[c][0][0] = scores[c][0][1] = scores[c][1][0] = scores[c][1][1] = -INFINITY;
      if (warp_ >= tiles[c]) continue;
      const At at(slot(step, c), chunks[c].tiles);
      query_.score<kKeys>(at.k_codes + warp_ * At::kKeyBytes,
                          at.k_metadata + warp_ * kMetadataBlockBytes,
                          tokens[c] - warp_ * kTileTokens, p_.scale_log2, lane_, scores[c]);
    }
    share_weights(scores);
#pragma unroll
    for (int32_t c = 0; c < kCoopChunks; ++c) {
      const At at(slot(step, c), chunks[c].tiles);
#pragma unroll
      for (int32_t i = 0; i < kCoopTiles; i += 2) {
        if (i >= tiles[c]) break;
        uint32_t weights[4];  // tokens 0..7, 8..15 of tile i, then of i + 1
        load_matrices(weights, weights_ + lane_ % 8 * kWeightStride +
                                   (c * kCoopTiles + i) * kTileTokens + lane_ / 8 * 8);
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          if (i + j >= tiles[c]) break;
          const uint32_t pair[2] = {weights[2 * j], weights[2 * j + 1]};
          out_.add<kValues>(at.v_codes + (i + j) * At::kValueBytes,
                            at.v_metadata + (i + j) * kMetadataBlockBytes,
                            tokens[c] - (i + j) * kTileTokens, pair, warp_, lane_);
        }
      }
    }
  }

  // The warps agree on the maximum of every row and show each other their weights. The step has a
  // token, so the maximum is finite.
  __device__ __forceinline__ void share_weights(const float (&scores)[kCoopChunks][2][2]) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    float largest = -INFINITY;
#pragma unroll
    for (int32_t c = 0; c < kCoopChunks; ++c) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        largest = fmaxf(largest, fmaxf(scores[c][half][0], scores[c][half][1]));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
    if (t == 0) maxima_[warp_ * kRungMaxGroup + g] = largest;
    __syncthreads();
    largest = reference_;
#pragma unroll
    for (int32_t w = 0; w < kCoopWarps; ++w) {
      largest = fmaxf(largest, maxima_[w * kRungMaxGroup + g]);
    }
    const float kept = exp2_fast(reference_ - largest);
    reference_ = largest;
    sum_ *= kept;
    out_.rescale(kept);
#pragma unroll
    for (int32_t c = 0; c < kCoopChunks; ++c) {
      __half* to = weights_ + g * kWeightStride + (c * kCoopTiles + warp_) * kTileTokens + 2 * t;
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const float low = exp2_fast(scores[c][half][0] - largest);
        const float high = exp2_fast(scores[c][half][1] - largest);
        sum_ += low + high;
        *reinterpret_cast<uint32_t*>(to + 8 * half) = pack_halves(low, high);
      }
    }
    __syncthreads();
  }

  // The CTA's part: states and sums of all warps, 32 dims of each.
  __device__ __forceinline__ void leave(int32_t row, int32_t split) {
    const int32_t g = lane_ / 4, t = lane_ % 4;
    wait_copies<0>();
    __syncthreads();
    float sum = sum_ + __shfl_xor_sync(kFullWarp, sum_, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (t == 0) sums_[warp_ * kRungMaxGroup + g] = sum;
#pragma unroll
    for (int32_t n = 0; n < kCoopWarpTiles; ++n) {
      float* to = parts_ + g * kRungHeadDim + warp_ * kCoopWarpDims + 8 * n + 2 * t;
      to[0] = out_.tile[n][0];
      to[1] = out_.tile[n][1];
    }
    __syncthreads();
    if (warp_ == 0 && t == 0) {
      float all = 0.0f;
      for (int32_t w = 0; w < kCoopWarps; ++w) all += sums_[w * kRungMaxGroup + g];
      states_[g] = {reference_, all};
    }
    __syncthreads();
    for (int32_t head = warp_; head < p_.group; head += kCoopWarps) {
      leave_head(p_, row, split, head,
                 even_parts(states_ + head, parts_ + head * kRungHeadDim, 0, 0, 1));
    }
  }

  const RungParams& p_;
  uint8_t* stages_;
  int32_t slot_bytes_, warp_, lane_;
  CoopChunk* chunks_;
  __half* weights_;
  float *maxima_, *sums_;
  SoftmaxState* states_;
  float* parts_;
  CoopQuery query_;
  CoopOutput out_;
  float reference_ = kNoReference;  // of row g
  float sum_ = 0.0f;                // of row g, this lane's tokens
};

__global__ void __launch_bounds__(kCoopThreads, 4)
    query_as_a_kernel(const __grid_constant__ RungParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  let_next_kernel_start();
  wait_for_previous_kernel();
  CoopCta cta(p, shared_bytes, p.slot_bytes);
  cta.run();
}

}  // namespace tierkv
