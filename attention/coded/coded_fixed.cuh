// SPDX-License-Identifier: Apache-2.0
// Fixed-rate blocks (codec/format/fixed_block.h) among the coded ones of a row. Kernels that know
// them pass them over where coded blocks are decoded, whose sums are in the unit of the step, and
// attend to them afterwards, in the unit of values.
//
// Codes become fp16 values in registers: so scores and outputs are those of raw tokens of the
// window.
#pragma once

#include "attention/coded/coded_state.cuh"
#include "attention/coded/coded_tile.cuh"
#include "codec/format/fixed_block.h"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

// The BlockCode of a call whose rows may have fixed-rate blocks.
template <class Code>
struct WithFixedBlocks : Code {
  static constexpr bool kFixed = true;
};

// header: of any block.
__device__ __forceinline__ bool is_fixed_header(const uint4& header) {
  return is_fixed_mode(static_cast<BlockMode>(header.x >> 8 & 15u));
}

// Values of a tile of one slice, as operands: codes are made fp16 numbers of 1024 and more by their
// bits alone, and of two such numbers three instructions make values. (The host's fixed_value() is
// rounded to fp32 first: one in some thousand values differs by a unit of fp16.)
template <Component kComponent, int32_t kDims, int32_t kBits>
struct FixedTile {
  static constexpr bool kIsKey = kComponent == Component::kKey;
  static constexpr int32_t kWords = TileLayout{CodeType::uniform(kBits), kDims}.words_per_lane();
  static constexpr int32_t kQuads = (kWords + 3) / 4;  // the last one may be half of one
  static constexpr int32_t kFragments = 16 / kBits;    // dim blocks of a quad
  static_assert(kWords % 4 == 0 || kWords % 4 == 2);
  uint4 quad[kQuads];
  // Of the pairs of each token half. Keys: tokens g, g + 8, twice. Values: tokens 2t (+ 8), 2t + 1
  // (+ 9).
  uint32_t scales[2], zero_points[2];
  bool wide;     // a value may lie beyond the largest number; the same in all lanes
  uint32_t bad;  // not 0: a parameter is not finite

  // slice: shaped as `at`.
  __device__ __forceinline__ void open(const uint8_t* slice, const FixedBlockLayout& at,
                                       int32_t tile) {
    const auto lane = static_cast<int32_t>(fresh_lane());
    const uint8_t* metadata = slice + at.metadata_byte(tile);
    uint4 params;
    if constexpr (kIsKey) {
      const auto x = *reinterpret_cast<const uint2*>(metadata + lane / 4 * 8);
      params = {x.x, x.y, x.x, x.y};
    } else {
      params = *reinterpret_cast<const uint4*>(metadata + lane % 4 * 16);
    }
    const uint8_t* codes = slice + at.codes_byte(tile);
#pragma unroll
    for (int32_t i = 0; i < kQuads; ++i) {
      const auto byte = static_cast<uint32_t>(lane_word_byte(kWords, 4 * i, lane));
      if (4 * i + 4 <= kWords) {
        quad[i] = *reinterpret_cast<const uint4*>(codes + byte);
      } else {
        const auto half = *reinterpret_cast<const uint2*>(codes + byte);
        quad[i].x = half.x, quad[i].y = half.y;
      }
    }
    scales[0] = low_halves(params.x, params.z), scales[1] = low_halves(params.y, params.w);
    zero_points[0] = high_halves(params.x, params.z);
    zero_points[1] = high_halves(params.y, params.w);
    bad = 0;
    uint32_t widest = 0;
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      bad |= infinite_halves(scales[i]) | infinite_halves(zero_points[i]);
      widest |= infinite_halves(fma_halves(scales[i], kMostCode, zero_points[i]));
    }
    wide = __any_sync(kFullWarp, widest != 0);
  }

  // Dim block f.
  __device__ __forceinline__ void fragment(int32_t f, uint32_t (&a)[4]) const {
    const uint4& x = quad[f / kFragments];
    const int32_t i = f % kFragments;
    uint32_t word[2];  // of each token half
    if constexpr (kBits == 8) {
      word[0] = i == 0 ? x.x : x.z;
      word[1] = i == 0 ? x.y : x.w;
    } else {
      word[0] = i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
      word[1] = word[0] >> 8;
    }
#pragma unroll
    for (int32_t r = 0; r < 4; ++r) {
      const int32_t token_half = kIsKey ? r % 2 : r / 2, dim_half = kIsKey ? r / 2 : r % 2;
      a[r] = fma_halves(scales[token_half], code_halves(word[token_half], dim_half),
                        zero_points[token_half]);
    }
    if (!wide) return;
#pragma unroll
    for (int32_t r = 0; r < 4; ++r) a[r] = saturate_halves(a[r]);
  }

 private:
  static constexpr uint32_t kMostCode = kBits == 8 ? 0x5bf85bf8u : 0x4b804b80u;  // 255, 15
  static constexpr uint32_t k1024 = 0x64006400u;

  // Not 0 where one of two numbers is not finite.
  __device__ __forceinline__ static uint32_t infinite_halves(uint32_t x) {
    return static_cast<uint32_t>((x & 0x7c00u) == 0x7c00u || (x & 0x7c000000u) == 0x7c000000u);
  }
  // Two codes of a word, as numbers.
  __device__ __forceinline__ static uint32_t code_halves(uint32_t word, int32_t dim_half) {
    constexpr uint32_t kMinus1024 = k1024 | 0x80008000u;
    if constexpr (kBits == 8) {
      const uint32_t raised = dim_half == 0 ? even_bytes_as(word, 0x64) : odd_bytes_as(word, 0x64);
      return add_halves(raised, kMinus1024);
    }
    // In the upper place a code is raised as 16 times itself.
    if (dim_half == 0) return add_halves((word & 0x000f000fu) | k1024, kMinus1024);
    constexpr uint32_t kSixteenth = 0x2c002c00u, kMinus64 = 0xd400d400u;
    return fma_halves((word & 0x00f000f0u) | k1024, kSixteenth, kMinus64);
  }
};

