// Fixed-rate blocks (codec/fixed_block.h) among the coded ones of a row. Kernels that know them
// pass them over where coded blocks are decoded, whose sums are in the unit of the step, and attend
// to them afterwards, in the unit of values.
//
// Codes become fp16 values in registers, rounded as fixed_value() rounds them: so scores and
// outputs are those of raw tokens of the window.
#pragma once

#include "attention/coded_state.cuh"
#include "attention/coded_tile.cuh"
#include "codec/fixed_block.h"

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

// Values of a tile, as operands. bits: 8 or 4, of its codes.
template <Component kComponent, int32_t kHeadDim>
struct FixedTile {
  static constexpr bool kIsKey = kComponent == Component::kKey;
  static constexpr int32_t kTokens = kIsKey ? 2 : 4;  // that a lane has values of
  const uint8_t* codes;
  int32_t bits;
  // Keys: tokens g, g + 8. Values: tokens 2t, 2t + 8, 2t + 1, 2t + 9.
  float scale[kTokens], zero_point[kTokens];
  uint32_t bad;  // not 0: a parameter is not finite

  // block: shaped as `at`.
  __device__ __forceinline__ void open(const uint8_t* block, const FixedBlockLayout& at,
                                       int32_t tile) {
    const uint32_t lane = fresh_lane();
    codes = block + at.codes_byte(tile);
    bits = at.tile.bits;
    bad = 0;
    const uint8_t* metadata = block + at.metadata_byte(tile);
    uint32_t params[kTokens];
    if constexpr (kIsKey) {
      const auto x = *reinterpret_cast<const uint2*>(metadata + lane / 4 * 8);
      params[0] = x.x, params[1] = x.y;
    } else {
      const auto x = *reinterpret_cast<const uint4*>(metadata + lane % 4 * 16);
      params[0] = x.x, params[1] = x.y, params[2] = x.z, params[3] = x.w;
    }
#pragma unroll
    for (int32_t i = 0; i < kTokens; ++i) {
      bad |= static_cast<uint32_t>((params[i] & 0x7c00u) == 0x7c00u ||
                                   (params[i] & 0x7c000000u) == 0x7c000000u);
      const float2 x = unpack_halves(params[i]);
      scale[i] = x.x, zero_point[i] = x.y;
    }
  }

  // Dim block f.
  __device__ __forceinline__ void fragment(int32_t f, uint32_t (&a)[4]) const {
    const auto lane = static_cast<int32_t>(fresh_lane());
    uint32_t word[2];  // of each token half
    if (bits == 8) {
      constexpr int32_t kWords = TileLayout{8, kHeadDim}.words_per_lane();
      const auto x = *reinterpret_cast<const uint2*>(codes + lane_word_byte(kWords, 2 * f, lane));
      word[0] = x.x, word[1] = x.y;
    } else {
      constexpr int32_t kWords = TileLayout{4, kHeadDim}.words_per_lane();
      word[0] = *reinterpret_cast<const uint32_t*>(codes + lane_word_byte(kWords, f, lane));
      word[1] = word[0] >> 8;
    }
    const uint32_t mask = (1u << bits) - 1u;
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t token_half = kIsKey ? i % 2 : i / 2, dim_half = kIsKey ? i / 2 : i % 2;
      const uint32_t pair = word[token_half] >> (dim_half * bits);
      const int32_t second = kIsKey ? token_half : 2 + token_half;
      // The product is exact, so one rounding is the same as two.
      a[i] = saturate_halves(pack_halves(
          fmaf(scale[token_half], static_cast<float>(pair & mask), zero_point[token_half]),
          fmaf(scale[second], static_cast<float>(pair >> 16 & mask), zero_point[second])));
    }
  }
};

// Whether the blocks of both components are what a fixed-rate block must be.
template <int32_t kHeadDim>
__device__ __forceinline__ bool agrees(const uint4& header, Component c, int32_t bits,
                                       uint32_t units) {
  const uint32_t mode = static_cast<uint32_t>(bits == 4 ? kFixed4 : kFixed8);
  const auto expected = static_cast<uint32_t>(fixed_block_units(bits, kHeadDim));
  return header.x == (kCodedBlockVersion | mode << 8 | 1u << 12 | static_cast<uint32_t>(c) << 24) &&
         header.y == (static_cast<uint32_t>(kBlockTokens) | kHeadDim << 8) && header.z == 0 &&
         (header.w & 0xffffu) == expected && units == expected;
}
__device__ __forceinline__ bool lies_inside(const CodedBlockRef& ref, int64_t size) {
  return ref.units > 0 && (int64_t{ref.offset} + ref.units) * kBlockAlignment <= size;
}

