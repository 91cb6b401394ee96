// SPDX-License-Identifier: Apache-2.0
// Where the fragments of a block come from: code words or raw tiles. Fragments are the A operand of
// mma.m16n8k16; they hold codes over kDigitScale.
#pragma once

#include "attention/coded/coded_params.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

inline constexpr float kDigitScale = 0x1p24f;
// What brings an entry there and rounds its code length away, in a pipe that the lookups leave
// idle: 2^-6 in both halves.
inline constexpr uint32_t kPairUnitHalves = 0x24002400;
inline constexpr int32_t kItemTiles = kBlockTokens / kTileTokens;

// A coded block in its slot. Its sizes agree with each other and with the slot where `coded`; else
// it may be a raw one.
struct OpenBlock {
  uint4 header;
  uint32_t payload;          // shared address
  uint32_t exception_words;  // shared address
  int32_t tokens;
  bool coded;

  __device__ __forceinline__ int32_t base() const { return static_cast<int32_t>(header.y) >> 16; }
  __device__ __forceinline__ int32_t payload_bits() const {
    return static_cast<int32_t>(header.z & 0xffffu);
  }
  __device__ __forceinline__ int32_t exceptions() const {
    return static_cast<int32_t>(header.z >> 16);
  }
  __device__ __forceinline__ uint32_t units() const { return header.w & 0xffffu; }
};

// The tiles of a raw block in memory.
struct RawBlock {
  const uint8_t* tiles;
  int32_t bits;
  int32_t base;  // less that of the codebook
};

// How the blocks of a call are coded, the copies of the tables, and how keys turn.
template <int kStreamsPerLane, int kTableCopiesLog, KeyTurning kKeyTurning>
struct WeightedCode {
  static constexpr int kStreams = kStreamsPerLane, kCopiesLog = kTableCopiesLog;
  static constexpr KeyTurning kTurning = kKeyTurning;
};

// The streams of a lane in a coded block.
template <class Code>
struct LaneCodes {
  static constexpr int kStreams = Code::kStreams, kCopiesLog = Code::kCopiesLog;
  static constexpr int32_t kBias = SharedTable<kCopiesLog>::kBias;
  LaneStream<kStreams == 1> stream[kStreams];

  // The registers of the next dim block, the base added to each digit. base: fp16, in both halves.
  __device__ __forceinline__ void codes(const SharedTable<kCopiesLog>& table, uint32_t base,
                                        uint32_t (&a)[4]) {
    entries(table, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = fma_halves(a[r], kPairUnitHalves, base);
  }

 private:
  __device__ __forceinline__ void entries(const SharedTable<kCopiesLog>& table, uint32_t (&a)[4]) {
    if constexpr (kStreams == 1) {
      stream[0].step(table, &a[0], &a[1]);
      stream[0].step(table, &a[2], &a[3]);
    } else {
      uint32_t first[2], second[2];
      step_both(stream[0], stream[1], table, first, second);
      a[0] = first[0], a[1] = first[1], a[2] = second[0], a[3] = second[1];
    }
  }
};

// Dim block f of a raw tile, as digits of the codebook: rare, so no word is read only once.
__device__ __forceinline__ void raw_fragment(const RawBlock& b, int32_t head_dim,
                                             Component component, int32_t tile, int32_t f,
                                             uint32_t (&a)[4]) {
  const TileLayout layout = raw_tile(b.bits, head_dim / kDimBlock);
  const uint8_t* words = b.tiles + tile * layout.bytes();
  const uint32_t mask = (1u << b.bits) - 1u, lane = fresh_lane();
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const PairPosition place = pair_position(component, 0, f, r, static_cast<int32_t>(lane));
    const CodePosition at = code_position(layout, component, place.token, place.dim);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(words + at.byte) >> at.bit;
    auto first = static_cast<int32_t>(word & mask),
         second = static_cast<int32_t>(word >> 16 & mask);
    if (b.bits == 16) first = static_cast<int16_t>(first), second = static_cast<int16_t>(second);
    a[r] = pack_halves(static_cast<float>(first + b.base) / kDigitScale,
                       static_cast<float>(second + b.base) / kDigitScale);
  }
}

// Tiles are loops: unrolled, the instructions of all tiles do not fit into the caches that 16 warps
// at different places of a kernel share. Registers have no index, so the tiles move past the loop.
template <class T, int kCount>
__device__ __forceinline__ void shift_tiles(T (&x)[kItemTiles][kCount]) {
#pragma unroll
  for (int o = 1; o < kItemTiles; ++o) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[o - 1][i] = x[o][i];
  }
}
__device__ __forceinline__ void push_tile(float (&x)[kItemTiles][4], const float (&last)[4]) {
  shift_tiles(x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[kItemTiles - 1][i] = last[i];
}

}  // namespace tierkv
