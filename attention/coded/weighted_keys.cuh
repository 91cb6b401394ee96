// SPDX-License-Identifier: Apache-2.0
// What a warp does with the keys of coded blocks: scores out of a query turned back and of keys
// turned by their places.
#pragma once

#include "attention/coded/weighted_run.cuh"

namespace tierkv {

// For keys that turn in halves of part of a head, whose partners no lane holds together: a turned
// dim is cos times it plus or minus sin times its partner. So a key's dim meets the query at its
// own place times cos, and the query at its partner's, with the sign, times sin. That one is here.
template <int kBlocks>
struct CrossedQueries {
  uint32_t of[kBlocks][2];
};
template <>
struct CrossedQueries<0> {};

template <int kDimBlocks, class Code>
struct WeightedKeys : WeightedRun<kDimBlocks, Code> {
  using Base = WeightedRun<kDimBlocks, Code>;
  using Base::call, Base::params, Base::state, Base::run;
  using Base::key_table, Base::kHeadDim, Base::kSlices, Base::kSliceBlocks, Base::kSliceDim;
  using Base::turns, Base::means, Base::kTurns;
  using Block = typename Base::Block;
  using Streams = LaneCodes<Code>;
  static constexpr KeyTurning kTurning = Code::kTurning;
  static constexpr bool kHalves = kTurning == KeyTurning::kHalves;
  static constexpr bool kPart = kTurning == KeyTurning::kPartHalves;
  static constexpr bool kNeighbours = kTurning == KeyTurning::kNeighbours;
  static constexpr int kPairBlocks = kDimBlocks / 2;  // pairs of dim blocks; those of half a head
  CrossedQueries<kPart ? kDimBlocks : 0> crossed;

