// SPDX-License-Identifier: Apache-2.0
// decode_blocks() of codec/format/block_cache.h: a warp takes one component of a tile of one
// kv_head. Tiles that a range only begins or ends in are decoded whole; the rows of the range
// leave.
//
// Bound: instructions and memory alike. A value costs about 17 instructions: 3 from its code, 9 for
// the rotation, 2 of them shuffles, 2 for scale and mean.
#pragma once

#include "codec/format/block_cache.h"
#include "codec/format/element.h"
#include "codec/gpu/pages/half_rows.cuh"

namespace tierkv {

inline constexpr int32_t kBlockDecodeThreads = 128;
inline constexpr int32_t kBlockDecodeWarps = kBlockDecodeThreads / 32;

// Shared memory of a CTA: a channel table and half a tile of rows for each warp.
template <int32_t kDim>
inline constexpr int32_t kBlockDecodeWarpBytes = kTableBytes<kDim> + kHalfTokens* kRowPitch<kDim>;

// Tiles that a range of the longest length may lie in, times kv_heads and components.
inline int64_t decode_warps(const BlockDecode& d) {
  const int32_t before = d.first == nullptr ? 0 : kTileTokens - 1;
  const int64_t tiles = (int64_t{d.max_tokens} + before + kTileTokens - 1) / kTileTokens;
  return tiles * d.cache.num_kv_heads * 2;
}

// The part of a tile that a warp decodes: its tokens begin .. end - 1 go to the rows row + begin ..
struct TilePart {
  int32_t begin, end;  // begin >= end: none
  int64_t row;         // of the tile's first token; may be negative where begin > 0
  int64_t token;       // the tile's first
};
__device__ __forceinline__ TilePart tile_part(const BlockDecode& d, int32_t range, int32_t tile) {
  const int32_t start = d.starts[range];
  const int64_t length = min(d.starts[range + 1] - start, d.max_tokens);
  const int64_t first = d.first == nullptr ? 0 : d.first[range];
  TilePart t;
  t.token = (first & ~int64_t{kTileTokens - 1}) + int64_t{tile} * kTileTokens;
  const int64_t place = t.token - first;  // of the tile's first token in the range
  t.row = start + place;
  const int64_t skipped = place < 0 ? -place : 0, outside = -t.row;
  const int64_t left = length - place, rows_left = d.num_rows - t.row;
  const int64_t begin = skipped > outside ? skipped : outside;
  const int64_t end = left < rows_left ? left : rows_left;
  t.begin = begin < kTileTokens ? static_cast<int32_t>(begin) : kTileTokens;
  t.end = end < 0 ? 0 : end < kTileTokens ? static_cast<int32_t>(end) : kTileTokens;
  return t;
}

// Where a tile of a range lies; null where that is nowhere in the cache.
struct CachePlace {
  const uint8_t* page;
  int32_t tile;
};
__device__ __forceinline__ CachePlace cache_place(const BlockDecode& d, int32_t sequence,
                                                  int64_t token, int32_t kv_head) {
  const int32_t tokens = d.cache.layout.tokens;
  if (sequence < 0 || sequence >= d.num_sequences || token < 0) return {nullptr, 0};
  const int64_t column = token / tokens;
  if (column >= d.table_stride) return {nullptr, 0};
  const int64_t block = d.block_table[sequence * d.table_stride + column];
  if (block < 0 || block >= d.cache.num_blocks) return {nullptr, 0};
  return {d.cache.page(block, kv_head),
          static_cast<int32_t>(token - column * tokens) / kTileTokens};
}

// ---- codes to coordinates ----

// The parameters of a token for codes that lie i * kBits above the lowest bits of their byte: the
// float of bits 2^23 + (code << i kBits) times scale[i] plus offset[i] is the code times the scale,
// rounded once, because the products and the offset are exact.
template <int32_t kBits>
struct TokenParams {
  static constexpr int32_t kPlaces = 8 / kBits;
  float scale[kPlaces], offset[kPlaces];
  float zero_point;

