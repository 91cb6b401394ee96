// SPDX-License-Identifier: Apache-2.0
// A tile of decoded codes as fp16 or bf16 tokens, keys turned to their positions.
#pragma once

#include "codec/format/element.h"
#include "codec/gpu/coded/coded_decode.cuh"
#include "codec/gpu/coded/weighted_batch.h"
#include "gpu/math.cuh"

namespace tierkv {

// Tokens of a block that go to the output.
struct RangeTarget {
  uint16_t* to;  // of the block's first token
  int64_t token_stride;
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
    return target.to + (tile * kTileTokens + t) * target.token_stride;
  }
  __device__ __forceinline__ float factor(int32_t t) const {
    return factors[tile * kTileTokens + t];
  }
  __device__ __forceinline__ bool aligned() const {
    return target.token_stride % 2 == 0 && reinterpret_cast<uintptr_t>(target.to) % 4 == 0;
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

// Keys that turn: a lane has one pair.
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

// ---- eight channels of a token at once, 16 bytes ----

inline constexpr int32_t kOctet = 8;

// Whether octets can be loaded and stored, and turned where the tokens turn.
__device__ __forceinline__ bool has_octets(const TileTokens& tokens) {
  const DeviceWeightedRows& rows = tokens.call.rows;
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const uintptr_t any = address(rows.key_scales) | address(rows.key_means) |
                        address(rows.rope.place) | address(rows.rope.block) |
                        address(tokens.target.to);
  const bool turns = tokens.call.component == Component::kKey;
  return any % 16 == 0 && tokens.target.token_stride % kOctet == 0 &&
         (!turns || rows.rope.pairs % kOctet == 0);
}

// Neighbouring lanes have the octets of [from, end), then those of the next token.
struct LaneOctets {
  int32_t d, row, rows;  // first channel; the token of this lane, of `rows` at a time
  __device__ __forceinline__ LaneOctets(int32_t from, int32_t end) {
    const int32_t octets = (end - from) / kOctet;
    rows = kWarpLanes / octets;
    row = lane_index() / octets;
    d = from + lane_index() % octets * kOctet;
  }
};

__device__ __forceinline__ void load_octet(const float* from, float (&x)[kOctet]) {
#pragma unroll
  for (int32_t i = 0; i < kOctet; i += 4) {
    const float4 y = *reinterpret_cast<const float4*>(from + i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// Eight channels of a row from d on.
struct Octet {
  float scale[kOctet], mean[kOctet];
  __device__ __forceinline__ Octet(const TileTokens& tokens, int32_t d) {
    const DeviceWeightedRows& rows = tokens.call.rows;
    const int64_t at = int64_t{tokens.target.row} * rows.head_dim + d;
#pragma unroll
    for (int32_t i = 0; i < kOctet; ++i) scale[i] = mean[i] = 0.0f;
    if (tokens.call.component == Component::kValue) {
#pragma unroll
      for (int32_t i = 0; i < kOctet; ++i) scale[i] = rows.value_steps[tokens.target.row];
      return;
    }
    load_octet(rows.key_scales + at, scale);
    if (rows.key_means == nullptr) return;
    const uint4 halves = *reinterpret_cast<const uint4*>(rows.key_means + at);
    const uint32_t words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int32_t i = 0; i < kOctet; ++i) {
      mean[i] = half_to_float(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
    }
  }
  __device__ __forceinline__ void values(const TileTokens& tokens, int32_t t, int32_t d,
                                         float (&x)[kOctet]) const {
    const float factor = tokens.factor(t);
    const uint4 codes = *reinterpret_cast<const uint4*>(tokens.at(t, d));
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int32_t i = 0; i < kOctet; ++i) {
      const uint32_t word = words[i / 2];
      const int32_t code =
          i % 2 == 0 ? static_cast<int16_t>(word) : static_cast<int32_t>(word) >> 16;
      x[i] = weighted_value(code, mean[i], scale[i], factor);
    }
  }
};
__device__ __forceinline__ void store_octet(const TileTokens& tokens, int32_t t, int32_t d,
                                            const float (&x)[kOctet]) {
  uint32_t words[4];
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    words[i] = tokens.call.dtype == DType::kFloat16 ? pack_outputs(x[2 * i], x[2 * i + 1], false)
                                                    : pack_bfloats(x[2 * i], x[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(tokens.to(t) + d) = {words[0], words[1], words[2], words[3]};
}

// kTurns: channels of neighbours that turn.
template <bool kTurns>
__device__ __forceinline__ void write_octets(const TileTokens& tokens, int32_t from, int32_t end) {
  if (from >= end) return;
  const LaneOctets lane(from, end);
  if (lane.row >= lane.rows) return;
  const Octet octet(tokens, lane.d);
  float block[kOctet];
  if constexpr (kTurns) load_octet(&tokens.block_turns()[lane.d / 2].cos, block);
  for (int32_t t = tokens.begin() + lane.row; t < tokens.end(); t += lane.rows) {
    float x[kOctet];
    octet.values(tokens, t, lane.d, x);
    if constexpr (kTurns) {
      float place[kOctet];
      load_octet(&tokens.places(t)[lane.d / 2].cos, place);
#pragma unroll
      for (int32_t i = 0; i < kOctet; i += 2) {
        turn_pair(compose_turns({block[i], block[i + 1]}, {place[i], place[i + 1]}), &x[i],
                  &x[i + 1]);
      }
    }
    store_octet(tokens, t, lane.d, x);
  }
}

// Keys that turn in halves: a lane has both octets of eight pairs.
__device__ __forceinline__ void write_octets_of_halves(const TileTokens& tokens) {
  const int32_t pairs = tokens.call.rows.rope.pairs;
  const LaneOctets lane(0, pairs);
  if (lane.row >= lane.rows) return;
  const Octet near(tokens, lane.d), far(tokens, lane.d + pairs);
  float block[2][kOctet];
#pragma unroll
  for (int32_t h = 0; h < 2; ++h) {
    load_octet(&tokens.block_turns()[lane.d + h * kOctet / 2].cos, block[h]);
  }
  for (int32_t t = tokens.begin() + lane.row; t < tokens.end(); t += lane.rows) {
    float x[kOctet], y[kOctet];
    near.values(tokens, t, lane.d, x);
    far.values(tokens, t, lane.d + pairs, y);
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
      float place[kOctet];
      load_octet(&tokens.places(t)[lane.d + h * kOctet / 2].cos, place);
#pragma unroll
      for (int32_t i = 0; i < kOctet; i += 2) {
        const int32_t pair = h * kOctet / 2 + i / 2;
        turn_pair(compose_turns({block[h][i], block[h][i + 1]}, {place[i], place[i + 1]}), &x[pair],
                  &y[pair]);
      }
    }
    store_octet(tokens, t, lane.d, x);
    store_octet(tokens, t, lane.d + pairs, y);
  }
}

__device__ __forceinline__ void write_tile(const TileTokens& tokens, int32_t dims) {
  const DeviceRope& rope = tokens.call.rows.rope;
  const int32_t head_dim = tokens.call.rows.head_dim;
  const bool turns = tokens.call.component == Component::kKey && rope.pairs > 0;
  if (!has_octets(tokens)) {
    return turns ? write_turned(tokens)
                 : write_plain(tokens, tokens.first_dim, tokens.first_dim + dims);
  }
  if (!turns) return write_octets<false>(tokens, tokens.first_dim, tokens.first_dim + dims);
  if (rope.pairing == RopePairing::kHalves) {
    write_octets_of_halves(tokens);
  } else {
    write_octets<true>(tokens, 0, 2 * rope.pairs);
  }
  write_octets<false>(tokens, 2 * rope.pairs, head_dim);
}

}  // namespace tierkv
