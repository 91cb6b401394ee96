// SPDX-License-Identifier: Apache-2.0
// A warp's part of out = p^T V: the sum over its blocks of a row.
#pragma once

#include "attention/coded/coded_warp.cuh"
#include "bench/baselines/matvec/coded_matvec_warp.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// What a warp leaves of a row: `columns` sums of head_dim floats, then whether the blocks were
// right. Warp w and row r share partial w + r, as in coded attention.
__device__ __forceinline__ int64_t output_partial_floats(const CodedMatvec& call) {
  return int64_t{call.columns} * call.head_dim + 4;
}

template <int kDimBlocks, class CodeOfBlocks>
struct OutputWarp : MatvecBlocks<kDimBlocks, CodeOfBlocks> {
  using Blocks = MatvecBlocks<kDimBlocks, CodeOfBlocks>;
  using Code = CodeOfBlocks;
  static constexpr Component kComponent = Component::kValue;
  using Blocks::kHeadDim;
  using Weights = uint32_t[kItemTiles][2];
  float out[kDimBlocks][4];  // sums of digits times 2^-18 times weight
  float total[4];            // sums of weights, of columns 2t, 2t + 1 in 0 and 1
  float low[4];              // sums of p * low, likewise
  // A weight is p * step * reach, of column g; in fp16, so that the largest so far lies below
  // 2^kMostExponent. reach is a power of two.
  float reach;
  uint32_t row_bad;
  static constexpr int32_t kMostExponent = 15, kNewExponent = 12, kFirstReach = 100;

