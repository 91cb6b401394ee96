// A tile of decoded codes as fp16 or bf16 tokens, keys turned to their positions.
#pragma once

#include "codec/format/element.h"
#include "codec/gpu/coded/coded_decode.cuh"
#include "codec/gpu/coded/weighted_batch.h"

namespace tierkv {

// Tokens of a block that go to the output.
struct RangeTarget {
  uint16_t* to;            // of the block's first token
  int32_t from, end;       // tokens of the block
  int32_t tokens;          // that the block must have
  int32_t row, block;      // of the row
  int32_t place_of_first;  // in 64 positions
};

__device__ __forceinline__ uint16_t rounded(DType dtype, float x) {
  return dtype == DType::kFloat16 ? float_to_half(saturate_to_half_range(x)) : float_to_bfloat16(x);
}
__device__ __forceinline__ void store_pair_of(uint16_t* to, bool aligned, DType dtype, float x,
                                              float y) {
  const uint32_t first = rounded(dtype, x), second = rounded(dtype, y);
  if (aligned) {
    *reinterpret_cast<uint32_t*>(to) = first | second << 16;
  } else {
    to[0] = static_cast<uint16_t>(first), to[1] = static_cast<uint16_t>(second);
  }
}

// The tokens of a tile as a writer sees them.
struct TileTokens {
  const WeightedDecode& call;
  const RangeTarget& target;
  const Turn* of_places;
  const float* factors;
  const int16_t* codes;  // of the tile, in the slice from first_dim on
  const int16_t* kept;   // of the tile, in the slice before; null: none
  int32_t tile, first_dim;