  __device__ __forceinline__ explicit TokenParams(uint32_t params) {
    const float whole = half_to_float(static_cast<uint16_t>(params));
    zero_point = half_to_float(static_cast<uint16_t>(params >> 16));
#pragma unroll
    for (int32_t i = 0; i < kPlaces; ++i) {
      scale[i] = mul_rn(whole, 1.0f / static_cast<float>(1 << i * kBits));
      offset[i] = mul_rn(scale[i], -8388608.0f);
    }
  }
  __device__ __forceinline__ float value(uint32_t biased, int32_t place) const {
    return add_rn(fma_rn(bits_float(biased), scale[place], offset[place]), zero_point);
  }
};
inline constexpr uint32_t kFloatBias = 0x4b000000u;  // 2^23

// Coordinates of the lower token half from words in the order of keys. params: of the lane's token.
template <CodeType kType, int32_t kDim>
__device__ __forceinline__ void half_values(const uint32_t (&words)[kTileWords<kType, kDim>],
                                            uint32_t params, HalfRows<kDim>& x) {
  constexpr int32_t kBits = kType.bits();
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const TokenParams<kBits> p(params);
#pragma unroll
  for (int32_t b = 0; b < kDim / kDimBlock; ++b) {
    const uint32_t word = words[fragment_code_word(kBits, b, 0)];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if constexpr (kBits == 8) {  // byte i is of dh = i % 2, par = i / 2
        x[4 * b + 2 * (i % 2) + i / 2] = p.value(__byte_perm(word, kFloatBias, 0x7440u + i), 0);
      } else {
        const int32_t dh = i % 2, par = i / 2;
        const int32_t place = kBits == 4 ? dh : 2 * (b % 2) + dh;
        const uint32_t code = (par == 0 ? word : word >> 16) & kMask << place * kBits;
        x[4 * b + 2 * dh + par] = p.value(code | kFloatBias, place);
      }
    }
  }
}
template <int32_t kDim>
__device__ __forceinline__ void raw_half_values(const uint32_t (&words)[kDim / 4], DType dtype,
                                                HalfRows<kDim>& x) {
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {  // dh = i % 2 of block i / 2
    const uint32_t word = words[4 * (i / 2) + 2 * (i % 2)];
    const float2 y = dtype == DType::kFloat16 ? unpack_halves(word) : unpack_bfloats(word);
    x[2 * i] = y.x, x[2 * i + 1] = y.y;
  }
}
// The upper token half to the place of the lower one. (Words that change keep the compiler from
// taking both halves apart ahead of a loop over them.)
template <CodeType kType, int32_t kWords>
__device__ __forceinline__ void take_upper_half(uint32_t (&words)[kWords]) {
#pragma unroll
  for (int32_t i = 0; i < kWords; ++i) {
    if constexpr (kType.bits() < 8) {
      words[i] >>= 8;
    } else if (i % 2 == 0) {
      words[i] = words[i + 1];
    }
  }
}

// ---- rows ----

// Values as store_element() stores them, to rows in shared memory.
template <int32_t kDim>
__device__ __forceinline__ void stage_half(HalfRows<kDim>& x, DType dtype, uint8_t* rows) {
  uint8_t* to = rows + lane_index() / 4 * kRowPitch<kDim> + lane_index() % 4 * 4;
  if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int32_t i = 0; i < kDim / 8; ++i) {
      *reinterpret_cast<uint32_t*>(to + 16 * i) = pack_bfloats(x[2 * i], x[2 * i + 1]);
    }
    return;
  }
  float most = 0;
#pragma unroll
  for (const float y : x) most = fmaxf(most, fabsf(y));
  if (most > kMaxHalf) {
#pragma unroll
    for (float& y : x) y = saturate_to_half_range(y);
  }
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    *reinterpret_cast<uint32_t*>(to + 16 * i) = pack_halves(x[2 * i], x[2 * i + 1]);
  }
}

// The rows of a tile in `to`.
struct TileRows {
  uint16_t* first;  // of the tile's first token, which may not be of the range
  int32_t stride;   // elements
  int32_t begin, end;
};
// Half a tile leaves in pieces of 16 bytes. rows: null for zeros.
template <int32_t kDim>
__device__ __forceinline__ void store_half(const TileRows& t, int32_t th, const uint8_t* rows) {
  constexpr int32_t kPieces = kDim / 8;  // of a row
#pragma unroll
  for (int32_t i = 0; i < kHalfTokens * kPieces / 32; ++i) {
    const int32_t piece = 32 * i + lane_index();
    const int32_t row = piece / kPieces, column = piece % kPieces;
    const int32_t token = kHalfTokens * th + row;
    if (token < t.begin || token >= t.end) continue;
    uint4 x = {0, 0, 0, 0};
    if (rows != nullptr) {
      x = *reinterpret_cast<const uint4*>(rows + row * kRowPitch<kDim> + 16 * column);
    }
    *reinterpret_cast<uint4*>(t.first + int64_t{token} * t.stride + 8 * column) = x;
  }
}

// One component of a tile.
struct TileSource {
  const uint8_t* codes;
  const uint8_t* metadata;
  bool is_value;
  bool is_reflected;  // by the normals of the table
};