  __device__ __forceinline__ void begin_row(int32_t) {
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[f][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = low[i] = 0.0f;
    reach = power_of_two(kFirstReach);
    row_bad = 0;
  }

  __device__ __forceinline__ void block(int32_t i, int32_t tokens, int32_t, int32_t row,
                                        int32_t first) {
    Weights p;
    const bool whole = tokens == kBlockTokens;
    if (whole) {
      load_weights<true>(p, tokens, row, first);
    } else {
      load_weights<false>(p, tokens, row, first);
    }
    const OpenBlock b = this->open(i, tokens);
    if (whole) {
      multiply_units<true>(p, tokens);
    } else {
      multiply_units<false>(p, tokens);
    }
    if (b.coded) {
      add_coded(b, p);
    } else if (this->bad == 0) {
      add_raw(b, p);
    }
    row_bad |= this->bad;
    this->next(i);
  }

  // The partial of the row.
  __device__ __forceinline__ void end_row(int32_t row, int32_t warp) {
    const CodedMatvec& call = this->params.call;
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const bool valid = __all_sync(kFullWarp, row_bad == 0);
    float* partial =
        static_cast<float*>(call.workspace) + (int64_t{warp} + row) * output_partial_floats(call);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float unit = 1.0f / __shfl_sync(kFullWarp, reach, 4 * (2 * t + c));
      if (2 * t + c >= call.columns) continue;
      float* to = partial + (2 * t + c) * kHeadDim;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float digits = fmaf(kDigitScale, out[f][2 * h + c], this->base() * total[c]);
          to[16 * f + g + 8 * h] = fmaf(unit, digits, low[c]);
        }
      }
    }
    if (is_first_lane()) partial[call.columns * kHeadDim] = valid ? 0.0f : 1.0f;
  }
  __device__ __forceinline__ void refuse(int32_t, int32_t, int32_t row, int32_t warp) {
    begin_row(row);
    row_bad = 1;
    end_row(row, warp);
  }

 private:
  // The B operand of P^T: tokens 2t, 2t + 1 (+ 8) of column g; zeros behind the row's end. kWhole:
  // the block has 64 tokens.
  template <bool kWhole>
  __device__ __forceinline__ void load_weights(Weights& p, int32_t tokens, int32_t row,
                                               int32_t first) const {
    const CodedMatvec& call = this->params.call;
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
    const uint16_t* from =
        call.x + (int64_t{row} * this->params.row_columns + g) * call.token_stride + first;
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t token = 16 * o + 8 * h + 2 * t;
        p[o][h] = 0;
        if (g < call.columns && (kWhole || token < tokens)) {
          p[o][h] =
              keep_tokens<kWhole>(*reinterpret_cast<const uint32_t*>(from + token), token, tokens);
        }
      }
    }
  }
  // Two halves, of `token` and the next one.
  template <bool kWhole>
  __device__ __forceinline__ static uint32_t keep_tokens(uint32_t word, int32_t token,
                                                         int32_t tokens) {
    if constexpr (kWhole) return word;
    return token + 1 < tokens ? word : token < tokens ? word & 0xffffu : 0;
  }

  // From p to weights.
  template <bool kWhole>
  __device__ __forceinline__ void multiply_units(Weights& p, int32_t tokens) {
    const int32_t t = static_cast<int32_t>(threadIdx.x % 4);
    float2 weight[kItemTiles][2];
    float top = 0.0f;
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
      uint32_t a[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t token = 16 * o + 8 * h + 2 * t;
        const uint32_t lows =
            keep_tokens<kWhole>(this->unit_word(token, kBlockTokens), token, tokens);
        a[2 * h] = a[2 * h + 1] = lows;
        const float2 x = unpack_halves(p[o][h]);
        const float2 step =
            unpack_halves(keep_tokens<kWhole>(this->unit_word(token), token, tokens));
        weight[o][h] = {x.x * step.x, x.y * step.y};
        top = fmaxf(top, fmaxf(fabsf(weight[o][h].x), fabsf(weight[o][h].y)));
      }
      mma_m16n8k16(low, a, p[o][0], p[o][1]);
    }
    shorten_reach(column_max(top));
    constexpr uint32_t ones[4] = {kOneHalves, kOneHalves, kOneHalves, kOneHalves};
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        p[o][h] = pack_halves(weight[o][h].x * reach, weight[o][h].y * reach);
      }
      mma_m16n8k16(total, ones, p[o][0], p[o][1]);
    }
  }
  // Where weights up to `top` of column g would be too large; seldom after a row's first block.
  __device__ __forceinline__ void shorten_reach(float top) {
    const bool beyond = top * reach >= power_of_two(kMostExponent);
    if (!__any_sync(kFullWarp, beyond)) return;
    float factor = 1.0f;
    if (beyond) {
      const float shorter = power_of_two(kNewExponent - exponent_of(top));
      factor = shorter / reach;
      reach = shorter;
    }
    const int32_t t = static_cast<int32_t>(threadIdx.x % 4);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float mine = __shfl_sync(kFullWarp, factor, 4 * (2 * t + c));
      total[c] *= mine;
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) out[f][c] *= mine, out[f][c + 2] *= mine;
    }
  }

  // Uses p up.
  __device__ __forceinline__ void add_coded(const OpenBlock& b, Weights& p) {
    typename Decoding<Code>::Streams streams;
    this->bad |= streams.open(b);
#pragma unroll 1
    for (int32_t i = 0; i < b.exceptions(); i += kExceptionStep) add_exceptions(b, i, p);
    const int32_t tiles = tile_count(b.tokens);
#pragma unroll 1
    for (int o = 0; o < tiles; ++o) {
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        streams.fragment(this->table, a);
        mma_m16n8k16(out[f], a, p[0][0], p[0][1]);
      }
      shift_tiles(p);
    }
    this->bad |= streams.ends(b);
  }

  __device__ __forceinline__ void add_exceptions(const OpenBlock& b, int32_t first,
                                                 const Weights& p) {
    ExceptionPair pair;
    const uint32_t words = b.exception_words + 4 * first;
    const int32_t left = b.exceptions() - first;
    this->bad |= pair.template load<kHeadDim>(words, left, b.tokens);
    const uint32_t rows = ExceptionPair::row_halves(pair.dim);
    const uint32_t weights = exception_weights(words, left, p);
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[2];
      pair.operand(rows, 16 * f, a);
      mma_m16n8k8(out[f], a, weights);
    }
  }

  __device__ __forceinline__ void add_raw(const OpenBlock& b, Weights& p) {
#pragma unroll 1
    for (int o = 0; o < tile_count(b.tokens); ++o) {
#pragma unroll
      for (int f = 0; f < kDimBlocks; ++f) {
        uint32_t a[4];
        raw_fragment(this->raw, kHeadDim, Component::kValue, o, f, a);
        mma_m16n8k16(out[f], a, p[0][0], p[0][1]);
      }
      shift_tiles(p);
    }
  }
};

}  // namespace tierkv
