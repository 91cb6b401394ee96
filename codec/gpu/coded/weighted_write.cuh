// SPDX-License-Identifier: Apache-2.0
// A tile of decoded codes as fp16 or bf16 tokens, keys turned to their positions.
#pragma once

#include "codec/format/element.h"
#include "codec/gpu/coded/coded_decode.cuh"
#include "codec/gpu/coded/turns.cuh"
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
// Turns of 64 places: in the shared memory of a CTA or in the caller's. In shared memory two turns
// are left out behind each 16, so that lanes which load 16 bytes of every 32 or 64 meet in no bank.
struct PlaceTurns {
  const Turn* first;  // [64][pitch(pairs)]
  bool is_shared;

  TKV_HD static constexpr int32_t padded(int32_t i) { return i + i / 16 * 2; }
  TKV_HD int32_t pitch(int32_t pairs) const { return is_shared ? padded(pairs) : pairs; }
  TKV_HD const Turn* at(int32_t place, int32_t pairs, int32_t i) const {
    return first + place * pitch(pairs) + (is_shared ? padded(i) : i);
  }
};

// The tokens of a tile as a writer sees them.
struct TileTokens {
  const WeightedDecode& call;
  const RangeTarget& target;
  const PlaceTurns& of_places;
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
  __device__ __forceinline__ int32_t place(int32_t t) const {
    return target.place_of_first + tile * kTileTokens + t;
  }
  __device__ __forceinline__ const Turn* block_turns() const {
    return call.rows.rope.block + int64_t{target.block} * call.rows.rope.pairs;
  }
};

// Pairs of channels, a lane each: `turning` of them turn, the channels behind those do not.
__device__ __forceinline__ void write_pairs(const TileTokens& tokens, int32_t turning,
                                            int32_t dims_from, int32_t dims_end) {
  const DeviceRope& rope = tokens.call.rows.rope;
  const bool aligned = tokens.aligned();
  for (int32_t i = dims_from / 2 + lane_index(); i < dims_end / 2; i += kWarpLanes) {
    const bool turns = i < turning;
    const int32_t first = turns ? pair_first(rope.pairing, i) : 2 * i;
    const int32_t second = turns ? pair_second(rope.pairing, rope.pairs, i) : 2 * i + 1;
    const float scale[2] = {tokens.scale(first), tokens.scale(second)};
    const float mean[2] = {tokens.mean(first), tokens.mean(second)};
    const Turn block = turns ? tokens.block_turns()[i] : Turn{};
    for (int32_t t = tokens.begin(); t < tokens.end(); ++t) {
      const float factor = tokens.factor(t);
      float x = weighted_value(*tokens.at(t, first), mean[0], scale[0], factor);
      float y = weighted_value(*tokens.at(t, second), mean[1], scale[1], factor);
      if (turns) {
        const Turn place = *tokens.of_places.at(tokens.place(t), rope.pairs, i);
        turn_pair(compose_turns(block, place), &x, &y);
      }
      uint16_t* const to = tokens.to(t);
      const uint32_t a = rounded(tokens.call.dtype, x), b = rounded(tokens.call.dtype, y);
      if (aligned && second == first + 1) {
        *reinterpret_cast<uint32_t*>(to + first) = a | b << 16;
      } else {
        to[first] = static_cast<uint16_t>(a), to[second] = static_cast<uint16_t>(b);
      }
    }
  }
}

// ---- runs of eight channels of a token, 16 bytes; of keys that turn in halves two runs a lane
// ----

enum class Turning { kNone, kNeighbours, kHalves };
inline constexpr int32_t kRun = 8;

// Neighbouring lanes have the runs of a token, then those of the next one.
struct LaneRun {
  int32_t first, row, rows;  // channel; the token of this lane, of `rows` at a time
  __device__ __forceinline__ explicit LaneRun(int32_t dims) {
    const auto runs = static_cast<uint32_t>(max(1, dims / kRun)), lane = threadIdx.x % 32u;
    rows = static_cast<int32_t>(32u / runs);
    row = static_cast<int32_t>(lane / runs);
    first = static_cast<int32_t>(lane % runs) * kRun;
  }
};