  __device__ __forceinline__ const int16_t* at(int32_t t, int32_t d) const {
    const bool before = d < first_dim;
    return (before ? kept + d : codes + d - first_dim) + t * kTileStride;
  }
  // Tokens of the tile that are asked for.
  __device__ __forceinline__ int32_t begin() const {
    return max(0, target.from - tile * kTileTokens);
  }
  __device__ __forceinline__ int32_t end() const {
    return min(kTileTokens, target.end - tile * kTileTokens);
  }
  __device__ __forceinline__ uint16_t* to(int32_t t) const {
    return target.to + (tile * kTileTokens + t) * call.token_stride;
  }
  __device__ __forceinline__ float factor(int32_t t) const {
    return factors[tile * kTileTokens + t];
  }
  __device__ __forceinline__ bool aligned() const {
    return call.token_stride % 2 == 0 && reinterpret_cast<uintptr_t>(target.to) % 4 == 0;
  }
  __device__ __forceinline__ float scale(int32_t d) const {
    return call.component == Component::kKey
               ? call.rows.key_scales[int64_t{target.row} * call.rows.head_dim + d]
               : call.rows.value_steps[target.row];
  }
  __device__ __forceinline__ float mean(int32_t d) const {
    return call.component == Component::kKey && call.rows.key_means != nullptr
               ? half_to_float(call.rows.key_means[int64_t{target.row} * call.rows.head_dim + d])
               : 0.0f;
  }
  __device__ __forceinline__ const Turn* places(int32_t t) const {
    return of_places + (target.place_of_first + tile * kTileTokens + t) * call.rows.rope.pairs;
  }
  __device__ __forceinline__ const Turn* block_turns() const {
    return call.rows.rope.block + int64_t{target.block} * call.rows.rope.pairs;
  }
};

// Two channels of a row, from d on: an even number.
struct DimPair {
  float scale[2], mean[2];
  __device__ __forceinline__ DimPair(const TileTokens& tokens, int32_t d)
      : scale{tokens.scale(d), tokens.scale(d + 1)}, mean{tokens.mean(d), tokens.mean(d + 1)} {}
  __device__ __forceinline__ float2 values(const int16_t* codes, float factor) const {
    const uint32_t both = *reinterpret_cast<const uint32_t*>(codes);
    return {weighted_value(static_cast<int16_t>(both), mean[0], scale[0], factor),
            weighted_value(static_cast<int32_t>(both) >> 16, mean[1], scale[1], factor)};
  }
};

// Channels that do not turn, from dims_from on.
__device__ __forceinline__ void write_plain(const TileTokens& tokens, int32_t dims_from,
                                            int32_t dims_end) {
  const bool aligned = tokens.aligned();
  for (int32_t d = dims_from + 2 * lane_index(); d < dims_end; d += 2 * kWarpLanes) {
    const DimPair dims(tokens, d);
#pragma unroll 4
    for (int32_t t = tokens.begin(); t < tokens.end(); ++t) {
      const float2 x = dims.values(tokens.at(t, d), tokens.factor(t));
      store_pair_of(tokens.to(t) + d, aligned, tokens.call.dtype, x.x, x.y);
    }
  }
}

// Keys turned in halves of the whole head: a lane has two pairs that lie next to each other.
__device__ __forceinline__ void write_halves(const TileTokens& tokens) {
  const int32_t half = tokens.call.rows.head_dim / 2;
  // 16 lanes have all channels of 64.
  const int32_t rows = half <= kWarpLanes ? 2 : 1, width = rows == 2 ? 16 : 32;
  const int32_t row = rows == 1 ? 0 : lane_index() / 16;
  const bool aligned = tokens.aligned();
  for (int32_t d = 2 * (lane_index() - row * 16); d < half; d += 2 * width) {
    const DimPair near(tokens, d), far(tokens, half + d);
    const Turn block[2] = {tokens.block_turns()[d], tokens.block_turns()[d + 1]};
#pragma unroll 4
    for (int32_t t = tokens.begin() + row; t < tokens.end(); t += rows) {
      const float factor = tokens.factor(t);
      float2 x = near.values(tokens.at(t, d), factor),
             y = far.values(tokens.at(t, half + d), factor);
      const Turn* place = tokens.places(t) + d;
      turn_pair(compose_turns(block[0], place[0]), &x.x, &y.x);
      turn_pair(compose_turns(block[1], place[1]), &x.y, &y.y);
      store_pair_of(tokens.to(t) + d, aligned, tokens.call.dtype, x.x, x.y);
      store_pair_of(tokens.to(t) + half + d, aligned, tokens.call.dtype, y.x, y.y);
    }
  }
}

// Any other rotation: a lane has one pair.
__device__ __forceinline__ void write_turned(const TileTokens& tokens) {
  const DeviceRope& rope = tokens.call.rows.rope;
  for (int32_t i = lane_index(); i < rope.pairs; i += kWarpLanes) {
    const int32_t first = pair_first(rope.pairing, i);
    const int32_t second = pair_second(rope.pairing, rope.pairs, i);
    const float scale[2] = {tokens.scale(first), tokens.scale(second)};
    const float mean[2] = {tokens.mean(first), tokens.mean(second)};
    const Turn block = tokens.block_turns()[i];
    for (int32_t t = tokens.begin(); t < tokens.end(); ++t) {
      const float factor = tokens.factor(t);
      float x = weighted_value(*tokens.at(t, first), mean[0], scale[0], factor);
      float y = weighted_value(*tokens.at(t, second), mean[1], scale[1], factor);
      turn_pair(compose_turns(block, tokens.places(t)[i]), &x, &y);
      tokens.to(t)[first] = rounded(tokens.call.dtype, x);
      tokens.to(t)[second] = rounded(tokens.call.dtype, y);
    }
  }
  write_plain(tokens, 2 * rope.pairs, tokens.call.rows.head_dim);
}

__device__ __forceinline__ void write_tile(const TileTokens& tokens, int32_t dims) {
  const DeviceRope& rope = tokens.call.rows.rope;
  if (tokens.call.component == Component::kValue || rope.pairs == 0) {
    return write_plain(tokens, tokens.first_dim, tokens.first_dim + dims);
  }
  if (rope.pairing == RopePairing::kHalves && 2 * rope.pairs == tokens.call.rows.head_dim) {
    return write_halves(tokens);
  }
  write_turned(tokens);
}

}  // namespace tierkv
