// Where the fragments of a 64-token item come from: code words, raw tiles of a coded block, or fp16
// tiles of the window. Fragments are the A operand of mma.m16n8k16; those of codes hold digits
// times 2^-18.
#pragma once

#include "attention/coded_attention.h"
#include "attention/ptx.cuh"
#include "codec/coded_stream.cuh"

namespace tierkv {

inline constexpr int32_t kItemTiles = kBlockTokens / kTileTokens;

// What a block must say: words 0 and 1 of its header, tokens left out.
struct ExpectedHeader {
  uint32_t first, second;

  __device__ __forceinline__ ExpectedHeader(const DeviceCodebook& c, int32_t head_dim)
      : first(kCodedBlockVersion | static_cast<uint32_t>(c.mode) << 8 |
              static_cast<uint32_t>(c.streams_per_lane) << 12 | uint32_t{c.table_id} << 16 |
              static_cast<uint32_t>(c.component) << 24),
        second(static_cast<uint32_t>(head_dim) << 8 | static_cast<uint32_t>(c.base) << 16) {}
};

// A block whose sizes agree with each other, with its reference and with its slot.
struct OpenBlock {
  bool valid;
  bool raw;
  int32_t base;
  int32_t tokens;
  int32_t payload_bits;      // coded
  int32_t exceptions;        // how many
  uint32_t starts;           // shared address
  uint32_t payload;          // shared address
  uint32_t exception_words;  // shared address
  const uint8_t* raw_tiles;  // global
  int32_t raw_bits;
};

__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address));
  return x;
}

// slot: shared address of the block, or of its header alone where it is larger than the slot.
// global: the same in memory, ref.units * 16 readable bytes.
__device__ __forceinline__ OpenBlock open_block(uint32_t slot, const uint8_t* global,
                                                CodedBlockRef ref, int32_t slot_bytes,
                                                const ExpectedHeader& expected, int32_t tokens) {
  const uint4 h = load_shared_16(slot);
  OpenBlock b;
  b.tokens = tokens;
  b.base = static_cast<int16_t>(h.y >> 16);
  b.raw = false;
  b.payload_bits = static_cast<int32_t>(h.z & 0xffffu);
  b.exceptions = static_cast<int32_t>(h.z >> 16);
  b.raw_tiles = global + kCodedBlockHeaderBytes;
  b.raw_bits = 16;
  const uint32_t streams = expected.first >> 12 & 15u;
  b.starts = slot + kCodedBlockHeaderBytes;
  b.payload = b.starts + 2 * kWarpLanes * streams;
  b.exception_words = b.payload + (static_cast<uint32_t>(b.payload_bits) + 31) / 32 * 4;
  const uint32_t units = h.w & 0xffffu;
  const auto t = static_cast<uint32_t>(tokens);
  if (h.x == expected.first && h.y == (expected.second | t)) {
    const uint32_t end = b.exception_words + kExceptionBytes * (h.z >> 16);
    b.valid = b.exceptions <= kMaxExceptions && (end - slot + 15) / 16 == units &&
              units == ref.units && units * 16 <= static_cast<uint32_t>(slot_bytes);
    return b;
  }
  const auto mode = static_cast<BlockMode>(h.x >> 8 & 15u);
  b.raw = true;
  b.raw_bits = raw_bits(mode);
  // Version, one stream, no table, the component; tokens and channels.
  const uint32_t plain = kCodedBlockVersion | 1u << 12 | (expected.first & 0xff000000u);
  b.valid = is_raw_mode(mode) && (h.x & 0xfffff0ffu) == plain &&
            (h.y & 0xffffu) == ((expected.second & 0xff00u) | t) && h.z == 0 &&
            (mode != BlockMode::kRaw16 || b.base == 0) && units == ref.units;
  if (b.valid) {
    const auto dim_blocks = static_cast<int32_t>(expected.second >> 8 & 0xffu) / kDimBlock;
    const int32_t bytes = tile_count(tokens) * raw_tile(b.raw_bits, dim_blocks).bytes();
    b.valid = static_cast<int32_t>(units) * 16 == kCodedBlockHeaderBytes + bytes;
  }
  return b;
}

// The streams of a lane in a coded block.
template <int kStreams, int kCopiesLog>
struct LanePair {
  static constexpr int32_t kBias = SharedTable<kCopiesLog>::kBias;
  LaneStream stream[kStreams];

