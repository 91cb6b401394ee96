// SPDX-License-Identifier: Apache-2.0
// The codes of a block's tokens by a warp, to each lane those of its streams
// (codec/format/fragment_order.h): matrix loads give every lane its pairs of a staged tile.
//
// RoPE that turns channels half a head apart has both in one lane, in fragments that follow each
// other in the streams. Any other rotation looks its partners up in shared memory.
#pragma once

#include "codec/gpu/coded/coded_symbols.cuh"
#include "codec/gpu/coded/weighted_stage.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// Bits of a lane's codes in a fragment; kPaddingBits of padding, kNoQuickCode of what is no code.
using QuickFragment = uint32_t[kPairsPerFragment][2];

// kFolded: RoPE in halves over the whole head, by aligned tables.
enum class RopeWay { kNone, kFolded, kAny };

__device__ __forceinline__ RopeWay rope_way(const WeightedBlockJob& job) {
  if (job.component == Component::kValue || job.pairs == 0) return RopeWay::kNone;
  const uintptr_t tables =
      reinterpret_cast<uintptr_t>(job.place) | reinterpret_cast<uintptr_t>(job.block);
  const bool folded = job.pairing == RopePairing::kHalves && 2 * job.pairs == job.head_dim;
  return folded && tables % 16 == 0 ? RopeWay::kFolded : RopeWay::kAny;
}

// The staged tile of a block, as a lane reads it.
template <int32_t kDims, bool kKey>
struct TileReader {
  static constexpr int32_t kPitch = stage_pitch(kDims);
  const WeightedBlockJob& job;
  const KeyChannels* channels;
  const uint8_t* stage;
  const int8_t* exponents;
  const uint8_t* row;  // of the matrix loads
  int32_t tile, quarter;
  bool is_bfloat16, is_coded;  // all tokens are coded already
  bool is_special;             // some are, or there are fewer than 16
  int32_t token[2];            // rows of the stage: keys by r % 2, values by r / 2 the first
  float factor[2][2];  // keys: 1 / f(e) by r % 2; values: times 1 / scale, by r / 2 and half

  __device__ __forceinline__ TileReader(const TileMemory& memory, int32_t of_tile)
      : job(memory.warp->job),
        channels(memory.channels),
        stage(memory.stage),
        exponents(memory.warp->exponents),
        tile(of_tile) {
    const int32_t l = lane_index(), i = l / 8;
    quarter = l % 4;
    row = stage + (l % 8 + 8 * (kKey ? i % 2 : i / 2)) * kPitch + 16 * (kKey ? i / 2 : i % 2);
    is_bfloat16 = job.dtype == DType::kBFloat16;
    const int32_t first = tile * kTileTokens;
    is_coded = first + kTileTokens <= job.coded;
    is_special = first < job.coded || first + kTileTokens > job.tokens;
    const float* factors = memory.warp->inverse_factors + first;
    const float inverse = kKey ? 1.0f : QuickCode::inverse_of(job.scales[0]);
#pragma unroll
    for (int32_t n = 0; n < 2; ++n) {
      token[n] = (kKey ? l / 4 : 2 * quarter) + 8 * n;
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        factor[n][h] = kKey ? factors[token[n]] : mul_rn(inverse, factors[token[n] + h]);
      }
    }
  }
  // f: of the head.
  __device__ __forceinline__ void load(int32_t f, uint32_t (&words)[kPairsPerFragment]) const {
    if constexpr (kKey) {
      load_matrices(words, row + 32 * f);
    } else {
      load_matrices_transposed(words, row + 32 * f);
    }
  }
  __device__ __forceinline__ void unpack(const uint32_t (&words)[kPairsPerFragment],
                                         float (&y)[kPairsPerFragment][2]) const {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const float2 both = unpack_elements(is_bfloat16, words[r]);
      y[r][0] = both.x, y[r][1] = both.y;
    }
  }
  // f: of the head. y: values before RoPE, then less their means.
  __device__ __forceinline__ void quick_codes(int32_t f, const uint32_t (&words)[kPairsPerFragment],
                                              float (&y)[kPairsPerFragment][2],
                                              QuickFragment& codes) const {
    float off[kPairsPerFragment][2];
#pragma unroll
    for (int32_t n = 0; n < 2; ++n) {  // r / 2
      KeyChannels c;
      if constexpr (kKey) c = channels[8 * f + 4 * n + quarter];
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t r = 2 * n + i / 2, h = i % 2;
        float inverse = factor[n][h];
        if constexpr (kKey) {
          y[r][h] = add_rn(y[r][h], -c.mean[h]);
          inverse = mul_rn(c.inverse[h], factor[r % 2][0]);
        }
        const QuickCode quick = QuickCode::of(y[r][h], inverse);
        codes[r][h] = quick.bits;
        off[r][h] = quick.off;
      }
    }
    if (is_special) mark_special(words, codes, off);
    bool sure = true;
