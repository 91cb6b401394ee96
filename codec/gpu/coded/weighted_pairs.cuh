// A tile out of streams of pairs, which nearly all weighted blocks are: its codes, or at once the
// keys that RoPE turns in halves.
#pragma once

#include "codec/format/weighted_block_format.h"
#include "codec/gpu/coded/coded_decode.cuh"
#include "codec/gpu/coded/turns.cuh"
#include "codec/gpu/coded/weighted_write.cuh"

namespace tierkv {

// Two codes from an entry of kPair, 16 bits each.
struct PairBase {
  uint32_t both;
  // Neither sum carries: 0x8000 keeps the low one positive until it is taken off again.
  __device__ __forceinline__ explicit PairBase(int32_t base)
      : both(static_cast<uint32_t>(base) * 0x10001u + 0x8000u) {}
  __device__ __forceinline__ uint32_t codes(uint32_t entry) const {
    return ((entry >> 6 & 0x1f001fu) + both) ^ 0x8000u;
  }
};

// The entries of the lane's pairs in the next dim block.
__device__ __forceinline__ void next_pairs(TableReader& reader, uint32_t (&e)[kPairsPerFragment]) {
  if (reader.streams == 1) {
    reader.stream[0].step(reader.table, &e[0], &e[1]);
    reader.stream[0].step(reader.table, &e[2], &e[3]);
  } else {
    reader.stream[0].step(reader.table, &e[0], &e[2]);
    reader.stream[1].step(reader.table, &e[1], &e[3]);
  }
}

// decode_tile() of a slice of kPair.
template <bool kKey, class BaseOf>
__device__ __forceinline__ void decode_pair_tile(TableReader& reader, int32_t dims,
                                                 const BaseOf& base_of, int16_t* codes) {
  constexpr auto kComponent = kKey ? Component::kKey : Component::kValue;
  const int32_t blocks = dim_block_count(dims);
  const PairPosition lane = pair_position(kComponent, 0, 0, 0, lane_index());
  for (int32_t i = 0; i < blocks; ++i) {
    const int32_t f = dim_block_at(weighted_order(kComponent), blocks, i);
    const PairBase base(base_of(f));
    int16_t* const to = codes + lane.token * kTileStride + lane.dim + f * kDimBlock;
    uint32_t e[kPairsPerFragment];
    next_pairs(reader, e);
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition at = pair_position(kComponent, 0, 0, r, 0);
      const uint32_t pair = base.codes(e[r]);
      int16_t* const first = to + at.token * kTileStride + at.dim;
      if constexpr (kKey) {
        *reinterpret_cast<uint32_t*>(first) = pair;
      } else {
        first[0] = static_cast<int16_t>(pair);
        first[kTileStride] = static_cast<int16_t>(pair >> 16);
      }
    }
  }
}

// ---- keys that turn in halves: a lane decodes both channels of a pair ----

// A tile whose slice is the head.
__device__ __forceinline__ bool turns_in_lanes(const TileTokens& tokens) {
  const DeviceWeightedRows& rows = tokens.call.rows;
  return tokens.call.component == Component::kKey && rows.head_dim <= kSliceDims &&
         rows.rope.pairing == RopePairing::kHalves && 2 * rows.rope.pairs == rows.head_dim &&
         has_octets(tokens);
}

// Codes of an entry of kPair as floats: bits of 2^23 + 64 digit, over 64, less 2^17.
struct FloatPairBase {
  float offset;
  __device__ __forceinline__ explicit FloatPairBase(int32_t base)
      : offset(static_cast<float>(base - (1 << 17))) {}
  __device__ __forceinline__ float code(uint32_t entry) const {
    return fma_rn(bits_float((entry & 0x7c0u) | 0x4b000000u), 0x1p-6f, offset);
  }
  __device__ __forceinline__ float2 codes(uint32_t entry) const {
    return {code(entry), code(entry >> 16)};
  }
};

// A tile's exceptions, in shared memory.
struct TileExceptions {
  const uint32_t* first;
  const uint32_t* last;  // behind the last one
};
// Adds those of dim block f to a lane's codes; false where a sum is no 16-bit integer.
__device__ __forceinline__ bool add_exceptions(const TileExceptions& exceptions, int32_t f,
                                               float2 (&codes)[kPairsPerFragment]) {
  bool fits = true;
#pragma unroll 1
  for (const uint32_t* e = exceptions.first; e != exceptions.last; ++e) {
    const auto index = static_cast<int32_t>(*e & 0xffffu);
    const int32_t t = index / kSliceDims % kTileTokens, d = index % kSliceDims;
    const bool mine = d / kDimBlock == f && t % 8 * 4 + d % 8 / 2 == lane_index();
    const auto delta = static_cast<float>(static_cast<int16_t>(*e >> 16));
    const int32_t of = mine ? 2 * (t / 8 + 2 * (d % kDimBlock / 8)) + d % 2 : -1;
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      codes[r].x += of == 2 * r ? delta : 0.0f;
      codes[r].y += of == 2 * r + 1 ? delta : 0.0f;
      fits &= std::fabs(codes[r].x + 0.5f) < 32768.5f && std::fabs(codes[r].y + 0.5f) < 32768.5f;
    }
  }
  return fits;
}