  // False where a stream would begin outside the payload; it then begins at 0.
  __device__ __forceinline__ bool open(const OpenBlock& b) {
    const uint32_t lane = threadIdx.x % 32;
    bool valid = true;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint32_t i = s * kWarpLanes + lane;
      auto begin = static_cast<int32_t>(load_shared_u16(b.starts + 2 * i));
      if (begin > b.payload_bits || (i == 0 && begin != 0)) valid = false, begin = 0;
      stream[s].open(b.payload, begin, kBias);
    }
    return valid;
  }

  // All streams end where the next ones begin.
  __device__ __forceinline__ bool ends(const OpenBlock& b) const {
    const uint32_t lane = threadIdx.x % 32;
    bool valid = true;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint32_t i = s * kWarpLanes + lane;
      const bool last = i == kStreams * kWarpLanes - 1;
      // The word after the last start is the payload's: readable.
      const auto next = static_cast<int32_t>(load_shared_u16(b.starts + 2 * i + 2));
      valid &= stream[s].end(b.payload, kBias) == (last ? b.payload_bits : next);
    }
    return valid;
  }

  // The registers of the next dim block.
  __device__ __forceinline__ void fragment(const SharedTable<kCopiesLog>& table, uint32_t (&a)[4]) {
    if constexpr (kStreams == 1) {
      stream[0].step(table, &a[0], &a[1]);
      stream[0].step(table, &a[2], &a[3]);
    } else {
      stream[0].step(table, &a[0], &a[2]);
      stream[1].step(table, &a[1], &a[3]);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] &= kDigitMask;
  }
};

// Dim block f of a raw tile: rare, so no word is read only once.
__device__ __forceinline__ void raw_fragment(const OpenBlock& b, int32_t head_dim,
                                             Component component, int32_t tile, int32_t f,
                                             uint32_t (&a)[4]) {
  const TileLayout layout = raw_tile(b.raw_bits, head_dim / kDimBlock);
  const uint8_t* words = b.raw_tiles + tile * layout.bytes();
  const uint32_t mask = (1u << b.raw_bits) - 1u;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const PairPosition place = pair_position(component, 0, f, r, threadIdx.x % 32);
    const CodePosition at = code_position(layout, component, place.token, place.dim);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(words + at.byte) >> at.bit;
    float first = static_cast<float>(word & mask), second = static_cast<float>(word >> 16 & mask);
    if (b.raw_bits == 16) {
      first = static_cast<float>(static_cast<int16_t>(word & 0xffffu));
      second = static_cast<float>(static_cast<int16_t>(word >> 16));
    }
    a[r] = pack_halves(first / kDigitScale, second / kDigitScale);
  }
}

// Dim block f of an fp16 tile of the window.
__device__ __forceinline__ void window_fragment(const uint8_t* tile, int32_t f, uint32_t (&a)[4]) {
  const uint4 x = *reinterpret_cast<const uint4*>(tile + f * 512 + threadIdx.x % 32 * 16);
  a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
}

// Exceptions as one more contraction, 16 of them at a time: A holds the delta of exception e in
// column e and the row it belongs to, B what that row is multiplied by. A lane holds exceptions 2t,
// 2t + 1, 2t + 8 and 2t + 9.
struct ExceptionFour {
  int32_t token[4], dim[4];  // -1: none
  float delta[4];            // times 2^-18

  // False where an index lies outside the block; that exception is left out.
  __device__ __forceinline__ bool load(const OpenBlock& b, int32_t first, int32_t head_dim) {
    bool valid = true;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int32_t i = first + 2 * static_cast<int32_t>(threadIdx.x % 4) + j % 2 + 8 * (j / 2);
      token[j] = dim[j] = -1;
      delta[j] = 0.0f;
      if (i >= b.exceptions) continue;
      const uint32_t word = load_shared(b.exception_words + 4 * i);
      const auto index = static_cast<int32_t>(word & 0xffffu);
      if (index / kSliceDims >= b.tokens || index % kSliceDims >= head_dim) {
        valid = false;
        continue;
      }
      token[j] = index / kSliceDims;
      dim[j] = index % kSliceDims;
      delta[j] = static_cast<float>(static_cast<int16_t>(word >> 16)) / kDigitScale;
    }
    return valid;
  }

  // Whether any lane has an exception in these rows; the same in all lanes.
  __device__ __forceinline__ static bool any_in(const int32_t (&rows)[4], int32_t first_row) {
    bool found = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) found |= (rows[j] & ~15) == first_row;  // -1 is in no rows
    return __any_sync(kFullWarp, found);
  }

  // The A operand whose rows are first_row + 0..15 of `rows`: token or dim.
  __device__ __forceinline__ void operand(const int32_t (&rows)[4], int32_t first_row,
                                          uint32_t (&a)[4]) const {
    const int32_t g = static_cast<int32_t>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int32_t row = first_row + g + 8 * (r % 2), j = r / 2 * 2;
      a[r] =
          pack_halves(rows[j] == row ? delta[j] : 0.0f, rows[j + 1] == row ? delta[j + 1] : 0.0f);
    }
  }
};

}  // namespace tierkv
