// SPDX-License-Identifier: Apache-2.0
// Where the fragments of a 64-token item come from: code words, raw tiles of a coded block, or fp16
// tiles of the window. Fragments are the A operand of mma.m16n8k16; those of codes hold digits
// over kDigitScale.
#pragma once

#include "attention/coded/coded_params.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

inline constexpr float kDigitScale = 0x1p24f;
// What brings an entry of kPair there and rounds its code length away, in a pipe that the lookups
// leave idle.
inline constexpr float kPairUnit = 0x1p-6f;
inline constexpr uint32_t kPairUnitHalves = 0x24002400;  // kPairUnit in both halves
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

// slot: shared address of the block, or of its header alone where it is larger than the slot.
template <int kStreams>
__device__ __forceinline__ OpenBlock open_block(uint32_t slot, uint32_t slot_bytes,
                                                const ExpectedHeader& expected, int32_t tokens) {
  OpenBlock b;
  b.header = load_shared_16(slot);
  b.tokens = tokens;
  b.payload = slot + kCodedBlockHeaderBytes + 2 * kWarpLanes * kStreams;
  b.exception_words = b.payload + (static_cast<uint32_t>(b.payload_bits()) + 31) / 32 * 4;
  const uint32_t end = b.exception_words + kExceptionBytes * (b.header.z >> 16);
  // All at once: no branch waits for another.
  const uint32_t wrong = (b.header.x ^ expected.first) |
                         (b.header.y ^ (expected.second | static_cast<uint32_t>(tokens))) |
                         ((end - slot + 15) / 16 ^ b.units());
  b.coded = static_cast<int32_t>(wrong == 0) &
            static_cast<int32_t>(b.exceptions() <= kMaxExceptions) &
            static_cast<int32_t>(b.units() * 16 <= slot_bytes);
  return b;
}

// The tiles of a raw block in memory.
struct RawBlock {
  const uint8_t* tiles;
  int32_t bits;
  int32_t base;  // less that of the codebook
};

// from: the block in memory, of as many units as it says and may be read. False where it is no
// valid raw block.
__device__ __forceinline__ bool open_raw(const OpenBlock& b, const uint8_t* from,
                                         const ExpectedHeader& expected, RawBlock* raw) {
  const auto mode = static_cast<BlockMode>(b.header.x >> 8 & 15u);
  // Version, one stream, no table, the component; tokens and channels.
  const uint32_t plain = kCodedBlockVersion | 1u << 12 | (expected.first & 0xff000000u);
  const auto tokens = static_cast<uint32_t>(b.tokens);
  if (!is_raw_mode(mode) || (b.header.x & 0xfffff0ffu) != plain ||
      (b.header.y & 0xffffu) != ((expected.second & 0xff00u) | tokens) || b.header.z != 0 ||
      (mode == BlockMode::kRaw16 && b.base() != 0)) {
    return false;
  }
  raw->tiles = from + kCodedBlockHeaderBytes;
  raw->bits = raw_bits(mode);
  raw->base = b.base() - (static_cast<int32_t>(expected.second) >> 16);
  const auto dim_blocks = static_cast<int32_t>(expected.second >> 8 & 0xffu) / kDimBlock;
  const int32_t bytes = tile_count(b.tokens) * raw_tile(raw->bits, dim_blocks).bytes();
  return static_cast<int32_t>(b.units()) * 16 == kCodedBlockHeaderBytes + bytes;
}

// How the blocks of a call are coded: kPair or kSingle, and the copies of the tables.
template <BlockMode kCodedMode, int kStreamsPerLane, int kTableCopiesLog>
struct BlockCode {
  static constexpr BlockMode kMode = kCodedMode;
  static constexpr int kStreams = kStreamsPerLane, kCopiesLog = kTableCopiesLog;
  static constexpr bool kWeighted = false;  // all blocks are of global steps
  static constexpr RopePairing kPairing = RopePairing::kNone;
};