template <CodeType kType, int32_t kDim>
__device__ __forceinline__ void decode_tile(const BlockDecode& d, const TileSource& from,
                                            const TileRows& to, const ChannelPair* table,
                                            uint8_t* rows) {
  uint32_t words[kTileWords<kType, kDim>];
  load_tile_words(from.codes, words);
  uint2 params = {0, 0};  // of the tokens l / 4 and l / 4 + 8
  if constexpr (!kType.is_raw()) {
    params =
        *reinterpret_cast<const uint2*>(from.metadata + token_metadata_byte(0, lane_index() / 4));
  }
  if (from.is_value) exchange_words<kType>(words);
  __syncwarp();
#pragma unroll 1
  for (int32_t th = 0; th < 2; ++th) {
    HalfRows<kDim> x;
    if constexpr (kType.is_raw()) {
      raw_half_values<kDim>(words, d.cache.raw_dtype, x);
    } else {
      half_values<kType, kDim>(words, params.x, x);
    }
    if (from.is_reflected) reflect_half<kDim>(table, x);
    if (d.cache.rotation.is_on) hadamard_sums<kDim>(x);
#pragma unroll
    for (int32_t i = 0; i < kDim / 8; ++i) {
      const ChannelPair pair = table[4 * i + lane_index() % 4];
#pragma unroll
      for (int32_t par = 0; par < 2; ++par) {
        float& y = x[2 * i + par];
        y = mul_rn(y, pair.factor[par]);
      }
    }
    stage_half<kDim>(x, d.dtype, rows);
    __syncwarp();
    store_half<kDim>(to, th, rows);
    __syncwarp();
    take_upper_half<kType>(words);
    params.x = params.y;
  }
}

template <int32_t kDim>
__device__ __forceinline__ void decode_tile_of(CodeType type, const BlockDecode& d,
                                               const TileSource& from, const TileRows& to,
                                               const ChannelPair* table, uint8_t* rows) {
  if (type == kRawCodes) return decode_tile<kRawCodes, kDim>(d, from, to, table, rows);
  if (type == kCodes8) return decode_tile<kCodes8, kDim>(d, from, to, table, rows);
  if (type == kCodes4) return decode_tile<kCodes4, kDim>(d, from, to, table, rows);
  decode_tile<kCodes2, kDim>(d, from, to, table, rows);
}

// As many CTAs of an SM as the words and values of raw elements leave registers for.
template <int32_t kDim>
inline constexpr int32_t kBlockDecodeCtas = kDim == 256  ? 3
                                            : kDim == 64 ? 8
                                                         : 5;

// Grid: decode_warps() by ranges. Shared memory: kBlockDecodeWarpBytes of each warp.
template <int32_t kDim>
__global__ void __launch_bounds__(kBlockDecodeThreads, kBlockDecodeCtas<kDim>)
    decode_blocks_kernel(const __grid_constant__ BlockDecode d) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const BlockCache& c = d.cache;
  const auto range = static_cast<int32_t>(blockIdx.y);
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const auto item = static_cast<int32_t>(blockIdx.x * kBlockDecodeWarps) + warp;
  const Component part = item % 2 == 0 ? Component::kKey : Component::kValue;
  const int32_t tile = item / 2 / c.num_kv_heads, kv_head = item / 2 % c.num_kv_heads;
  const TilePart t = tile_part(d, range, tile);
  if (t.begin >= t.end) return;
  const int32_t sequence = d.sequences == nullptr ? range : d.sequences[range];
  const CachePlace place = cache_place(d, sequence, t.token, kv_head);
  const bool is_key = part == Component::kKey;
  if (place.page == nullptr && is_key && d.errors != nullptr && lane_index() == 0) {
    atomicAdd(d.errors + static_cast<int32_t>(EngineError::kStrayBlocks), t.end - t.begin);
  }
  auto* to = static_cast<uint16_t*>(is_key ? d.k : d.v);
  if (to == nullptr) return;
  const int32_t stride = c.num_kv_heads * kDim;
  const TileRows rows = {to + t.row * stride + kv_head * kDim, stride, t.begin, t.end};
  if (place.page == nullptr) {
    store_half<kDim>(rows, 0, nullptr);
    return store_half<kDim>(rows, 1, nullptr);
  }
  uint8_t* mine = shared_bytes + warp * kBlockDecodeWarpBytes<kDim>;
  auto* table = reinterpret_cast<ChannelPair*>(mine);
  const float* normal = is_key ? c.reflection_of(kv_head) : nullptr;
  fill_channel_table<kDim>(c.rotation, true, normal, 1.0f, table);
  const TileSource from = {place.page + c.layout.tile_codes_byte(part, place.tile),
                           place.page + c.layout.tile_metadata_byte(part, place.tile), !is_key,
                           normal != nullptr};
  decode_tile_of<kDim>(c.layout.tile(part).type, d, from, rows, table, mine + kTableBytes<kDim>);
}

}  // namespace tierkv
