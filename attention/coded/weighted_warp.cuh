// What a warp does with a run of items of weighted blocks.
//
//   scores    q turned back by the block's first position, times keys turned by their places
//   output    sum of (p f(e)) times codes, in units of the row's step and of a power of two
//
// The power of two follows the largest exponent that values have had, so that p f(e) stays inside
// fp16: like the reference of the softmax it moves seldom.
#pragma once

#include "attention/coded/coded_warp.cuh"
#include "attention/coded/weighted_block.cuh"
#include "attention/core/online_softmax.h"

namespace tierkv {

template <int kDimBlocks, class Code, CodedBreadth kBreadth>
struct WeightedWarp : CodedWarp<kDimBlocks, Code, kBreadth> {
  using Base = CodedWarp<kDimBlocks, Code, kBreadth>;
  using Base::call, Base::params, Base::state, Base::ring, Base::run, Base::row_index;
  using Base::from, Base::to, Base::key_table, Base::value_table, Base::key_scale;
  using Base::kHeadDim, Base::kSlices, Base::kSliceBlocks, Base::kSliceDim;
  using Streams = LaneCodes<Code>;
  static constexpr RopePairing kPairing = Code::kPairing;
  static constexpr bool kHalves = kPairing == RopePairing::kHalves;
  static constexpr bool kNeighbours = kPairing == RopePairing::kNeighbours;
  static constexpr int kPairBlocks = kDimBlocks / 2;  // dim blocks of a half of the head
  static constexpr int32_t kNoOctave = -64;           // below that of any exponent
  static constexpr int32_t kOctaveHeadroom = 5;       // p is at most 2^8, and fp16 holds 2^15 of it
  uint32_t turns, means;                              // shared addresses
  int32_t step;                                       // of the row
  int32_t value_octave;                               // out is in units of 2^value_octave steps

  // A block in its slot, or, where it is larger, raw slices in memory.
  struct Block {
    WeightedSlice<Code::kStreams> slice[kSlices];
    int32_t exponents[2];  // of tokens lane and lane + 32
    bool coded;            // all slices
    bool valid;
  };