  __device__ __forceinline__ const uint16_t* query(int32_t row, int32_t column) const {
    return static_cast<const uint16_t*>(call.q) +
           (int64_t{row} * params.row_columns + column) * kHeadDim;
  }
  // The queries of a row, times the scales of the channels, for turn_queries(). The largest scale
  // is 1/2, so that fp16 holds every query that is turned back.
  __device__ __forceinline__ void keep_queries(int32_t row, int32_t step) {
    const auto g = static_cast<int32_t>(fresh_lane() / 4),
               t = static_cast<int32_t>(fresh_lane() % 4);
    const bool there = g < call.columns;
    const uint16_t* q = query(row, there ? g : 0) + 2 * t;
    const float* scale = call.weighted.key_scales + int64_t{step} * kHeadDim + 2 * t;
    uint32_t x[kDimBlocks][2];
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int32_t d = 16 * f + 8 * h;
        const float2 of = *reinterpret_cast<const float2*>(scale + d);
        x[f][h] = there ? multiply_halves(*reinterpret_cast<const uint32_t*>(q + d),
                                          pack_halves(of.x, of.y))
                        : 0u;
      }
    }
#pragma unroll
    for (int f = 0; f < kDimBlocks; f += 2) {
      this->queries.store(f / 2, {x[f][0], x[f][1], x[f + 1][0], x[f + 1][1]});
    }
  }
  // The queries as the keys of a block see them: turned back by the block's first position.
  __device__ __forceinline__ void turn_queries(int32_t block) {
    const uint16_t* by = call.weighted.block_turns + int64_t{block} * kHeadDim;
    uint32_t x[kDimBlocks][2];
#pragma unroll
    for (int f = 0; f < kDimBlocks; f += 2) {
      const uint4 both = this->queries.load(f / 2);
      x[f][0] = both.x, x[f][1] = both.y, x[f + 1][0] = both.z, x[f + 1][1] = both.w;
    }
    if constexpr (kPart) {
      turn_part(by, x);
    } else {
      turn_whole(by, x);
    }
  }
  __device__ __forceinline__ void turn_whole(const uint16_t* by,
                                             const uint32_t (&x)[kDimBlocks][2]) {
    const auto t = static_cast<int32_t>(fresh_lane() % 4);
#pragma unroll
    for (int f = 0; f < (kHalves ? kPairBlocks : kDimBlocks); ++f) {
      uint32_t turn[4] = {};  // of halves: cosines and sines of both registers
      if constexpr (kHalves) {
        const uint4 of = *reinterpret_cast<const uint4*>(by + (4 * f + t) * 8);
        turn[0] = of.x, turn[1] = of.y, turn[2] = of.z, turn[3] = of.w;
      } else if constexpr (kNeighbours) {
        const uint2 of = *reinterpret_cast<const uint2*>(by + (4 * f + t) * 4);
        turn[0] = of.x, turn[1] = of.y;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kHalves) {
          const uint32_t a = x[f][h], b = x[f + kPairBlocks][h];
          const uint32_t cos = turn[2 * h], sin = turn[2 * h + 1];
          state.q[f][h] = fma_halves(a, cos, multiply_halves(b, sin));
          state.q[f + kPairBlocks][h] = fma_halves(b, cos, negate_halves(multiply_halves(a, sin)));
        } else if constexpr (kNeighbours) {
          const uint32_t cos = low_halves(turn[h], turn[h]), sin = high_halves(turn[h], turn[h]);
          const uint32_t crossed =
              __byte_perm(x[f][h], 0, 0x1032) ^ 0x80000000u;  // (second, -first)
          state.q[f][h] = fma_halves(x[f][h], cos, multiply_halves(crossed, sin));
        } else {
          state.q[f][h] = x[f][h];
        }
      }
    }
  }

  // The place of dim block f's turns in a table for part of a head. If the table has room, it
  // repeats the turns of the first dims of the pairs for the second dims.
  __device__ __forceinline__ int32_t turns_at(int32_t f) const {
    const int32_t half = call.weighted.pairs / kDimBlock;
    return 4 * call.weighted.pairs > kHeadDim && f >= half ? f - half : f;
  }
  __device__ __forceinline__ bool part_turns(int32_t f) const {
    return f < 2 * call.weighted.pairs / kDimBlock;
  }
  // turn_queries() of part of a head. by: turns of the block; x: the queries.
  __device__ __forceinline__ void turn_part(const uint16_t* by,
                                            const uint32_t (&x)[kDimBlocks][2]) {
    const auto t = static_cast<int32_t>(fresh_lane() % 4);
    const int32_t half = call.weighted.pairs / 8;  // of the dims that turn, in registers
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      const bool turns = part_turns(f);
      uint4 turn = {kOneHalves, 0, kOneHalves, 0};
      if (turns) turn = *reinterpret_cast<const uint4*>(by + (4 * turns_at(f) + t) * 8);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t cos = h == 0 ? turn.x : turn.z, sin = h == 0 ? turn.y : turn.w;
        const int32_t at = 2 * f + h;
        const bool second = turns && at >= half;
        const uint32_t partner = this->queries.word(second ? at - half : turns ? at + half : at);
        const uint32_t other = second ? negate_halves(partner) : partner;
        state.q[f][h] = fma_halves(x[f][h], cos, multiply_halves(other, sin));
        crossed.of[f][h] = fma_halves(other, cos, negate_halves(multiply_halves(x[f][h], sin)));
      }
    }
  }

  // The dim block that comes as number i in a tile, the first or second of a pair of them.
  __device__ __forceinline__ static constexpr int32_t block_at(int i) {
    return key_block_at(kDimBlocks, i);
  }
  // The means of dim blocks block_at(2 i) and block_at(2 i + 1): two registers for each.
  __device__ __forceinline__ uint4 load_means_of(int i) const {
    return load_shared_16(means + (4 * i + fresh_lane() % 4) * 16);
  }
  // Codes of a pair of dim blocks into keys before RoPE, in units of their channels times kKeyUnit.
  // factors: of the tokens of even and of odd registers; mean: load_means_of() the pair.
  __device__ __forceinline__ static void dequantize(const uint32_t (&factors)[2], const uint4& mean,
                                                    uint32_t (&a)[4], uint32_t (&b)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      a[r] = fma_halves(a[r], factors[r % 2], r < 2 ? mean.x : mean.y);
      b[r] = fma_halves(b[r], factors[r % 2], r < 2 ? mean.z : mean.w);
    }
  }
  // The keys of dim blocks f and g, the pair of a tile, turned by their places; those of part of a
  // head are not turned here but in multiply().
  __device__ __forceinline__ void turn(int o, int f, int g, uint32_t (&a)[4],
                                       uint32_t (&b)[4]) const {
    if constexpr (kHalves) turn_halves(o, f, a, b);
    if constexpr (kNeighbours) turn_neighbours(o, f, a), turn_neighbours(o, g, b);
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

  // A query's dim block, and what it meets of its partner's.
  struct QueryBlock {
    uint32_t own[2], crossed[2];
  };
  __device__ __forceinline__ QueryBlock query_block(int f) const {
    QueryBlock q{{state.q[f][0], state.q[f][1]}, {0, 0}};
    if constexpr (kPart) q.crossed[0] = crossed.of[f][0], q.crossed[1] = crossed.of[f][1];
    return q;
  }
  // Adds to the scores of tile o what turn() has left of dim block f.
  __device__ __forceinline__ void multiply(int o, int f, const QueryBlock& q,
                                           const uint32_t (&x)[4], float (&tile)[4]) const {
    if constexpr (kPart) {
      if (part_turns(f)) {
        const uint32_t at =
            turns + ((o * kPairBlocks + turns_at(f)) * 2 * kWarpLanes + fresh_lane()) * 16;
        uint32_t by_cos[4], by_sin[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 turn = load_shared_16(at + i * kWarpLanes * 16);
#pragma unroll
          for (int r = 2 * i; r < 2 * i + 2; ++r) {
            by_cos[r] = multiply_halves(x[r], r % 2 == 0 ? turn.x : turn.z);
            by_sin[r] = multiply_halves(x[r], r % 2 == 0 ? turn.y : turn.w);
          }
        }
        mma_m16n8k16(tile, by_cos, q.own[0], q.own[1]);
        mma_m16n8k16(tile, by_sin, q.crossed[0], q.crossed[1]);
        return;
      }
    }
    mma_m16n8k16(tile, x, q.own[0], q.own[1]);
  }

  // The factors of a tile's tokens in even and in odd registers.
  __device__ __forceinline__ static void tile_factors(int o, uint32_t factors,
                                                      uint32_t (&of_rows)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t both =  // a shuffle takes lanes modulo 32
          __shfl_sync(kFullWarp, factors, 16 * o + 8 * h + static_cast<int32_t>(fresh_lane() / 4));
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
#pragma unroll
        for (int i = 0; i < kPairBlocks; ++i) {
          const int32_t f = block_at(2 * i), g = block_at(2 * i + 1);
          uint32_t a[4], b[4];
          streams[0].codes(key_table, base, a);
          streams[kSlices - 1].codes(key_table, base, b);
          dequantize(of_rows, load_means_of(i), a, b);
          turn(o, f, g, a, b);
          multiply(o, f, query_block(f), a, tile);
          multiply(o, g, query_block(g), b, tile);
        }
      }
      push_tile(s, tile);
    }
