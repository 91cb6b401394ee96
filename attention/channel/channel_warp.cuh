// SPDX-License-Identifier: Apache-2.0
// One warp's attention over channel blocks and raw tiles of one row.
//
// Orientation and value scales as in warp_attention.cuh: S^T = K Q^T, O^T = V^T P^T, lane 4g + t
// holds tokens (or dims) g and g + 8 of columns (q heads) 2t and 2t + 1; the reference follows
// score + log2(value scale), so that weights fit fp16 whatever the scale of the values.
//
// Scaled queries are fp16, q * scale * 2^4 with the code factors folded in; what would pass 65504
// is cut there: such a channel alone moves a logit by thousands.
#pragma once

#include "attention/core/warp_columns.cuh"
#include "attention/tiers/decode.h"
#include "attention/tiers/page_tile.cuh"
#include "codec/format/channel_block.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// Floats from one column to the next in a part in shared memory; keeps its stores free of
// conflicts.
TKV_HD constexpr int32_t part_stride(int32_t head_dim) {
  return head_dim + 4;
}

inline constexpr int32_t kQueryShift = 4;
inline constexpr float kWeightExponent = 8.0f;  // of the largest weight when the reference is set
inline constexpr float kLazyExponent = 4.0f;    // by which weights may pass it
inline constexpr float kLeastValueScale = 0x1p-24f;

// What sets caches apart.
template <class Cache>
struct ChannelTraits {
  // Places at the beginning of a row, at most a tile, that hold no tokens.
  TKV_HD static constexpr int32_t skipped(const Cache&) { return 0; }
};

// What a warp sees to: first, first + step, ... before end.
struct WarpUnits {
  int32_t first, end, step;
};

// Methods that read a row take the cache that it is of, which has
//   Row, row(index)            where a row's tables are
//   block_id(row, index)       -1 where they name no block of the pool
//   block(id)                  a block's bytes, 16-byte aligned
//   raw_tile(row, c, tile)     null where there is none
template <int32_t kDim, CodeType kKeys, CodeType kValues>
class ChannelWarp {
 public:
  static constexpr int32_t kHeadDim = kDim;
  static constexpr int32_t kBlocks = kHeadDim / kDimBlock;
  // Accumulators of 256 dims leave registers for one.
  static constexpr int32_t kStepTiles = kHeadDim > 128 ? 1 : 2;
  static constexpr int32_t kQueryWords = kBlocks * 64;  // of a pass

  // query: of the warp's pass, B fragments [kBlocks][2][32 lanes] of words in shared memory: word
  // 32 i + l holds dims 8 i + 2 (l % 4) and the next of column l / 4.
  __device__ __forceinline__ ChannelWarp(const uint32_t* query, float scale_log2)
      : query_(query), scale_log2_(scale_log2) {
    columns_.begin();
  }