// Whether block `block` of the directories is at a fixed rate. *bad: not 0 where it breaks a rule;
// references that lead outside were found by whoever asked for the block.
template <int32_t kHeadDim>
__device__ __forceinline__ bool is_fixed(const CodedAttention& call, int32_t block, uint32_t* bad) {
  const CodedBlockRef k = call.keys.blocks[block], v = call.values.blocks[block];
  if (!lies_inside(k, call.keys.size) || !lies_inside(v, call.values.size)) return false;
  const auto header_of = [](const uint8_t* bytes, const CodedBlockRef& ref) {
    return *reinterpret_cast<const uint4*>(bytes + int64_t{ref.offset} * kBlockAlignment);
  };
  const uint4 key_header = header_of(call.keys.bytes, k);
  if (!is_fixed_header(key_header)) return false;
  const bool valid = agrees<kHeadDim>(key_header, Component::kKey, call.fixed.key_bits, k.units) &&
                     agrees<kHeadDim>(header_of(call.values.bytes, v), Component::kValue,
                                      call.fixed.value_bits, v.units);
  *bad |= static_cast<uint32_t>(!valid);
  return valid;
}

__device__ __forceinline__ const uint8_t* block_of(const CodedComponent& c, int32_t block) {
  return c.bytes + int64_t{c.blocks[block].offset} * kBlockAlignment;
}

// One block; scale brings a score to log2 units.
template <int kDimBlocks>
__device__ __forceinline__ void attend_fixed_block(const CodedAttention& call, const uint8_t* keys,
                                                   const uint8_t* values, float scale,
                                                   CodedState<kDimBlocks>& state) {
  constexpr int32_t kHeadDim = 16 * kDimBlocks;
  float s[kItemTiles][4] = {};
  uint32_t p[kItemTiles][2];
#pragma unroll 1
  for (int32_t o = 0; o < kItemTiles; ++o) {
    FixedTile<Component::kKey, kHeadDim> tile;
    tile.open(keys, fixed_block_layout(call.fixed.key_bits, kHeadDim), o);
    state.bad |= tile.bad;
    float sum[4] = {};
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
      tile.fragment(f, a);
      mma_m16n8k16(sum, a, state.q[f][0], state.q[f][1]);
    }
    push_tile(s, sum);
  }
  state.weigh(s, kBlockTokens, scale, p);
#pragma unroll 1
  for (int32_t o = 0; o < kItemTiles; ++o) {
    FixedTile<Component::kValue, kHeadDim> tile;
    tile.open(values, fixed_block_layout(call.fixed.value_bits, kHeadDim), o);
    state.bad |= tile.bad;
#pragma unroll
    for (int f = 0; f < kDimBlocks; ++f) {
      uint32_t a[4];
      tile.fragment(f, a);
      mma_m16n8k16(state.out[f], a, p[0][0], p[0][1]);
    }
    shift_tiles(p);
  }
}

// Blocks of the directories, first .. first + count - 1, of which those before `whole` have 64
// tokens.
struct FixedRun {
  int32_t first, count, whole;
};
// Those of them that are at a fixed rate, by the whole warp. The next one is on its way to L2.
// Places are read again where they are needed: registers are scarce here.
template <int kDimBlocks>
__device__ __forceinline__ void attend_fixed_blocks(const CodedAttention& call, const FixedRun& run,
                                                    float scale, CodedState<kDimBlocks>& state) {
  constexpr int32_t kHeadDim = 16 * kDimBlocks;
  const auto prefetch = [&](int32_t block) {
    if (!is_first_lane()) return;
    prefetch_bytes(block_of(call.keys, block),
                   fixed_block_layout(call.fixed.key_bits, kHeadDim).bytes);
    prefetch_bytes(block_of(call.values, block),
                   fixed_block_layout(call.fixed.value_bits, kHeadDim).bytes);
  };
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
      if (found != 0) prefetch(run.first + begin + lowest_bit(found));
      attend_fixed_block(call, block_of(call.keys, block), block_of(call.values, block), scale,
                         state);
    }
  }
}

}  // namespace tierkv