  __device__ __forceinline__ Block open_block(int32_t i, const ExpectedHeader& expected,
                                              int32_t tokens) {
    ring.wait();
    const uint8_t* bytes = run.bytes_of(call, i);
    const uint32_t units = __shfl_sync(kFullWarp, run.mine.units, i - run.first);
    const bool whole = units * 16 <= ring.slot_bytes;
    Block x;
    x.coded = true, x.valid = units > 0;
    uint32_t used = 0;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const bool there = x.valid && used < units;
      const uint32_t at = ring.slot + (whole && there ? 16 * used : 0);
      const uint8_t* memory = bytes + int64_t{there ? used : 0} * 16;
      const uint4 header =
          whole || s == 0 ? load_shared_16(at) : *reinterpret_cast<const uint4*>(memory);
      auto& slice = x.slice[s];
      slice.open(header, at, whole && there ? ring.slot_bytes - 16 * used : 0, expected, tokens);
      used += slice.block.units();
      bool valid = there && used <= units;
      if (valid && !slice.block.coded) valid = slice.open_raw(memory, expected);
      x.valid = valid;
      x.coded &= slice.block.coded;
      if (s == 0 && valid) {
        const auto lane = static_cast<int32_t>(fresh_lane());
        x.exponents[0] = slice.exponent(at, memory, lane);
        x.exponents[1] = slice.exponent(at, memory, lane + 32);
      } else if (!valid) {
        x.exponents[0] = x.exponents[1] = 0;
      }
    }
    x.valid &= used == units;
    state.bad |= static_cast<uint32_t>(!x.valid);
    return x;
  }
  __device__ __forceinline__ void check_exponents(const Block& x, int32_t least, int32_t most) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.bad |= static_cast<uint32_t>(x.exponents[h] < least || x.exponents[h] > most);
    }
  }

  __device__ __forceinline__ const uint16_t* query(int32_t column) const {
    return static_cast<const uint16_t*>(call.q) +
           (int64_t{row_index} * params.row_columns + column) * kHeadDim;
  }
  // Cosines and sines of the first position of a block of the row.
  __device__ __forceinline__ const float* block_turns(int32_t block) const {
    const int32_t dims = kHalves ? kHeadDim : call.weighted.rotary_dims;
    return call.weighted.block_turns + int64_t{block} * dims;
  }

  // The scales of the channels of the row, of which the largest is 1/2: fp16 then holds any pair
  // of a query turned back.
  __device__ __forceinline__ const float* scales() const {
    return call.weighted.key_scales + int64_t{step} * kHeadDim;
  }
  // The queries as the keys of a block see them: times the scales of the channels, turned back by
  // the block's first position.
  __device__ __forceinline__ void turn_queries(int32_t block) {
    const auto g = static_cast<int32_t>(fresh_lane() / 4),
               t = static_cast<int32_t>(fresh_lane() % 4);
    const bool there = g < call.columns;
    const uint16_t* q = query(there ? g : 0) + 2 * t;
    const float* scale = scales() + 2 * t;
    const float* by = block_turns(block);
    const auto load = [&](int32_t d) {
      return there ? *reinterpret_cast<const uint32_t*>(q + d) : 0u;
    };
#pragma unroll
    for (int f = 0; f < (kHalves ? kPairBlocks : kDimBlocks); ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t d = 16 * f + 8 * h;
        const float2 x = unpack_halves(load(d));
        const float2 of = *reinterpret_cast<const float2*>(scale + d);
        if constexpr (kHalves) {
          const float2 y = unpack_halves(load(d + kHeadDim / 2));
          const float4 turn = *reinterpret_cast<const float4*>(by + 2 * (d + 2 * t));
          const float cos[2] = {of.x * turn.x, of.y * turn.z};
          const float sin[2] = {of.x * turn.y, of.y * turn.w};
          state.q[f][h] = pack_halves(x.x * cos[0] + y.x * sin[0], x.y * cos[1] + y.y * sin[1]);
          state.q[f + kPairBlocks][h] =
              pack_halves(y.x * cos[0] - x.x * sin[0], y.y * cos[1] - x.y * sin[1]);
        } else if constexpr (kNeighbours) {
          const int32_t pair = 8 * f + 4 * h + t;
          float2 turn = {1.0f, 0.0f};
          if (2 * pair < call.weighted.rotary_dims) {
            turn = *reinterpret_cast<const float2*>(by + 2 * pair);
          }
          state.q[f][h] = pack_halves(of.x * (x.x * turn.x + x.y * turn.y),
                                      of.y * (x.y * turn.x - x.x * turn.y));
        } else {
          state.q[f][h] = pack_halves(of.x * x.x, of.y * x.y);
        }
      }
    }
  }

  // The means of dim blocks 2 i and 2 i + 1, of each those of two registers.
  __device__ __forceinline__ uint4 load_means_of(int i) const {
    return load_shared_16(means + (4 * i + fresh_lane() % 4) * 16);
  }
  // Codes of dim block f into keys before RoPE, in units of their channels times kKeyUnit. factors:
  // of the tokens of even and of odd registers; mean: load_means_of(f / 2).
  __device__ __forceinline__ static void dequantize(int f, const uint32_t (&factors)[2],
                                                    const uint4& mean, uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t of = f % 2 == 0 ? (r < 2 ? mean.x : mean.y) : r < 2 ? mean.z : mean.w;
      a[r] = fma_halves(a[r], factors[r % 2], of);
    }
  }
  // Dim blocks f and f + kPairBlocks of tile o, turned by their places.
  __device__ __forceinline__ void turn_halves(int o, int f, uint32_t (&x)[4],
                                              uint32_t (&y)[4]) const {
    const uint32_t at = turns + ((o * kPairBlocks + f) * 2 * kWarpLanes + fresh_lane()) * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 turn = load_shared_16(at + i * kWarpLanes * 16);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t cos = r == 0 ? turn.x : turn.z, sin = r == 0 ? turn.y : turn.w;
        const uint32_t a = x[2 * i + r], b = y[2 * i + r];
        x[2 * i + r] = fma_halves(a, cos, negate_halves(multiply_halves(b, sin)));
        y[2 * i + r] = fma_halves(b, cos, multiply_halves(a, sin));
      }
    }
  }
  __device__ __forceinline__ void turn_neighbours(int o, int f, uint32_t (&x)[4]) const {
    const uint4 turn =
        load_shared_16(turns + ((o * kDimBlocks + f) * kWarpLanes + fresh_lane()) * 16);
    const uint32_t by[4] = {turn.x, turn.y, turn.z, turn.w};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t cos = __byte_perm(by[r], 0, 0x1010), sin = __byte_perm(by[r], 0, 0x3232);
      const uint32_t crossed = __byte_perm(x[r], 0, 0x1032) ^ 0x8000u;  // (-second, first)
      x[r] = fma_halves(x[r], cos, multiply_halves(crossed, sin));
    }
  }

  // The factors of a tile's tokens in even and in odd registers.
  __device__ __forceinline__ static void tile_factors(int o, uint32_t factors,
                                                      uint32_t (&of_rows)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t both = __shfl_sync(
          kFullWarp, factors, static_cast<int32_t>(16 * o + 8 * h + fresh_lane() / 4) % 32);
      of_rows[h] = __byte_perm(both, 0, o < 2 ? 0x1010 : 0x3232);
    }
  }

  // All slices are coded.
  __device__ __forceinline__ void score_coded_tiles(const Block& x, uint32_t factors,
                                                    float (&s)[kItemTiles][4]) {
    Streams streams[kSlices];
    const uint32_t base = code_halves(call.keys.codebook.base);
#pragma unroll
    for (int z = 0; z < kSlices; ++z) open_streams(x.slice[z], streams[z]);
    const int32_t tiles = tile_count(x.slice[0].block.tokens);
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4] = {};
      if (o < tiles) {
        uint32_t of_rows[2];
        tile_factors(o, factors, of_rows);
        if constexpr (kHalves) {
          uint32_t held[kPairBlocks][4];
          uint4 mean;
#pragma unroll
          for (int f = 0; f < kPairBlocks; ++f) {
            streams[f / kSliceBlocks].codes(key_table, base, held[f]);
            if (f % 2 == 0) mean = load_means_of(f / 2);
            dequantize(f, of_rows, mean, held[f]);
          }
#pragma unroll
          for (int f = 0; f < kPairBlocks; ++f) {
            const int second = f + kPairBlocks;
            uint32_t a[4];
            streams[second / kSliceBlocks].codes(key_table, base, a);
            if (f == 0 || second % 2 == 0) mean = load_means_of(second / 2);
            dequantize(second, of_rows, mean, a);
            turn_halves(o, f, held[f], a);
            mma_m16n8k16(tile, held[f], state.q[f][0], state.q[f][1]);
            mma_m16n8k16(tile, a, state.q[f + kPairBlocks][0], state.q[f + kPairBlocks][1]);
          }
        } else {
          uint4 mean;
#pragma unroll
          for (int f = 0; f < kDimBlocks; ++f) {
            uint32_t a[4];
            streams[f / kSliceBlocks].codes(key_table, base, a);
            if (f % 2 == 0) mean = load_means_of(f / 2);
            dequantize(f, of_rows, mean, a);
            if constexpr (kNeighbours) turn_neighbours(o, f, a);
            mma_m16n8k16(tile, a, state.q[f][0], state.q[f][1]);
          }
        }
      }
      push_tile(s, tile);
    }
