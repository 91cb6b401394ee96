// SPDX-License-Identifier: Apache-2.0
// A warp's part of scores = K q: block after block, each complete in itself.
#pragma once

#include "attention/coded/coded_warp.cuh"
#include "bench/baselines/matvec/coded_matvec_warp.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

template <int kDimBlocks, class CodeOfBlocks>
struct ScoreWarp : MatvecBlocks<kDimBlocks, CodeOfBlocks> {
  using Blocks = MatvecBlocks<kDimBlocks, CodeOfBlocks>;
  using Code = CodeOfBlocks;
  static constexpr Component kComponent = Component::kKey;
  using Blocks::kHeadDim;
  // B operand: dims 2t, 2t + 1 (+ 8) of column g, times a power of two that brings the largest to
  // [1/4, 1/2): times any fp16 step they are finite.
  uint32_t q[kDimBlocks][2];
  float unit[2];  // of columns 2t, 2t + 1: brings sums to scores

  __device__ __forceinline__ void begin_row(int32_t row) {
    const CodedMatvec& call = this->params.call;
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const uint16_t* query =
        call.x + (int64_t{row} * this->params.row_columns + g) * kHeadDim + 2 * t;
    float largest = 0;
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        q[f][h] = 0;
        if (g < call.columns) {
          q[f][h] = *reinterpret_cast<const uint32_t*>(query + 16 * f + 8 * h);
        }
        const float2 x = unpack_halves(q[f][h]);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    // 2^13 is the largest power of two below which an fp16 factor is finite for all.
    const int32_t exponent = max(exponent_of(column_max(largest)) + 2, -13);
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) q[f][h] = multiply_halves(q[f][h], power_of_two(-exponent));
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      unit[c] = call.scale * power_of_two(__shfl_sync(kFullWarp, exponent, 4 * (2 * t + c)));
    }
  }

  // Block i of the run, of `tokens` tokens, item `item` of all: scores from token `first` of row
  // `row` on.
  __device__ __forceinline__ void block(int32_t i, int32_t tokens, int32_t item, int32_t row,
                                        int32_t first) {
    const OpenBlock b = this->open(i, tokens);
    uint32_t scaled[kDimBlocks][2];  // q * step
    float low[4] = {}, total[4] = {};
    multiply_units(scaled, low, total);
    float s[kItemTiles][4] = {};
    if (b.coded) {
      score_coded(b, scaled, s);
    } else if (this->bad == 0) {
      score_raw(b, scaled, s);
    }
    const bool valid = __all_sync(kFullWarp, this->bad == 0);
    this->next(i);
    if (is_first_lane()) {
      this->params.call.status[item] = valid ? StatusCode::kOk : StatusCode::kCorrupt;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) low[c] = fmaf(this->base(), total[c], low[c]);
    write(s, low, valid, tokens, row, first);
  }
  __device__ __forceinline__ void end_row(int32_t, int32_t) {}
  // Items that no row explains.
  __device__ __forceinline__ void refuse(int32_t first, int32_t count, int32_t, int32_t) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < count; i += 32) {
      this->params.call.status[first + i] = StatusCode::kCorrupt;
    }
  }

 private:
  // low: sum of q * low, total: sum of q * step, of columns 2t and 2t + 1 in 0 and 1.
  __device__ __forceinline__ void multiply_units(uint32_t (&scaled)[kDimBlocks][2], float (&low)[4],
                                                 float (&total)[4]) {
    const int32_t t = static_cast<int32_t>(threadIdx.x % 4);
    constexpr uint32_t ones[4] = {kOneHalves, kOneHalves, kOneHalves, kOneHalves};
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t dim = 16 * f + 8 * h + 2 * t;
        scaled[f][h] = multiply_half_pairs(q[f][h], this->unit_word(dim));
        a[2 * h] = a[2 * h + 1] = this->unit_word(dim, kHeadDim);
      }
      mma_m16n8k16(low, a, q[f][0], q[f][1]);
    }
    if (this->params.call.codebook.base == 0) return;
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) mma_m16n8k16(total, ones, scaled[f][0], scaled[f][1]);
  }

  __device__ __forceinline__ void score_coded(const OpenBlock& b,
                                              const uint32_t (&scaled)[kDimBlocks][2],
                                              float (&s)[kItemTiles][4]) {
    typename Decoding<Code>::Streams streams;
    this->bad |= streams.open(b);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4] = {};
      if (o < tiles) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          streams.fragment(this->table, a);
          mma_m16n8k16(tile, a, scaled[f][0], scaled[f][1]);
        }
      }
      push_tile(s, tile);
    }
    this->bad |= streams.ends(b);
#pragma unroll 1
    for (int32_t i = 0; i < b.exceptions(); i += kExceptionStep) score_exceptions(b, i, scaled, s);
  }

  __device__ __forceinline__ void score_exceptions(const OpenBlock& b, int32_t first,
                                                   const uint32_t (&scaled)[kDimBlocks][2],
                                                   float (&s)[kItemTiles][4]) {
    ExceptionPair pair;
    const uint32_t words = b.exception_words + 4 * first;
    const int32_t left = b.exceptions() - first;
    this->bad |= pair.template load<kHeadDim>(words, left, b.tokens);
    // The channels are those of other lanes.
    const uint32_t dim = exception_of_row(words, left) % kSliceDims;
    const uint32_t weights = pick_rows(static_cast<int32_t>(dim), scaled);
    const uint32_t rows = ExceptionPair::row_halves(pair.token);
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      uint32_t a[2];
      pair.operand(rows, 16 * o, a);
      mma_m16n8k8(s[o], a, weights);
    }
  }

  __device__ __forceinline__ void score_raw(const OpenBlock& b,
                                            const uint32_t (&scaled)[kDimBlocks][2],
                                            float (&s)[kItemTiles][4]) {
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4] = {};
      if (o < tile_count(b.tokens)) {
#pragma unroll
        for (int f = 0; f < kDimBlocks; ++f) {
          uint32_t a[4];
          raw_fragment(this->raw, kHeadDim, Component::kKey, o, f, a);
          mma_m16n8k16(tile, a, scaled[f][0], scaled[f][1]);
        }
      }
      push_tile(s, tile);
    }
  }

  __device__ __forceinline__ void write(const float (&s)[kItemTiles][4], const float (&low)[4],
                                        bool valid, int32_t tokens, int32_t row, int32_t first) {
    const CodedMatvec& call = this->params.call;
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (2 * t + c >= call.columns) continue;
      float* to = call.y +
                  (int64_t{row} * this->params.row_columns + 2 * t + c) * call.token_stride + first;
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t token = 16 * o + 8 * h + g;
          if (token >= tokens) continue;
          to[token] = valid ? unit[c] * fmaf(kDigitScale, s[o][2 * h + c], low[c]) : 0.0f;
        }
      }
    }
  }
};

}  // namespace tierkv