#pragma unroll
    for (int32_t i = 0; i < 2 * kPairsPerFragment; ++i) sure &= off[i / 2][i % 2] < kSureOff;
    if (!sure) resolve(f, y, off, codes);
  }
  __device__ __forceinline__ static uint32_t bits_of_code(uint32_t word, int32_t h) {
    return kQuickBits + static_cast<uint32_t>(int32_t{static_cast<int16_t>(word >> (16 * h))});
  }
  // Little code, because it is seldom in the instruction cache.
  __device__ __forceinline__ void resolve(int32_t f, const float (&y)[kPairsPerFragment][2],
                                          const float (&off)[kPairsPerFragment][2],
                                          QuickFragment& codes) const {
    uint32_t doubts = 0;
#pragma unroll
    for (int32_t i = 0; i < 2 * kPairsPerFragment; ++i) {
      doubts |= off[i / 2][i % 2] < kSureOff ? 0u : 1u << i;
    }
#pragma unroll 1
    for (; doubts != 0; doubts &= doubts - 1) {
      const int32_t which = lowest_bit(doubts), r = which / 2, h = which % 2;
      float mine = y[0][0];
#pragma unroll
      for (int32_t i = 1; i < 2 * kPairsPerFragment; ++i)
        mine = i == which ? y[i / 2][i % 2] : mine;
      const PairPosition p =
          pair_position(kKey ? Component::kKey : Component::kValue, tile, f, r, lane_index());
      const int32_t t = kKey ? p.token : p.token + h;
      const uint32_t bits = t < job.tokens
                                ? exact_bits(&job, mine, kKey ? p.dim + h : 0, exponents[t])
                                : kNoQuickCode;
#pragma unroll
      for (int32_t i = 0; i < 2 * kPairsPerFragment; ++i) {
        codes[i / 2][i % 2] = i == which ? bits : codes[i / 2][i % 2];
      }
    }
  }
  // Place of a token's pair r and half in the tile.
  __device__ __forceinline__ int32_t token_of(int32_t r, int32_t h) const {
    return kKey ? token[r % 2] : token[r / 2] + h;
  }
  // Leaves no doubt about those of padding and of coded tokens, whose elements mean no numbers.
  __device__ __forceinline__ void mark_special(const uint32_t (&words)[kPairsPerFragment],
                                               QuickFragment& codes,
                                               float (&off)[kPairsPerFragment][2]) const {
#pragma unroll
    for (int32_t i = 0; i < 2 * kPairsPerFragment; ++i) {
      const int32_t r = i / 2, h = i % 2, t = tile * kTileTokens + token_of(r, h);
      if (t >= job.tokens) {
        codes[r][h] = kPaddingBits, off[r][h] = 0;
      } else if (t < job.coded) {
        codes[r][h] = bits_of_code(words[r], h), off[r][h] = 0;
      }
    }
  }
  // The table's row for a row of the stage.
  __device__ __forceinline__ const Turn* places(int32_t row_of_stage) const {
    const int32_t t = min(tile * kTileTokens + row_of_stage, job.tokens - 1);
    return job.place + (job.place_of_first + t) * job.pairs;
  }
};

// take(f of the slice, codes) of a tile's fragments in the order of the streams. turn(f, y) changes
// the values of a fragment, whose number in the slice is f, before they are coded. Tiles that are
// coded already need none of the arithmetic.
template <int32_t kDims, bool kKey, class Turn, class Take>
__device__ __forceinline__ void take_fragments(const TileReader<kDims, kKey>& tile, int32_t slice,
                                               const Turn& turn, const Take& take) {
  using Slices = SlicesOf<kDims>;
  constexpr auto kComponent = kKey ? Component::kKey : Component::kValue;
#pragma unroll 1
  for (int32_t i = 0; i < Slices::kBlocks; ++i) {
    const int32_t f = dim_block_at(kComponent, Slices::kBlocks, i),
                  of_head = slice * Slices::kBlocks + f;
    uint32_t words[kPairsPerFragment];
    tile.load(of_head, words);
    QuickFragment codes;
    if (tile.is_coded) {
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        codes[r][0] = tile.bits_of_code(words[r], 0), codes[r][1] = tile.bits_of_code(words[r], 1);
      }
    } else {
      float y[kPairsPerFragment][2];
      tile.unpack(words, y);
      turn(f, y);
      tile.quick_codes(of_head, words, y, codes);
    }
    take(f, codes);
  }
}