#pragma unroll
    for (int z = 0; z < kSlices; ++z) state.bad |= streams_end(x.slice[z], streams[z]);
  }

  // Raw slices, or one that is coded beside a raw one: rare, so its code is short, not fast.
  __device__ __forceinline__ void score_other_tiles(const Block& x, uint32_t factors,
                                                    float (&s)[kItemTiles][4]) {
    Streams streams[kSlices];
    const uint32_t base = code_halves(call.keys.codebook.base);
#pragma unroll
    for (int z = 0; z < kSlices; ++z) {
      if (x.slice[z].block.coded) open_streams(x.slice[z], streams[z]);
    }
    const auto product = [&](int f, const uint32_t(&a)[4], float(&tile)[4]) {
      uint32_t q[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kDimBlocks; ++i) {
        if (i == f) q[0] = state.q[i][0], q[1] = state.q[i][1];
      }
      mma_m16n8k16(tile, a, q[0], q[1]);
    };
    const auto codes = [&](int z, int o, int f, uint32_t(&a)[4]) {
      if (x.slice[z].block.coded) {
        streams[z].codes(key_table, base, a);
      } else {
        raw_fragment(x.slice[z].raw, kSliceDim, Component::kKey, o, f % kSliceBlocks, a);
      }
    };
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4] = {};
      uint32_t of_rows[2];
      tile_factors(o, factors, of_rows);
      const bool there = o < tile_count(x.slice[0].block.tokens);