// How the tokens of a block are written.
struct WriteWay {
  Turning turning;
  bool in_runs;
  LaneRun lane;  // of the channels that turn; of a slice where none do

  __device__ __forceinline__ WriteWay(const WeightedDecode& call, const RangeTarget& target)
      : turning(turning_of(call)),
        in_runs(has_runs(call, target)),
        lane(turning == Turning::kNone     ? LaneRun(min(call.rows.head_dim, kSliceDims))
             : turning == Turning::kHalves ? LaneRun(call.rows.rope.pairs)
                                           : LaneRun(2 * call.rows.rope.pairs)) {}

 private:
  __device__ __forceinline__ static Turning turning_of(const WeightedDecode& call) {
    const DeviceRope& rope = call.rows.rope;
    if (call.component != Component::kKey || rope.pairs == 0) return Turning::kNone;
    return rope.pairing == RopePairing::kHalves ? Turning::kHalves : Turning::kNeighbours;
  }
  // Whether runs can be loaded and stored, and turned where the tokens turn.
  __device__ __forceinline__ static bool has_runs(const WeightedDecode& call,
                                                  const RangeTarget& target) {
    const DeviceWeightedRows& rows = call.rows;
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
    const uintptr_t any = address(rows.key_scales) | address(rows.key_means) |
                          address(rows.rope.place) | address(rows.rope.block) | address(target.to);
    const bool turns = call.component == Component::kKey;
    return any % 16 == 0 && target.token_stride % kRun == 0 &&
           (!turns || rows.rope.pairs % kRun == 0);
  }
};

template <int32_t kCount>
__device__ __forceinline__ void load_floats(const float* from, float* x) {
#pragma unroll
  for (int32_t i = 0; i < kCount; i += 4) {
    const float4 y = *reinterpret_cast<const float4*>(from + i);
    x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
  }
}

// The run of a row from channel d on.
struct RunScales {
  float scale[kRun], mean[kRun];

  __device__ __forceinline__ RunScales(const TileTokens& tokens, bool is_key, int32_t d) {
    const DeviceWeightedRows& rows = tokens.call.rows;
    const int64_t at = int64_t{tokens.target.row} * rows.head_dim + d;
    uint4 means = {};
    if (is_key) {
      if (rows.key_means != nullptr) means = *reinterpret_cast<const uint4*>(rows.key_means + at);
      load_floats<kRun>(rows.key_scales + at, scale);
    } else {
      const float step = rows.value_steps[tokens.target.row];
#pragma unroll
      for (int32_t i = 0; i < kRun; ++i) scale[i] = step;
    }
    const uint32_t words[kRun / 2] = {means.x, means.y, means.z, means.w};
#pragma unroll
    for (int32_t i = 0; i < kRun; ++i) {
      mean[i] = half_to_float(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
    }
  }
  __device__ __forceinline__ void values(const uint4& codes, float factor, float* x) const {
    const uint32_t words[kRun / 2] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int32_t i = 0; i < kRun; ++i) {
      const uint32_t word = words[i / 2];
      const int32_t code =
          i % 2 == 0 ? static_cast<int16_t>(word) : static_cast<int32_t>(word) >> 16;
      x[i] = weighted_value(code, mean[i], scale[i], factor);
    }
  }
};
template <bool kFloat16>
__device__ __forceinline__ void store_run(const float* x, uint16_t* to) {
  uint32_t words[kRun / 2];
#pragma unroll
  for (int32_t i = 0; i < kRun / 2; ++i) {
    words[i] = kFloat16 ? pack_outputs(x[2 * i], x[2 * i + 1], false)
                        : pack_bfloats(x[2 * i], x[2 * i + 1]);
  }
  *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}