__device__ __forceinline__ bool lies_inside(const CodedBlockRef& ref, int64_t size) {
  return ref.units > 0 && (int64_t{ref.offset} + ref.units) * kBlockAlignment <= size;
}

// A head_dim of 256 is two slices, as of coded blocks.
template <int32_t kHeadDim>
struct FixedSlices {
  static constexpr int32_t kCount = (kHeadDim + kSliceDims - 1) / kSliceDims;
  static constexpr int32_t kDims = kHeadDim / kCount;
};

// A block of a directory that lies inside its component, and what it must say to be at a fixed
// rate.
template <int32_t kHeadDim>
struct FixedClaim {
  using Slices = FixedSlices<kHeadDim>;
  const uint8_t* block;
  uint32_t units;
  uint4 header;

  __device__ __forceinline__ FixedClaim(const CodedComponent& c, const CodedBlockRef& ref)
      : block(c.bytes + int64_t{ref.offset} * kBlockAlignment),
        units(ref.units),
        header(*reinterpret_cast<const uint4*>(block)) {}
  __device__ __forceinline__ bool agrees(Component c, int32_t bits) const {
    const int32_t bytes = fixed_block_layout(bits, Slices::kDims).bytes;
    const auto slice = static_cast<uint32_t>(bytes / kBlockAlignment);
    const uint32_t mode = static_cast<uint32_t>(bits == 4 ? kFixed4 : kFixed8);
    const uint32_t first =
        kCodedBlockVersion | mode << 8 | 1u << 12 | static_cast<uint32_t>(c) << 24;
    const auto wrong = [&](const uint4& h) {
      return (h.x ^ first) | (h.y ^ (static_cast<uint32_t>(kBlockTokens) | Slices::kDims << 8)) |
             h.z | ((h.w & 0xffffu) ^ slice);
    };
    if ((wrong(header) | (units ^ Slices::kCount * slice)) != 0) return false;
    if constexpr (Slices::kCount == 1) return true;
    return wrong(*reinterpret_cast<const uint4*>(block + bytes)) == 0;
  }
};

__device__ __forceinline__ const uint8_t* block_of(const CodedComponent& c, int32_t block) {
  return c.bytes + int64_t{c.blocks[block].offset} * kBlockAlignment;
}

// Whether block `block` of the directories is at a fixed rate. *bad: not 0 where it breaks a rule;
// references that lead outside were found by whoever asked for the block. What is read from memory
// is waited for twice.
template <int32_t kHeadDim>
__device__ __forceinline__ bool is_fixed(const CodedAttention& call, int32_t block, uint32_t* bad) {
  const CodedBlockRef k = call.keys.blocks[block], v = call.values.blocks[block];
  if (!lies_inside(k, call.keys.size) || !lies_inside(v, call.values.size)) return false;
  const FixedClaim<kHeadDim> keys(call.keys, k), values(call.values, v);
  if (!is_fixed_header(keys.header)) return false;
  const bool valid = keys.agrees(Component::kKey, call.fixed.key_bits) &&
                     values.agrees(Component::kValue, call.fixed.value_bits);
  *bad |= static_cast<uint32_t>(!valid);
  return valid;
}