#pragma unroll 1
      for (int f = 0; f < (kHalves || kSlices == 2 ? kPairBlocks : kDimBlocks) && there; ++f) {
        uint32_t a[4], b[4];
        codes(0, o, f, a);
        dequantize(f, of_rows, load_means_of(f / 2), a);
        if constexpr (kNeighbours) turn_neighbours(o, f, a);
        if constexpr (kHalves || kSlices == 2) {
          const int second = f + kPairBlocks;
          codes(kSlices - 1, o, second, b);
          dequantize(second, of_rows, load_means_of(second / 2), b);
          if constexpr (kHalves) turn_halves(o, f, a, b);
          if constexpr (kNeighbours) turn_neighbours(o, second, b);
          product(second, b, tile);
        }
        product(f, a, tile);
      }
      push_tile(s, tile);
    }
#pragma unroll
    for (int z = 0; z < kSlices; ++z) {
      if (x.slice[z].block.coded) state.bad |= streams_end(x.slice[z], streams[z]);
    }
  }

  __device__ __forceinline__ static uint32_t code_halves(int32_t code) {
    const float x = static_cast<float>(code) / kDigitScale;
    return pack_halves(x, x);
  }
  __device__ __forceinline__ static void open_streams(const WeightedSlice<Code::kStreams>& slice,
                                                      Streams& streams) {
#pragma unroll
    for (int s = 0; s < Code::kStreams; ++s) {
      streams.stream[s].open(slice.block.payload, slice.begin[s], Streams::kBias);
    }
  }
  // Not 0 unless this lane's streams end where the next ones begin.
  __device__ __forceinline__ static uint32_t streams_end(const WeightedSlice<Code::kStreams>& slice,
                                                         const Streams& streams) {
    uint32_t bad = 0;
#pragma unroll
    for (int s = 0; s < Code::kStreams; ++s) {
      bad |= static_cast<uint32_t>(streams.stream[s].end(slice.block.payload, Streams::kBias) ^
                                   slice.end[s]);
    }
    return bad;
  }

  // Of the deltas of keys: a delta is then at most 2^7, and what meets it at most 2^15.
  static constexpr float kExceptionUnit = 0x1p-8f;
  // The scores that the exceptions of slice kSlice add.
  template <int kSlice>
  __device__ __forceinline__ void score_exceptions(const Block& x, int32_t block, uint32_t factors,
                                                   float (&s)[kItemTiles][4]) {
    const OpenBlock& b = x.slice[kSlice].block;
#pragma unroll 1
    for (int32_t first = 0; b.coded && first < b.exceptions(); first += kExceptionStep) {
      ExceptionPair pair;
      state.bad |= pair.template load<kSliceDim>(b.exception_words + 4 * first,
                                                 b.exceptions() - first, b.tokens, kExceptionUnit);
      const int32_t column = min(static_cast<int32_t>(fresh_lane() / 4), call.columns - 1);
      float meets[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int32_t d = kSlice * kSliceDims + pair.dim[j], token = pair.token[j];
        const uint32_t both = __shfl_sync(kFullWarp, factors, token % 32);
        const float2 factor = unpack_halves(both);
        meets[j] = (token < 32 ? factor.x : factor.y) / (kDigitScale * kExceptionUnit) *
                   turned_query(column, d, token, block);
      }
      const uint32_t operand = pack_halves(meets[0], meets[1]);
      const uint32_t rows = ExceptionPair::row_halves(pair.token);
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
        uint32_t a[2];
        pair.operand(rows, 16 * o, a);
        mma_m16n8k8(s[o], a, operand);
      }
    }
  }
  __device__ __forceinline__ float shared_half(uint32_t address) const {
    return half_to_float(static_cast<uint16_t>(load_shared_u16(address)));
  }
  // What channel d of a key of the block is multiplied by, at a place.
  __device__ __forceinline__ float turned_query(int32_t column, int32_t d, int32_t place,
                                                int32_t block) const {
    const uint16_t* q = query(column);
    if constexpr (kPairing == RopePairing::kNone) return scales()[d] * half_to_float(q[d]);
    const int32_t pair = kHalves ? d % (kHeadDim / 2) : d / 2;
    const int32_t first = kHalves ? pair : 2 * pair;
    const int32_t second = kHalves ? pair + kHeadDim / 2 : first + 1;
    float cos = scales()[d], sin = 0.0f;
    if (kHalves || 2 * pair < call.weighted.rotary_dims) {
      const float* by = block_turns(block) + 2 * pair;
      sin = cos * by[1], cos *= by[0];
    }
    const float x = half_to_float(q[first]), y = half_to_float(q[second]);
    const float back_x = x * cos + y * sin, back_y = y * cos - x * sin;
    const float2 turn = place_turn(first, place);
    return d == first ? back_x * turn.x + back_y * turn.y : back_y * turn.x - back_x * turn.y;
  }
  // first: the first dim of the pair.
  __device__ __forceinline__ float2 place_turn(int32_t first, int32_t place) const {
    const int32_t f = first / kDimBlock, within = first % kDimBlock;
    const int32_t o = place / kTileTokens, half = place % kTileTokens / 8;
    const int32_t lane = place % 8 * 4 + within % 8 / 2, high = within / 8;
    if constexpr (kHalves) {
      const uint32_t at =
          turns + (((o * kPairBlocks + f) * 2 + high) * kWarpLanes + lane) * 16 + half * 8;
      return {shared_half(at + within % 2 * 2), shared_half(at + 4 + within % 2 * 2)};
    } else {
      const uint32_t at =
          turns + ((o * kDimBlocks + f) * kWarpLanes + lane) * 16 + (half + 2 * high) * 4;
      return {shared_half(at), shared_half(at + 2)};
    }
  }

  __device__ __forceinline__ void score_block(const Block& x, int32_t block,
                                              float (&s)[kItemTiles][4]) {
    check_exponents(x, kLeastImportanceExponent, kMostImportanceExponent);
    if (!x.valid) return;
    const auto factor = [&](int h) {
      return kDigitScale * kKeyUnit * exp2_fast(0.125f * static_cast<float>(x.exponents[h]));
    };
    const uint32_t factors = pack_halves(factor(0), factor(1));
    if (x.coded) {
      score_coded_tiles(x, factors, s);
    } else {
      score_other_tiles(x, factors, s);
    }
    score_exceptions<0>(x, block, factors, s);
    if constexpr (kSlices == 2) score_exceptions<1>(x, block, factors, s);
  }

  // Scores into the B operand of P^T, times the factors of the values.
  __device__ __forceinline__ void weigh_values(const Block& x, float (&s)[kItemTiles][4],
                                               uint32_t (&p)[kItemTiles][2]) {
    const int32_t tokens = x.slice[0].block.tokens;
    state.hide_behind(tokens, s);
    state.template raise_reference<false>(s, key_scale);
    raise_octave(x, tokens);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = exp2_fast(0.125f * static_cast<float>(x.exponents[h] - 8 * value_octave));
    }
    float sum[2] = {};
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float f = __shfl_sync(kFullWarp, factor[o / 2],
                                    static_cast<int32_t>(16 * o + 8 * h + fresh_lane() / 4) % 32);
        const float a = exp2_fast(fmaf(s[o][2 * h], key_scale, -state.reference[0]));
        const float b = exp2_fast(fmaf(s[o][2 * h + 1], key_scale, -state.reference[1]));
        sum[0] += a, sum[1] += b;
        p[o][h] = transpose_8x8(pack_halves(f * a, f * b));
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 4; i < 32; i *= 2) sum[c] += __shfl_xor_sync(kFullWarp, sum[c], i);
      state.sum[c] += sum[c];
    }
  }
  // Keeps p f(e) below 2^15.
  __device__ __forceinline__ void raise_octave(const Block& x, int32_t tokens) {
    const auto lane = static_cast<int32_t>(fresh_lane());
    int32_t most = lane < tokens ? x.exponents[0] : kLeastExponent;
    if (lane + 32 < tokens) most = max(most, x.exponents[1]);
    if (!__any_sync(kFullWarp, most > 8 * (value_octave + kOctaveHeadroom))) return;
    const int32_t octave = __reduce_max_sync(kFullWarp, most) >> 3;
    const float factor = power_of_two(max(value_octave - octave, -126));
    value_octave = octave;
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.out[f][i] *= factor;
    }
  }

  // Outputs of slice kSlice and of those behind it.
  template <int kSlice>
  __device__ __forceinline__ void add_slices(const Block& x,
                                             const uint32_t (&weights)[kItemTiles][2]) {
    const auto& slice = x.slice[kSlice];
    uint32_t p[kItemTiles][2];
#pragma unroll
    for (int o = 0; o < kItemTiles; ++o) p[o][0] = weights[o][0], p[o][1] = weights[o][1];
    if (slice.block.coded) {
#pragma unroll 1
      for (int32_t i = 0; i < slice.block.exceptions(); i += kExceptionStep) {
        Base::template add_exceptions<kSlice>(slice.block, i, p);
      }
      Streams streams;
      open_streams(slice, streams);
      const uint32_t base = code_halves(call.values.codebook.base);
      const int32_t tiles = tile_count(slice.block.tokens);
#pragma unroll 1
      for (int o = 0; o < tiles; ++o) {
#pragma unroll
        for (int f = kSlice * kSliceBlocks; f < (kSlice + 1) * kSliceBlocks; ++f) {
          uint32_t a[4];
          streams.codes(value_table, base, a);
          mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
        }
        shift_tiles(p);
      }
      state.bad |= streams_end(slice, streams);
    } else {
      add_raw<kSlice>(*this, slice.block, slice.raw, p);
    }
    if constexpr (kSlice + 1 < kSlices) add_slices<kSlice + 1>(x, weights);
  }

  // What begin_blocks() asked for. tokens: coded ones of the row and its sinks, from the first of
  // these blocks on.
  __device__ __forceinline__ void attend_blocks(int32_t tokens) {
#pragma unroll 1
    for (int32_t i = 0; i < run.count; i += 2) {
      const int32_t block = from + i / 2;
      const int32_t here = min(tokens - i * (kBlockTokens / 2), kBlockTokens) -
                           (block == 0 ? call.weighted.sink_tokens : 0);
      float s[kItemTiles][4] = {};
      uint32_t p[kItemTiles][2];
      turn_queries(block);
      score_block(open_block(i, params.headers.keys, here), block, s);
      Base::next_block(i);
      const Block values = open_block(i + 1, params.headers.values, here);
      check_exponents(values, kLeastExponent, kMostExponent);
      weigh_values(values, s, p);
      if (values.valid) add_slices<0>(values, p);
      Base::next_block(i + 1);
    }
  }

  // The raw sinks of the row: few, so their code is short.
  __device__ __forceinline__ void attend_sinks(float scale, const CodedRow& row) {
    const auto g = static_cast<int32_t>(fresh_lane() / 4),
               t = static_cast<int32_t>(fresh_lane() % 4);
    const int32_t count = row.sink_tokens;
    const auto* keys =
        reinterpret_cast<const uint16_t*>(call.weighted.raw_sinks + int64_t{row.first_sink} * 16);
    const uint16_t* values = keys + count * kHeadDim;
    const auto value = [&](int32_t token, int32_t d) {
      return token < count ? uint32_t{values[token * kHeadDim + d]} : 0u;
    };
    float s[kItemTiles][4] = {};
    uint32_t p[kItemTiles][2];
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int32_t token = g + 8 * (r % 2), d = 16 * f + 2 * t + 8 * (r / 2);
        a[r] = token < count ? *reinterpret_cast<const uint32_t*>(keys + token * kHeadDim + d) : 0u;
      }
      mma_m16n8k16(s[0], a, state.q[f][0], state.q[f][1]);
    }
    const ColumnSight sight(params, count + row.window_tokens);
    sight.hide(0, s);
    state.template weigh<true>(s, count, scale, p);
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int32_t d = 16 * f + g + 8 * (r % 2), token = 2 * t + 8 * (r / 2);
        a[r] = value(token, d) | value(token + 1, d) << 16;
      }
      mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
    }
  }

  __device__ __forceinline__ bool is_named(const CodedRow& row) const {
    const WeightedRows& w = call.weighted;
    const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
    const int64_t sink_bytes = int64_t{row.sink_tokens} * kHeadDim * 4;
    return this->fits && from >= 0 && row.coded_tokens >= 0 && row.window_tokens >= 0 &&
           row.sink_tokens >= 0 && row.sink_tokens <= kMostRawSinks &&
           (blocks == 0 || row.sink_tokens == w.sink_tokens) &&
           (kPairing == RopePairing::kNone || blocks <= w.num_block_turns) &&
           (row.sink_tokens == 0 ||
            int64_t{row.first_sink} * 16 + sink_bytes <= w.raw_sinks_size) &&
           to <= coded_row_items(row.coded_tokens, row.window_tokens, row.sink_tokens) &&
           row.step >= 0 && row.step < call.num_steps && row.first_page >= 0 &&
           row.first_page + (row.window_tokens + kBlockTokens - 1) / kBlockTokens <=
               call.num_window_pages &&
           row.first_block >= 0 && int64_t{row.first_block} + blocks <= call.num_blocks &&
           (blocks == 0 || row.window_tokens >= params.queries.q_len - 1);
  }

  __device__ __forceinline__ void begin_row(int32_t r, int32_t begin, int32_t end) {
    row_index = r;
    const CodedRow& row = call.rows[r];
    const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
    from = begin - row.first_item, to = end - row.first_item;
    const bool named = is_named(row);
    if (!named) to = from;
    state.bad = static_cast<uint32_t>(!named);
    run.count = 0;
    value_octave = kNoOctave;
    step = named ? row.step : 0;
    state.load_queries(call, query(0));
    state.begin_plain();
    if (from < min(to, blocks)) {
      state.bad |= Base::begin_blocks(row.first_block + from, min(to, blocks) - from);
      load_means();
    }
    key_scale = this->score_scale() * (named ? call.keys.steps[row.step] : 0.0f);
  }
  __device__ __forceinline__ void load_means() const {
    const auto* of_row =
        reinterpret_cast<const uint4*>(call.weighted.key_means) + int64_t{step} * (kHeadDim / 8);
    __syncwarp();  // those of the row before have been read
    const auto lane = static_cast<int32_t>(fresh_lane());
    if (lane < kHeadDim / 8) store_shared_16(means + 16 * lane, of_row[lane]);
    __syncwarp();
  }

  // What begin_row() began.
  __device__ __forceinline__ void finish_row(float* partial) {
    const CodedRow& row = call.rows[row_index];
    if (to > from) {
      const int32_t blocks = coded_row_blocks(row.coded_tokens, row.sink_tokens);
      if (from < blocks) {
        attend_blocks(row.coded_tokens + row.sink_tokens - from * kBlockTokens);
        state.finish_blocks(call.values.steps[row.step] * power_of_two(value_octave), 0.0f);
        state.load_queries(call, query(0));
      }
      const int32_t sinks = row.sink_tokens > 0 ? 1 : 0;
      if (sinks == 1 && from <= blocks && to > blocks) attend_sinks(this->score_scale(), row);
      const int32_t first = max(from - blocks - sinks, 0);
      if (to > blocks + sinks) {
        Base::attend_window(this->score_scale(), row, first, to - blocks - sinks - first);
      }
    }
    state.leave(call, partial);
  }
};

}  // namespace tierkv