// turn(turn of the pair, r, h) of the lane's channels in a fragment that RoPE turns in halves; f:
// of the head's first half.
template <int32_t kDims, class TurnOne>
__device__ __forceinline__ void turn_fragment(const TileReader<kDims, true>& tile, int32_t f,
                                              const TurnOne& turn_one) {
#pragma unroll
  for (int32_t ch = 0; ch < 2; ++ch) {
    const int32_t pair = kDimBlock * f + 8 * ch + 2 * tile.quarter;
    const TwoTurns block(tile.job.block + pair);
#pragma unroll
    for (int32_t rh = 0; rh < 2; ++rh) {
      const TwoTurns place(tile.places(tile.token[rh]) + pair);
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        turn_one(compose_turns(block.turn[h], place.turn[h]), rh + 2 * ch, h);
      }
    }
  }
}

// A head of one slice: both fragments of each pair of channels.
template <int32_t kDims, class Take>
__device__ __forceinline__ void take_folded(const TileReader<kDims, true>& tile, const Take& take) {
  constexpr int32_t kHalf = kDims / kDimBlock / 2;
#pragma unroll 1
  for (int32_t f = 0; f < kHalf; ++f) {
    uint32_t near_words[kPairsPerFragment], far_words[kPairsPerFragment];
    float x[kPairsPerFragment][2], y[kPairsPerFragment][2];
    tile.load(f, near_words);
    tile.load(f + kHalf, far_words);
    tile.unpack(near_words, x);
    tile.unpack(far_words, y);
    turn_fragment(tile, f,
                  [&](Turn by, int32_t r, int32_t h) { unturn_pair(by, &x[r][h], &y[r][h]); });
#pragma unroll 1
    for (int32_t of = f; of < 2 * kHalf; of += kHalf) {
      QuickFragment codes;
      tile.quick_codes(of, near_words, x, codes);
      take(of, codes);
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        near_words[r] = far_words[r];
        x[r][0] = y[r][0], x[r][1] = y[r][1];
      }
    }
  }
}

// The same where the partners are in the other slice.
template <int32_t kDims, class Take>
__device__ __forceinline__ void take_folded_slice(const TileReader<kDims, true>& tile,
                                                  int32_t slice, const Take& take) {
  const float sign = slice == 0 ? 1.0f : -1.0f;
  const auto turn = [&](int32_t f, float(&x)[kPairsPerFragment][2]) {
    uint32_t far_words[kPairsPerFragment];
    float y[kPairsPerFragment][2];
    tile.load((1 - slice) * SlicesOf<kDims>::kBlocks + f, far_words);
    tile.unpack(far_words, y);
    turn_fragment(tile, f, [&](Turn by, int32_t r, int32_t h) {
      x[r][h] = unturn_one(by, x[r][h], y[r][h], sign);
    });
  };
  take_fragments(tile, slice, turn, take);
}

template <int32_t kDims, class Take>
__device__ __forceinline__ void take_any(const TileReader<kDims, true>& tile, int32_t slice,
                                         const Take& take) {
  const auto turn = [&](int32_t f, float(&y)[kPairsPerFragment][2]) {
    const int32_t of_head = slice * SlicesOf<kDims>::kBlocks + f;
#pragma unroll
    for (int32_t n = 0; n < 4; ++n) {
      const int32_t ch = n / 2, h = n % 2, d = kDimBlock * of_head + 8 * ch + 2 * tile.quarter + h;
      const TurningDim turning(tile.job.pairing, tile.job.pairs, d);
      if (turning.pair < 0) continue;
      const Turn block = load_turn(tile.job.block + turning.pair);
#pragma unroll
      for (int32_t rh = 0; rh < 2; ++rh) {
        const auto* row =
            reinterpret_cast<const uint16_t*>(tile.stage + tile.token[rh] * stage_pitch(kDims));
        const float other = raw_float(tile.is_bfloat16, row[turning.partner]);
        const Turn place = load_turn(tile.places(tile.token[rh]) + turning.pair);
        float& own = y[rh + 2 * ch][h];
        own = unturn_one(compose_turns(block, place), own, other, turning.sign);
      }
    }
  };
  take_fragments(tile, slice, turn, take);
}