// The streams of a lane in a coded block.
template <class Code>
struct LaneCodes {
  static constexpr int kStreams = Code::kStreams, kCopiesLog = Code::kCopiesLog;
  static constexpr int32_t kBias = SharedTable<kCopiesLog>::kBias;
  LaneStream<kStreams == 1> stream[kStreams];

  __device__ __forceinline__ static uint32_t start_of(const OpenBlock& b, uint32_t i) {
    return b.payload - 2 * kWarpLanes * kStreams + 2 * i;
  }
  // Not 0 where a stream would begin outside the payload; it then begins at 0.
  __device__ __forceinline__ uint32_t open(const OpenBlock& b) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t bad = 0;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint32_t i = s * kWarpLanes + lane;
      auto begin = static_cast<int32_t>(load_shared_u16(start_of(b, i)));
      const bool outside = begin > b.payload_bits() || (s == 0 && i == 0 && begin != 0);
      bad |= static_cast<uint32_t>(outside);
      if (outside) begin = 0;
      stream[s].open(b.payload, begin, kBias);
    }
    return bad;
  }

  // Not 0 unless all streams end where the next ones begin.
  __device__ __forceinline__ uint32_t ends(const OpenBlock& b) const {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t bad = 0;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint32_t i = s * kWarpLanes + lane;
      // The word after the last start is the payload's: readable.
      auto next = static_cast<int32_t>(load_shared_u16(start_of(b, i + 1)));
      if (s == kStreams - 1 && lane == kWarpLanes - 1) next = b.payload_bits();
      bad |= static_cast<uint32_t>(stream[s].end(b.payload, kBias) ^ next);
    }
    return bad;
  }

  // The registers of the next dim block.
  __device__ __forceinline__ void fragment(const SharedTable<kCopiesLog>& table, uint32_t (&a)[4]) {
    entries(table, a);
    if constexpr (Code::kMode != BlockMode::kSingle) {
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = multiply_halves(a[r], kPairUnit);
    }
  }
  // The registers of the next dim block, the base added to each digit. base: fp16, in both halves.
  __device__ __forceinline__ void codes(const SharedTable<kCopiesLog>& table, uint32_t base,
                                        uint32_t (&a)[4]) {
    entries(table, a);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      a[r] = Code::kMode == BlockMode::kSingle ? add_halves(a[r], base)
                                               : fma_halves(a[r], kPairUnitHalves, base);
    }
  }

 private:
  __device__ __forceinline__ void entries(const SharedTable<kCopiesLog>& table, uint32_t (&a)[4]) {
    if constexpr (Code::kMode == BlockMode::kSingle) {
      fragment_of_singles(table, a);
    } else if constexpr (kStreams == 1) {
      stream[0].step(table, &a[0], &a[1]);
      stream[0].step(table, &a[2], &a[3]);
    } else {
      uint32_t first[2], second[2];
      step_both(stream[0], stream[1], table, first, second);
      a[0] = first[0], a[1] = first[1], a[2] = second[0], a[3] = second[1];
    }
  }
  // The upper half of an entry is its digit.
  __device__ __forceinline__ void fragment_of_singles(const SharedTable<kCopiesLog>& table,
                                                      uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; r += kStreams) {
      uint32_t first[2], second[2];
      if constexpr (kStreams == 1) {
        stream[0].step(table, &first[0], &second[0]);
      } else {
        step_both(stream[0], stream[1], table, first, second);
      }
#pragma unroll
      for (int s = 0; s < kStreams; ++s) a[r + s] = __byte_perm(first[s], second[s], 0x7632);
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

// Dim block f of an fp16 tile of the window.
__device__ __forceinline__ void window_fragment(const uint8_t* tile, int32_t f, uint32_t (&a)[4]) {
  const uint4 x = *reinterpret_cast<const uint4*>(tile + f * 512 + threadIdx.x % 32 * 16);
  a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
}

}  // namespace tierkv