  // Raw tiles of a row, which has so many tokens in them; once, before all blocks. report() where a
  // tile is missing.
  template <class Cache, class Report>
  __device__ __forceinline__ void attend_raw(const Cache& cache, typename Cache::Row row,
                                             WarpUnits units, int32_t tokens,
                                             const Report& report) {
    uint32_t query[kBlocks][2];
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      query[f][0] = query_[64 * f + lane()], query[f][1] = query_[64 * f + 32 + lane()];
    }
#pragma unroll 1
    for (int32_t tile = units.first; tile < units.end; tile += units.step) {
      const uint8_t* keys = cache.raw_tile(row, Component::kKey, tile);
      if (keys == nullptr) {
        report();
        continue;
      }
      LaneWords<kRawCodes, kHeadDim> k[1], v[1];
      TileMetadata m[1];
      float score[1][4];
      k[0].load(keys, lane());
      v[0].load(cache.raw_tile(row, Component::kValue, tile), lane());
      m[0].set(1.0f, 0.0f);
      multiply_keys(k, query, score);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const int32_t token = tile * kTileTokens + lane() / 4 + 8 * (j / 2);
        const bool is_seen = token < tokens && token >= ChannelTraits<Cache>::skipped(cache);
        score[0][j] = is_seen ? score[0][j] * scale_log2_ : -INFINITY;
      }
      add_tokens(v, m, score);
    }
    scale_output(-1);
  }

  // The id of the first block in `units`, which are blocks; -1 where there are none.
  template <class Cache>
  __device__ __forceinline__ static int32_t first_id(const Cache& cache, typename Cache::Row row,
                                                     WarpUnits units) {
    return units.first < units.end ? cache.block_id(row, units.first) : -1;
  }

  // Blocks of a row, once, `id` that of the first; report() where an id is missing, and it is left
  // out. What a step needs is asked for while the step before it is worked on, across blocks.
  template <class Cache, class Report>
  __device__ __forceinline__ void attend_blocks(const Cache& cache, typename Cache::Row row,
                                                WarpUnits units, int32_t id, const Report& report) {
    const ChannelLayout& l = cache.layout;
    const int32_t steps = l.tiles() / kStepTiles;
    const uint8_t* block = nullptr;
    const int32_t end = units.end;
    int32_t index = units.first, at = 0;
    const bool first_is_there = id >= 0;
    // id: of block `index`, asked for a block earlier.
    const auto find = [&] {
      block = nullptr;
      while (index < end && block == nullptr) {
        if (id >= 0) {
          block = cache.block(id);
        } else {
          report();
        }
        index += units.step;
        id = first_id(cache, row, {index, end, units.step});
      }
    };
    find();
    Words next;
    if (block != nullptr) next.load(l, block, 0, lane());
    uint32_t scaled[kBlocks][2];
    float offset[2] = {};
    int32_t skipped = units.first == 0 && first_is_there ? ChannelTraits<Cache>::skipped(cache) : 0;
    while (block != nullptr) {
      const Words now = next;
      const bool begins = at == 0;
      if (++at == steps) {
        at = 0;
        find();
      }
      if (block != nullptr) next.load(l, block, at, lane());
      if (begins) scale_query(now.channels, scaled, offset);
      attend_words(now, scaled, offset, skipped);
      skipped = 0;
    }
    scale_output(1);
  }

  // states [8], part [8][part_stride(kHeadDim)]. After attend_raw() and attend_blocks(), once.
  __device__ __forceinline__ void store_part(SoftmaxState* states, float* part) {
    columns_.add_lanes();
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const float zero = columns_.over_lanes(zero_[j]);
      columns_.reference[j] -= kWeightExponent;
#pragma unroll
      for (float(&x)[4] : columns_.out) x[j] += zero, x[2 + j] += zero;
    }
    columns_.store(states, part, part_stride(kHeadDim), kBlockColumns);
  }

 private:
  static constexpr int32_t kChannelWords = (4 * kBlocks + 31) / 32;

  // From units of the codes to those of values (1), or back (-1): powers of two.
  __device__ __forceinline__ void scale_output(int32_t sign) {
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t exponent = unpacked_exponent(kValues, 16 * f + 8 * (i / 2));
        const auto power = static_cast<float>(1 << exponent);
        columns_.out[f][i] *= sign > 0 ? power : 1.0f / power;
      }
    }
  }
  __device__ __forceinline__ static int32_t lane() {
    return static_cast<int32_t>(threadIdx.x % 32);
  }

  // What a lane holds of a step, and of its block's channels the 16 bytes of dim blocks
  // lane / 4, lane / 4 + 8, ..
  struct Words {
    LaneWords<kKeys, kHeadDim> k[kStepTiles];
    LaneWords<kValues, kHeadDim> v[kStepTiles];
    uint2 m[kStepTiles];  // of the values, as stored: tokens g and g + 8
    uint4 channels[kChannelWords];

    __device__ __forceinline__ void load(const ChannelLayout& l, const uint8_t* block, int32_t step,
                                         int32_t of_lane) {
      constexpr int32_t kKeyBytes = TileLayout{kKeys, kHeadDim}.bytes();
      constexpr int32_t kValueBytes = TileLayout{kValues, kHeadDim}.bytes();
      const int32_t tile = step * kStepTiles;
#pragma unroll
      for (int32_t i = 0; i < kChannelWords; ++i) {
        const int32_t from = 32 * i + of_lane;
        if (step != 0 || from >= 4 * kBlocks) continue;
        channels[i] = *reinterpret_cast<const uint4*>(block + l.k_metadata + 16 * from);
      }
#pragma unroll
      for (int32_t i = 0; i < kStepTiles; ++i) {
        k[i].load(block + l.k_codes + (tile + i) * kKeyBytes, of_lane);
      }
#pragma unroll
      for (int32_t i = 0; i < kStepTiles; ++i) {
        v[i].load(block + l.v_codes + (tile + i) * kValueBytes, of_lane);
        m[i] = *reinterpret_cast<const uint2*>(block + l.v_metadata +
                                               (tile + i) * kMetadataBlockBytes +
                                               token_metadata_byte(0, of_lane / 4));
      }
    }
  };

  // The queries in units of the block's codes, and what the zero points add to the score of every
  // token, in log2 units: row 0 of a product whose other rows are 0.
  __device__ __forceinline__ void scale_query(const uint4 (&channels)[kChannelWords],
                                              uint32_t (&scaled)[kBlocks][2],
                                              float (&offset)[2]) const {
    const bool is_row = lane() < 4;
    float product[4] = {};
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      const int32_t from = 4 * (f % 8) + lane() % 4;
      const uint32_t zero_points[2] = {__shfl_sync(kFullWarp, channels[f / 8].z, from),
                                       __shfl_sync(kFullWarp, channels[f / 8].w, from)};
      const uint32_t a[4] = {is_row ? zero_points[0] : 0, 0, is_row ? zero_points[1] : 0, 0};
      mma_m16n8k16(product, a, query_[64 * f + lane()], query_[64 * f + 32 + lane()]);
    }
    __syncwarp();  // shuffles of both at once would take more registers than there are