template <int32_t kDims, bool kKey, class Take>
__device__ __forceinline__ void take_tile(const TileReader<kDims, kKey>& tile, RopeWay way,
                                          int32_t slice, const Take& take) {
  if constexpr (kKey) {
    if (way == RopeWay::kFolded && !tile.is_coded) {
      if constexpr (SlicesOf<kDims>::kCount == 1) {
        return take_folded<kDims>(tile, take);
      } else {
        return take_folded_slice<kDims>(tile, slice, take);
      }
    }
    if (way == RopeWay::kAny) return take_any<kDims>(tile, slice, take);
  }
  take_fragments(
      tile, slice, [](int32_t, auto&) {}, take);
}

// take(tile, f of the slice, codes) of all fragments of a slice in the order of the streams. opens:
// for the first time of the block, which finds the exponents of values and what keys are divided
// by.
template <int32_t kDims, bool kKey, class Take>
__device__ __forceinline__ void take_slice(const TileMemory& memory, int32_t slice, bool opens,
                                           WeightedFaults& faults, const Take& take) {
  EncodeWarp& warp = *memory.warp;
  const RopeWay way = rope_way(warp.job);
  if (kKey && opens) fill_key_channels<kDims>(warp.job, memory.channels);
  const int32_t tiles = tile_count(warp.job.tokens);
#pragma unroll 1
  for (int32_t tile = 0; tile < tiles; ++tile) {
    stage_tile<kDims>(warp.job, tile, memory.stage);
    if (opens) {
      if constexpr (!kKey) {
        find_value_exponents<kDims>(warp.job, tile, memory.stage, warp.exponents, faults);
        __syncwarp();
      }
      const int32_t t = tile * kTileTokens + lane_index();
      if (lane_index() < kTileTokens) {
        warp.inverse_factors[t] = t < warp.job.tokens ? exponent_factor(-warp.exponents[t]) : 1.0f;
      }
      __syncwarp();
    }
    const TileReader<kDims, kKey> reader(memory, tile);
    take_tile<kDims, kKey>(reader, way, slice,
                           [&](int32_t f, const QuickFragment& codes) { take(tile, f, codes); });
    __syncwarp();
  }
}

// ---- codes in doubt ----

// The codes of the lane's pair r in a fragment by the laws. Where there is no token, kPaddingCodes
// on whose low half is a code of the slice.
struct ExactPair {
  int32_t code[2];
  StatusCode status;  // the worst of both
};
__device__ __noinline__ inline ExactPair exact_pair(const EncodeWarp* warp, int32_t slice,
                                                    int32_t tile, int32_t f, int32_t r) {
  const WeightedBlockJob& job = warp->job;
  const PairPosition p = pair_position(job.component, tile, f, r, lane_index());
  const bool key = job.component == Component::kKey;
  ExactPair pair{{0, 0}, StatusCode::kOk};
  for (int32_t h = 0; h < 2; ++h) {
    const int32_t t = key ? p.token : p.token + h;
    const int32_t d = slice * kSliceDims + p.dim + (key ? h : 0);
    if (t >= job.tokens) {
      const ExactCode first = exact_code(&job, 0, slice * kSliceDims, warp->exponents[0]);
      pair.code[h] = kPaddingCodes | (first.code & 0xffff);
      continue;
    }
    const ExactCode exact = exact_code(&job, t, d, warp->exponents[t]);
    pair.code[h] = exact.code;
    if (exact.status == StatusCode::kNonFinite || pair.status == StatusCode::kOk) {
      pair.status = exact.status;
    }
  }
  return pair;
}
__device__ __forceinline__ void add_fault(StatusCode status, WeightedFaults& faults) {
  faults.non_finite |= status == StatusCode::kNonFinite;
  faults.out_of_range |= status == StatusCode::kOutOfRange;
}

// The codes of pair r, exact ones where the quick ones are not sure.
__device__ __forceinline__ void settled_codes(const EncodeWarp* warp, int32_t slice, int32_t tile,
                                              int32_t f, int32_t r, const uint32_t (&bits)[2],
                                              WeightedFaults& faults, int32_t (&code)[2]) {
  code[0] = quick_code(bits[0]), code[1] = quick_code(bits[1]);
  if (is_sure_code(bits[0]) && is_sure_code(bits[1])) return;
  const ExactPair exact = exact_pair(warp, slice, tile, f, r);
  add_fault(exact.status, faults);
  code[0] = exact.code[0], code[1] = exact.code[1];
}

}  // namespace tierkv
