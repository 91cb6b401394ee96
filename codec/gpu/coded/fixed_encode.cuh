// A fixed-rate block by one warp, where each lane is given its values in the order of the words of
// raw tiles: encode_fixed_block()'s bytes, of one slice.
//
// Values are asked for twice: for the extrema of the tokens, then for the codes. A lane's codes all
// lie in its own words.
#pragma once

#include "codec/format/fixed_block.h"
#include "codec/gpu/coded/coded_form.cuh"

namespace tierkv {

// Two finite fp16 numbers each, of the pairs r = 0..3 of a lane in one dim block of a tile
// (codec/format/fragment_order.h).
using FragmentValues = uint32_t[kPairsPerFragment];

// What of the tokens of a tile a lane has values of: keys two, by r % 2; values four, by r / 2 and
// the half of the pair.
template <Component kComponent>
struct LaneTokens {
  static constexpr bool kIsKey = kComponent == Component::kKey;
  static constexpr int32_t kCount = kIsKey ? 2 : 4;
  float lo[kCount], hi[kCount];

  __device__ __forceinline__ static int32_t of(int32_t r, int32_t half) {
    return kIsKey ? r % 2 : r / 2 + 2 * half;
  }
  __device__ __forceinline__ static float value(uint32_t pair, int32_t half) {
    return half_to_float(static_cast<uint16_t>(pair >> (16 * half)));
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) lo[i] = INFINITY, hi[i] = -INFINITY;
  }
  __device__ __forceinline__ void add(const FragmentValues& y) {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t i = of(r, half);
        lo[i] = fminf(lo[i], value(y[r], half));
        hi[i] = fmaxf(hi[i], value(y[r], half));
      }
    }
  }
  // Over the lanes that have values of the same tokens.
  __device__ __forceinline__ void share() {
#pragma unroll
    for (int32_t i = 0; i < kCount; ++i) {
#pragma unroll
      for (int32_t lanes = kIsKey ? 1 : 4; lanes < (kIsKey ? 4 : 32); lanes *= 2) {
        lo[i] = fminf(lo[i], __shfl_xor_sync(kFullWarp, lo[i], lanes));
        hi[i] = fmaxf(hi[i], __shfl_xor_sync(kFullWarp, hi[i], lanes));
      }
    }
  }
};

// Codes of a dim block into the lane's words: two of 8 bits, or one of 4.
template <Component kComponent>
__device__ __forceinline__ void pack_codes(const FragmentValues& y, const float (&scale)[4],
                                           const float (&zero_point)[4], int32_t bits,
                                           uint32_t (&word)[2]) {
  using Tokens = LaneTokens<kComponent>;
  word[0] = word[1] = 0;
#pragma unroll
  for (int32_t r = 0; r < kPairsPerFragment; ++r) {
    const int32_t token_half = Tokens::kIsKey ? r % 2 : r / 2;
    const int32_t dim_half = Tokens::kIsKey ? r / 2 : r % 2;
    const int32_t shift = bits == 8 ? 8 * dim_half : 8 * token_half + 4 * dim_half;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t i = Tokens::of(r, half);
      const int32_t code =
          minmax_code(Tokens::value(y[r], half), scale[i], zero_point[i], 1 << bits);
      word[bits == 8 ? token_half : 0] |= static_cast<uint32_t>(code) << (16 * half + shift);
    }
  }
}

// The metadata of a tile; a lane for each two or four tokens.
template <Component kComponent>
__device__ __forceinline__ void store_params(const QuantParams (&params)[4], uint8_t* metadata) {
  uint32_t word[4];
#pragma unroll
  for (int32_t i = 0; i < LaneTokens<kComponent>::kCount; ++i) {
    word[i] = params[i].scale | static_cast<uint32_t>(params[i].zero_point) << 16;
  }
  const int32_t lane = lane_index();
  if (kComponent == Component::kKey) {
    if (lane % 4 != 0) return;
    *reinterpret_cast<uint2*>(metadata + lane / 4 * 8) = uint2{word[0], word[1]};
  } else if (lane < 4) {
    *reinterpret_cast<uint4*>(metadata + lane * 16) =
        make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Source: fetch(i) as in codec/gpu/coded/coded_encode_lanes.cuh, values(x, f, &y) of x in dim block
// f.
template <Component kComponent, class Source>
__device__ void write_fixed_tile(const Source& source, const FixedBlockLayout& at, int32_t tile,
                                 uint8_t* block) {
  const int32_t blocks = at.tile.dim_blocks(), bits = at.tile.type.bits();
  FragmentValues y;
  LaneTokens<kComponent> tokens;
  tokens.clear();
#pragma unroll 1
  for (int32_t f = 0; f < blocks; ++f) {
    source.values(source.fetch(tile * blocks + f), f, y);
    tokens.add(y);
  }
  tokens.share();
  QuantParams params[4];
  float scale[4], zero_point[4];
#pragma unroll
  for (int32_t i = 0; i < LaneTokens<kComponent>::kCount; ++i) {
    params[i] = minmax_params(tokens.lo[i], tokens.hi[i], 1 << bits);
    scale[i] = half_to_float(params[i].scale), zero_point[i] = half_to_float(params[i].zero_point);
  }
  store_params<kComponent>(params, block + at.metadata_byte(tile));
  const int32_t words = at.tile.words_per_lane();
  uint8_t* codes = block + at.codes_byte(tile);
#pragma unroll 1
  for (int32_t f = 0; f < blocks; ++f) {
    source.values(source.fetch(tile * blocks + f), f, y);
    uint32_t word[2];
    pack_codes<kComponent>(y, scale, zero_point, bits, word);
    const int32_t first = bits == 8 ? 2 * f : f;
    *reinterpret_cast<uint32_t*>(codes + lane_word_byte(words, first, lane_index())) = word[0];
    if (bits != 8) continue;
    *reinterpret_cast<uint32_t*>(codes + lane_word_byte(words, first + 1, lane_index())) = word[1];
  }
}

// By the whole warp, to `to`, 16-byte aligned. dims: a multiple of kDimBlock, at most kSliceDims.
template <class Source>
__device__ __noinline__ void write_fixed_block(Source source, Component c, int32_t bits,
                                               int32_t dims, uint8_t* to) {
  const FixedBlockLayout at = fixed_block_layout(bits, dims);
#pragma unroll 1
  for (int32_t tile = 0; tile < kBlockTokens / kTileTokens; ++tile) {
    if (c == Component::kKey) {
      write_fixed_tile<Component::kKey>(source, at, tile, to);
    } else {
      write_fixed_tile<Component::kValue>(source, at, tile, to);
    }
  }
  BlockForm form{fixed_header(c, bits, dims), {}, false};
  form.at.bytes = at.bytes;
  finish_block(form, to);
}

}  // namespace tierkv