template <Turning kTurning, bool kFloat16>
__device__ __forceinline__ void write_runs(const TileTokens& tokens, int32_t from,
                                           const LaneRun& lane) {
  constexpr bool kHalves = kTurning == Turning::kHalves;
  constexpr int32_t kTurns = kHalves ? kRun : kTurning == Turning::kNeighbours ? kRun / 2 : 0;
  if (lane.row >= lane.rows) return;
  const DeviceRope& rope = tokens.call.rows.rope;
  const int32_t d = from + lane.first, far = kHalves ? d + rope.pairs : d;
  const int32_t pair = kTurning == Turning::kNeighbours ? d / 2 : d;
  const bool is_key = kTurns > 0 || tokens.call.component == Component::kKey;
  const RunScales scales(tokens, is_key, d), far_scales(tokens, is_key, far);
  float block[2 * kTurns + 1];
  if constexpr (kTurns > 0) load_floats<2 * kTurns>(&tokens.block_turns()[pair].cos, block);
  int32_t t = tokens.begin() + lane.row;
  const int32_t end = tokens.end();
  const int16_t* codes = tokens.at(t, d);
  const int16_t* far_codes = tokens.at(t, far);
  const float* factor = tokens.factors + tokens.tile * kTileTokens + t;
  const Turn* turns = tokens.of_places.at(tokens.place(t), rope.pairs, pair);
  const int32_t turns_step = lane.rows * tokens.of_places.pitch(rope.pairs);
  uint16_t* to = tokens.to(t) + d;
  const int64_t to_step = lane.rows * tokens.target.token_stride;
#pragma unroll 1
  for (; t < end; t += lane.rows) {
    float x[2 * kRun], place[2 * kTurns + 1];
    const uint4 near_words = *reinterpret_cast<const uint4*>(codes);
    uint4 far_words = {};
    if constexpr (kHalves) far_words = *reinterpret_cast<const uint4*>(far_codes);
    if constexpr (kTurns > 0) load_floats<2 * kTurns>(&turns->cos, place);
    scales.values(near_words, *factor, x);
    if constexpr (kHalves) far_scales.values(far_words, *factor, x + kRun);
#pragma unroll
    for (int32_t i = 0; i < kTurns; ++i) {
      const int32_t first = kHalves ? i : 2 * i, second = kHalves ? i + kRun : 2 * i + 1;
      turn_pair(compose_turns({block[2 * i], block[2 * i + 1]}, {place[2 * i], place[2 * i + 1]}),
                &x[first], &x[second]);
    }
    store_run<kFloat16>(x, to);
    if constexpr (kHalves) store_run<kFloat16>(x + kRun, to + rope.pairs);
    codes += lane.rows * kTileStride, far_codes += lane.rows * kTileStride;
    factor += lane.rows, turns += turns_step, to += to_step;
  }
}

template <bool kFloat16>
__device__ __forceinline__ void write_in_runs(const TileTokens& tokens, const WriteWay& way) {
  int32_t from = tokens.first_dim;
  LaneRun lane = way.lane;
  if (way.turning != Turning::kNone) {
    if (way.turning == Turning::kHalves) {
      write_runs<Turning::kHalves, kFloat16>(tokens, 0, lane);
    } else {
      write_runs<Turning::kNeighbours, kFloat16>(tokens, 0, lane);
    }
    from = 2 * tokens.call.rows.rope.pairs;
    if (from >= tokens.call.rows.head_dim) return;
    lane = LaneRun(tokens.call.rows.head_dim - from);
  }
  write_runs<Turning::kNone, kFloat16>(tokens, from, lane);
}

__device__ __forceinline__ void write_tile(const TileTokens& tokens, int32_t dims,
                                           const WriteWay& way) {
  if (way.in_runs) {
    if (tokens.call.dtype == DType::kFloat16) {
      write_in_runs<true>(tokens, way);
    } else {
      write_in_runs<false>(tokens, way);
    }
  } else if (way.turning != Turning::kNone) {
    write_pairs(tokens, tokens.call.rows.rope.pairs, 0, tokens.call.rows.head_dim);
  } else {
    write_pairs(tokens, 0, tokens.first_dim, tokens.first_dim + dims);
  }
}

}  // namespace tierkv