#pragma unroll
    for (int z = 0; z < kSlices; ++z) state.bad |= streams_end(x.slice[z], streams[z]);
  }

  // Blocks with a raw slice are rare: this function is short, not fast.
  __device__ __forceinline__ void score_other_tiles(const Block& x, uint32_t factors,
                                                    float (&s)[kItemTiles][4]) {
    Streams streams[kSlices];
    const uint32_t base = code_halves(call.keys.codebook.base);
#pragma unroll
    for (int z = 0; z < kSlices; ++z) {
      if (x.slice[z].block.coded) open_streams(x.slice[z], streams[z]);
    }
    const auto product = [&](int o, int f, const uint32_t(&a)[4], float(&tile)[4]) {
      QueryBlock q{};
#pragma unroll
      for (int i = 0; i < kDimBlocks; ++i) {
        if (i == f) q = query_block(i);
      }
      multiply(o, f, q, a, tile);
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
      for (int i = 0; i < kPairBlocks && there; ++i) {
        const int32_t f = block_at(2 * i), g = block_at(2 * i + 1);
        uint32_t a[4], b[4];
        codes(0, o, f, a);
        codes(kSlices - 1, o, g, b);
        dequantize(of_rows, load_means_of(i), a, b);
        turn(o, f, g, a, b);
        product(o, f, a, tile);
        product(o, g, b, tile);
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
  // Not 0 unless this lane's streams end where those of the next lane begin.
  __device__ __forceinline__ static uint32_t streams_end(const WeightedSlice<Code::kStreams>& slice,
                                                         const Streams& streams) {
    uint32_t bad = 0;
#pragma unroll
    for (int s = 0; s < Code::kStreams; ++s) {
      bad |= static_cast<uint32_t>(streams.stream[s].end(slice.block.payload, Streams::kBias)) ^
             (slice.ends >> (16 * s));
    }
    return bad & 0xffffu;
  }

  // The unit of the deltas of keys: a delta is at most 2^7 of them.
  static constexpr float kExceptionUnit = 0x1p-8f;
  // The scores that the exceptions of slice kSlice add.
  template <int kSlice>
  __device__ __forceinline__ void score_exceptions(const Block& x, uint32_t factors,
                                                   float (&s)[kItemTiles][4]) {
    const OpenBlock b = x.slice[kSlice].with_exceptions();
#pragma unroll 1
    for (int32_t first = 0; b.coded && first < b.exceptions(); first += kExceptionStep) {
      const uint32_t words = b.exception_words + 4 * first;
      const int32_t left = b.exceptions() - first;
      ExceptionPair pair;
      state.bad |= pair.template load<kSliceDim>(words, left, b.tokens, kExceptionUnit);
      const uint32_t word = exception_of_row(words, left);
      uint32_t queries;
      if constexpr (kPart) {
        queries = pick_part<kSlice>(word, factors);
      } else {
        queries = pick_queries<kSlice>(word, factors);
      }
      const uint32_t rows = ExceptionPair::row_halves(pair.token);
#pragma unroll
      for (int o = 0; o < kItemTiles; ++o) {
        uint32_t a[2];
        pair.operand(rows, 16 * o, a);
        mma_m16n8k8(s[o], a, queries);
      }
    }
  }
  // What the deltas of eight exceptions meet: the query at the channel, turned forwards by the
  // place of the token, times the factor of the token. word: the low half of exception (lane / 4).
  // An exception that is wrong may get any query; its delta is 0.
  template <int kSlice>
  __device__ __forceinline__ uint32_t pick_queries(uint32_t word, uint32_t factors) const {
    const auto token = static_cast<int32_t>(word / kSliceDims % kBlockTokens);
    const auto d = static_cast<int32_t>(word % kSliceDims + kSlice * kSliceDims);
    const bool second = kHalves ? d >= kHeadDim / 2 : d % 2 == 1;
    const int32_t partner = kHalves ? kHeadDim / 2 : 1, low = second ? d - partner : d;
    // The channel, turned, has these parts in both channels of its pair.
    uint32_t of_low = kOneHalves, of_high = 0;
    if constexpr (kTurns) {
      const uint32_t cos_sin = place_turn(min(low, (kHalves ? kHeadDim / 2 : kHeadDim) - 1), token);
      const uint32_t turned = second ? __byte_perm(cos_sin, 0, 0x1032) ^ 0x8000u : cos_sin;
      of_low = low_halves(turned, turned), of_high = high_halves(turned, turned);
      if constexpr (kNeighbours) of_low = turned;
    }
    const PickedRows rows(kNeighbours || kHalves ? low : d, kNeighbours ? low + 1
                                                            : kHalves   ? low
                                                                        : d);
    float picked[4] = {};
#pragma unroll
    for (int i = 0; i < (kHalves ? kPairBlocks : kDimBlocks); ++i) {
      uint32_t a[4];
      rows.operand(i, of_low, a);
      mma_m16n8k16(picked, a, state.q[i][0], state.q[i][1]);
      if constexpr (kHalves) {
        rows.operand(i, of_high, a);
        mma_m16n8k16(picked, a, state.q[i + kPairBlocks][0], state.q[i + kPairBlocks][1]);
      }
    }
    return exception_operand(picked, token, factors);
  }
  // pick_queries() of part of a head.
  template <int kSlice>
  __device__ __forceinline__ uint32_t pick_part(uint32_t word, uint32_t factors) const {
    const auto token = static_cast<int32_t>(word / kSliceDims % kBlockTokens);
    const auto d = static_cast<int32_t>(word % kSliceDims + kSlice * kSliceDims);
    const int32_t pairs = call.weighted.pairs;
    uint32_t cos = kOneHalves, sin = 0;
    if (d < 2 * pairs) {
      const uint32_t turn = place_turn(d < pairs ? d : d - pairs, token);
      cos = low_halves(turn, turn), sin = high_halves(turn, turn);
    }
    const PickedRows rows(d, d);
    float picked[4] = {};
#pragma unroll
    for (int i = 0; i < kDimBlocks; ++i) {
      const QueryBlock q = query_block(i);
      uint32_t a[4];
      rows.operand(i, cos, a);
      mma_m16n8k16(picked, a, q.own[0], q.own[1]);
      rows.operand(i, sin, a);
      mma_m16n8k16(picked, a, q.crossed[0], q.crossed[1]);
    }
    return exception_operand(picked, token, factors);
  }
  // What was picked times the factor of its token.
  __device__ __forceinline__ static uint32_t exception_operand(const float (&picked)[4],
                                                               int32_t token, uint32_t factors) {
    const float2 both = unpack_halves(__shfl_sync(kFullWarp, factors, token % 32));
    const float factor = (token < 32 ? both.x : both.y) / (kDigitScale * kExceptionUnit);
    return transpose_8x8(pack_halves(factor * picked[0], factor * picked[1]));
  }
  // Cosine and sine of a pair of channels at a place. first: the first channel of the pair.
  __device__ __forceinline__ uint32_t place_turn(int32_t first, int32_t place) const {
    const int32_t f = first / kDimBlock, within = first % kDimBlock;
    const int32_t o = place / kTileTokens, half = place % kTileTokens / 8;
    const int32_t lane = place % 8 * 4 + within % 8 / 2, high = within / 8;
    if constexpr (kHalves || kPart) {
      const uint32_t at =
          turns + (((o * kPairBlocks + f) * 2 + high) * kWarpLanes + lane) * 16 + half * 8;
      const uint32_t cos = load_shared(at), sin = load_shared(at + 4);
      return within % 2 == 0 ? low_halves(cos, sin) : high_halves(cos, sin);
    } else {
      return load_shared(turns + ((o * kDimBlocks + f) * kWarpLanes + lane) * 16 +
                         (half + 2 * high) * 4);
    }
  }

  __device__ __forceinline__ void score_block(const Block& x, float (&s)[kItemTiles][4]) {
    Base::check_exponents(x, kLeastImportanceExponent, kMostImportanceExponent);
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
    score_exceptions<0>(x, factors, s);
    if constexpr (kSlices == 2) score_exceptions<1>(x, factors, s);
  }
};

}  // namespace tierkv