// Decodes a tile and writes its tokens; false where an exception makes no code. stage:
// [kTileTokens][kTileStride].
template <class BaseOf>
__device__ __forceinline__ bool write_turned_pairs(TableReader& reader, const TileTokens& tokens,
                                                   const BaseOf& base_of,
                                                   const TileExceptions& exceptions,
                                                   int16_t* stage) {
  bool fits = true;
  const DeviceWeightedRows& rows = tokens.call.rows;
  const int32_t dims = rows.head_dim, half = dims / kDimBlock / 2, pairs = rows.rope.pairs;
  const int32_t row = lane_index() / 4, column = lane_index() % 4 * 2;
  const bool is_bfloat16 = tokens.call.dtype == DType::kBFloat16;
  const float factor[2] = {tokens.factor(row), tokens.factor(row + 8)};
  const int32_t first = tokens.target.place_of_first + tokens.tile * kTileTokens + row;
  const Turn* const place[2] = {
      tokens.of_places + min(first, kBlockTokens - 1) * pairs + column,
      tokens.of_places + min(first + 8, kBlockTokens - 1) * pairs + column};
  const Turn* const block = tokens.block_turns() + column;
  const int64_t of_row = int64_t{tokens.target.row} * dims + column;
  const float* const scales = rows.key_scales + of_row;
  const uint16_t* const means = rows.key_means == nullptr ? nullptr : rows.key_means + of_row;
  auto* const to = reinterpret_cast<uint32_t*>(stage + row * kTileStride + column);
#pragma unroll 1
  for (int32_t f = 0; f < half; ++f) {
    float x[2][kPairsPerFragment][2] = {};  // of the first and of the second channels of the pairs
#pragma unroll 1
    for (int32_t of = f; of < 2 * half; of += half) {
      const FloatPairBase base(base_of(of));
      uint32_t e[kPairsPerFragment];
      next_pairs(reader, e);
      float2 codes[kPairsPerFragment];
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) codes[r] = base.codes(e[r]);
      if (exceptions.first != exceptions.last) fits &= add_exceptions(exceptions, of, codes);
#pragma unroll
      for (int32_t r = 0; r < kPairsPerFragment; ++r) {
        const int32_t d = kDimBlock * of + 8 * (r / 2);
        const float2 scale = __ldg(reinterpret_cast<const float2*>(scales + d));
        float2 mean = {0, 0};
        if (means != nullptr) {
          mean = unpack_halves(__ldg(reinterpret_cast<const uint32_t*>(means + d)));
        }
        x[0][r][0] = x[1][r][0], x[0][r][1] = x[1][r][1];
        x[1][r][0] = fma_rn(mul_rn(codes[r].x, factor[r % 2]), scale.x, mean.x);
        x[1][r][1] = fma_rn(mul_rn(codes[r].y, factor[r % 2]), scale.y, mean.y);
      }
    }
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const int32_t d = kDimBlock * f + 8 * (r / 2);
      const TwoTurns by_block(block + d), by_place(place[r % 2] + d);
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        turn_pair(compose_turns(by_block.turn[h], by_place.turn[h]), &x[0][r][h], &x[1][r][h]);
      }
#pragma unroll
      for (int32_t part = 0; part < 2; ++part) {
        const float* y = x[part][r];
        to[(r % 2 * 8 * kTileStride + kDimBlock * (f + part * half) + 8 * (r / 2)) / 2] =
            is_bfloat16 ? pack_bfloats(y[0], y[1]) : pack_outputs(y[0], y[1], false);
      }
    }
  }
  __syncwarp();
  const LaneOctets octet(0, dims);
  if (octet.row < octet.rows) {
    for (int32_t t = tokens.begin() + octet.row; t < tokens.end(); t += octet.rows) {
      *reinterpret_cast<uint4*>(tokens.to(t) + octet.d) =
          *reinterpret_cast<const uint4*>(stage + t * kTileStride + octet.d);
    }
  }
  return fits;
}

}  // namespace tierkv