// Scores of a block's keys.
template <int32_t kBits, int kDimBlocks>
__device__ __forceinline__ void score_fixed(const uint8_t* keys, CodedState<kDimBlocks>& state,
                                            float (&s)[kItemTiles][4]) {
  using Slices = FixedSlices<16 * kDimBlocks>;
  constexpr FixedBlockLayout kAt = fixed_block_layout(kBits, Slices::kDims);
  constexpr int kSliceBlocks = Slices::kDims / kDimBlock;
#pragma unroll 1
  for (int32_t o = 0; o < kItemTiles; ++o) {
    float sum[4] = {};
#pragma unroll
    for (int32_t i = 0; i < Slices::kCount; ++i) {
      FixedTile<Component::kKey, Slices::kDims, kBits> tile;
      tile.open(keys + i * kAt.bytes, kAt, o);
      state.bad |= tile.bad;
#pragma unroll
      for (int f = 0; f < kSliceBlocks; ++f) {
        uint32_t a[4];
        tile.fragment(f, a);
        const uint32_t(&q)[2] = state.q[i * kSliceBlocks + f];
        mma_m16n8k16(sum, a, q[0], q[1]);
      }
    }
    push_tile(s, sum);
  }
}
// Outputs of a block's values. Uses p up.
template <int32_t kBits, int kDimBlocks>
__device__ __forceinline__ void add_fixed(const uint8_t* values, CodedState<kDimBlocks>& state,
                                          uint32_t (&p)[kItemTiles][2]) {
  using Slices = FixedSlices<16 * kDimBlocks>;
  constexpr FixedBlockLayout kAt = fixed_block_layout(kBits, Slices::kDims);
  constexpr int kSliceBlocks = Slices::kDims / kDimBlock;
#pragma unroll 1
  for (int32_t o = 0; o < kItemTiles; ++o) {
#pragma unroll
    for (int32_t i = 0; i < Slices::kCount; ++i) {
      FixedTile<Component::kValue, Slices::kDims, kBits> tile;
      tile.open(values + i * kAt.bytes, kAt, o);
      state.bad |= tile.bad;
#pragma unroll
      for (int f = 0; f < kSliceBlocks; ++f) {
        uint32_t a[4];
        tile.fragment(f, a);
        mma_m16n8k16(state.out[i * kSliceBlocks + f], a, p[0][0], p[0][1]);
      }
    }
    shift_tiles(p);
  }
}

// Asks for a block of a directory to be brought into L2.
template <int32_t kHeadDim>
__device__ __forceinline__ void prefetch_fixed(const CodedComponent& c, int32_t block,
                                               int32_t bits) {
  if (!is_first_lane()) return;
  prefetch_bytes(block_of(c, block),
                 static_cast<uint32_t>(fixed_block_units(bits, kHeadDim) * kBlockAlignment));
}

// One block; scale brings a score to log2 units. Its values are on their way to L2 while its keys
// are scored, and the keys of block `next`, if not negative, while its values are added: whole
// blocks of all warps would push each other out of L2.
template <int kDimBlocks>
__device__ __forceinline__ void attend_fixed_block(const CodedAttention& call, int32_t block,
                                                   int32_t next, float scale,
                                                   CodedState<kDimBlocks>& state) {
  constexpr int32_t kHeadDim = 16 * kDimBlocks;
  const FixedFormat& format = call.fixed;
  float s[kItemTiles][4] = {};
  uint32_t p[kItemTiles][2];
  prefetch_fixed<kHeadDim>(call.values, block, format.value_bits);
  const uint8_t* keys = block_of(call.keys, block);
  if (format.key_bits == 8) {
    score_fixed<8>(keys, state, s);
  } else {
    score_fixed<4>(keys, state, s);
  }
  if (next >= 0) prefetch_fixed<kHeadDim>(call.keys, next, format.key_bits);
  state.weigh(s, kBlockTokens, scale, p);
  const uint8_t* values = block_of(call.values, block);
  if (format.value_bits == 8) {
    add_fixed<8>(values, state, p);
  } else {
    add_fixed<4>(values, state, p);
  }
}

// Blocks of the directories, first .. first + count - 1, of which those before `whole` have 64
// tokens.
struct FixedRun {
  int32_t first, count, whole;
};
// Those of them that are at a fixed rate, by the whole warp. Places are read again where they are
// needed: registers are scarce here.
template <int kDimBlocks>
__device__ __forceinline__ void attend_fixed_blocks(const CodedAttention& call, const FixedRun& run,
                                                    float scale, CodedState<kDimBlocks>& state) {
  constexpr int32_t kHeadDim = 16 * kDimBlocks;
#pragma unroll 1
  for (int32_t begin = 0; begin < run.count; begin += kWarpLanes) {
    const int32_t i = begin + static_cast<int32_t>(fresh_lane());
    bool here = i < run.count && is_fixed<kHeadDim>(call, run.first + i, &state.bad);
    if (here && run.first + i >= run.whole) state.bad = 1, here = false;
    uint32_t found = __ballot_sync(kFullWarp, here);
#pragma unroll 1
    while (found != 0) {
      const int32_t block = run.first + begin + lowest_bit(found);
      found &= found - 1;
      const int32_t next = found == 0 ? -1 : run.first + begin + lowest_bit(found);
      attend_fixed_block(call, block, next, scale, state);
    }
  }
}

}  // namespace tierkv