#pragma unroll
    for (int32_t f = 0; f < kBlocks; ++f) {
      const int32_t from = 4 * (f % 8) + lane() % 4;
      const uint32_t scales[2] = {__shfl_sync(kFullWarp, channels[f / 8].x, from),
                                  __shfl_sync(kFullWarp, channels[f / 8].y, from)};
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t exponent = kQueryShift - code_shift(kKeys.bits(), 16 * f + 8 * half);
        const float factor = exponent >= 0 ? static_cast<float>(1 << exponent)
                                           : 1.0f / static_cast<float>(1 << -exponent);
        const uint32_t units = saturate_halves(multiply_halves(scales[half], factor));
        const uint32_t query = query_[64 * f + 32 * half + lane()];
        scaled[f][half] = saturate_halves(multiply_halves(units, query));
      }
    }
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      offset[j] = __shfl_sync(kFullWarp, product[j], lane() % 4) * scale_log2_;
    }
  }

  // Without the first `skipped` tokens.
  __device__ __forceinline__ void attend_words(const Words& w, const uint32_t (&scaled)[kBlocks][2],
                                               const float (&offset)[2], int32_t skipped) {
    const float unit = scale_log2_ * static_cast<float>(1 << (24 - kQueryShift));
    float score[kStepTiles][4];
    multiply_keys(w.k, scaled, score);
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) score[i][j] = fmaf(score[i][j], unit, offset[j % 2]);
    }
    if (skipped > 0) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        if (lane() / 4 + 8 * (j / 2) < skipped) score[0][j] = -INFINITY;
      }
    }
    TileMetadata m[kStepTiles];
#pragma unroll
    for (int32_t i = 0; i < kStepTiles; ++i) {
      const float2 low = unpack_halves(w.m[i].x), high = unpack_halves(w.m[i].y);
      m[i].scale[0] = low.x, m[i].zero_point[0] = low.y;
      m[i].scale[1] = high.x, m[i].zero_point[1] = high.y;
    }
    add_tokens(w.v, m, score);
  }

  // A tile, for score_tile() and add_tile().
  template <Component kComponent, CodeType kType>
  __device__ __forceinline__ static auto fragments(const LaneWords<kType, kHeadDim>& words) {
    return [&words](int f, uint32_t(&a)[4]) { words.template fragment<kComponent>(f, a); };
  }
  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void multiply_keys(const LaneWords<kType, kHeadDim> (&k)[kTiles],
                                                const uint32_t (&query)[kBlocks][2],
                                                float (&score)[kTiles][4]) const {
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (float& x : score[i]) x = 0;
      score_tile(query, fragments<Component::kKey>(k[i]), score[i]);
    }
  }

  template <int32_t kTiles>
  __device__ __forceinline__ void raise_reference(const float (&score)[kTiles][4],
                                                  const float (&scale)[kTiles][2]) {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        top[j % 2] = fmaxf(top[j % 2], score[i][j] + log2_fast(scale[i][j / 2]));
      }
    }
    columns_.raise(top, kLazyExponent, [&](int32_t j, float factor) { zero_[j] *= factor; });
  }

  template <CodeType kType, int32_t kTiles>
  __device__ __forceinline__ void add_tokens(const LaneWords<kType, kHeadDim> (&v)[kTiles],
                                             const TileMetadata (&m)[kTiles],
                                             const float (&score)[kTiles][4]) {
    float scale[kTiles][2];
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int32_t r = 0; r < 2; ++r) scale[i][r] = fmaxf(m[i].scale[r], kLeastValueScale);
    }
    raise_reference(score, scale);
#pragma unroll
    for (int32_t i = 0; i < kTiles; ++i) {
      float weight[4];
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        const float p = exp2_fast(score[i][j] - columns_.reference[j % 2] + kWeightExponent);
        columns_.sum[j % 2] += p;
        zero_[j % 2] = fmaf(p, m[i].zero_point[j / 2], zero_[j % 2]);
        weight[j] = p * scale[i][j / 2];
      }
      const uint32_t p[2] = {transpose_8x8(pack_halves(weight[0], weight[1])),
                             transpose_8x8(pack_halves(weight[2], weight[3]))};
      columns_.add_tile(fragments<Component::kValue>(v[i]), p);
    }
  }

  WarpColumns<kBlocks> columns_;
  const uint32_t* query_;  // shared memory
  float zero_[2] = {};     // what zero points add to every dim, times their weights
  float scale_log2_;
};

}  // namespace tierkv
