// SPDX-License-Identifier: Apache-2.0
// Coded blocks as a warp opens them: codec/format/coded_block_format.h has their bytes.
#pragma once

#include "attention/coded/coded_tile.cuh"
#include "codec/format/coded_block_format.h"
#include "codec/format/weighted_step.h"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

inline constexpr float kKeyUnit = 0x1p-9f;  // of decoded keys, in units of their channels

// load_field() for a shared address. The function may read the word behind the part.
__device__ __forceinline__ uint32_t shared_field(uint32_t part, int32_t i, int32_t bits) {
  const auto from = static_cast<uint32_t>(i * bits);
  const uint32_t word = part + from / 32 * 4;
  return __funnelshift_r(load_shared(word), load_shared(word + 4), from) & ((1u << bits) - 1u);
}

// The fields of a header's third word.
struct WeightedFields {
  int32_t least_length, exceptions, exponent_bits, length_bits;

  __device__ __forceinline__ explicit WeightedFields(uint32_t word)
      : least_length(static_cast<int32_t>(word & 0xffffu)),
        exceptions(static_cast<int32_t>(word >> 16 & 0xffu)),
        exponent_bits(static_cast<int32_t>(word >> 24 & 15u)),
        length_bits(static_cast<int32_t>(word >> 28)) {}
};

// A slice. Where the slice is coded, the third word of `block` is replaced: the bits of the
// payload, then the number of exceptions.
template <int kStreams>
struct WeightedSlice {
  OpenBlock block;
  uint32_t fields;          // the header's own third word
  RawBlock raw;             // where block.coded is false
  int32_t begin[kStreams];  // bit at which this lane's streams begin
  uint32_t ends;            // modulo 2^16 the bits at which they end, those of stream 0 lowest

  // header: the slice's, which lies at shared address `at` with `room` bytes from there on; room 0:
  // the slice is not there.
  __device__ __forceinline__ void open(const uint4& header, uint32_t at, uint32_t room,
                                       const ExpectedHeader& expected, int32_t tokens) {
    const WeightedFields h(header.z);
    const uint32_t lengths =
        at + kCodedBlockHeaderBytes + static_cast<uint32_t>(field_bytes(tokens, h.exponent_bits));
    block.tokens = tokens;
    block.payload =
        lengths + static_cast<uint32_t>(field_bytes(kWarpLanes * kStreams, h.length_bits));
    const int32_t bits = find_streams(lengths, h);
    fields = header.z;
    block.header = {header.x, header.y,
                    static_cast<uint32_t>(bits) | static_cast<uint32_t>(h.exceptions) << 16,
                    header.w};
    const uint32_t bytes = block.payload + static_cast<uint32_t>(bits + 31) / 32 * 4 +
                           kExceptionBytes * static_cast<uint32_t>(h.exceptions) - at;
    const uint32_t wrong = ((header.x ^ expected.first) & 0xffffffu) |
                           (header.y ^ (expected.second | static_cast<uint32_t>(tokens))) |
                           ((bytes + 15) / 16 ^ block.units());
    block.coded = static_cast<int32_t>(wrong == 0) & static_cast<int32_t>(bits <= kMaxPayloadBits) &
                  static_cast<int32_t>(h.exponent_bits <= kMaxExponentBits) &
                  static_cast<int32_t>(h.length_bits <= kMaxLengthBits) &
                  static_cast<int32_t>(block.units() * 16 <= room);
  }

  // The block with its exceptions.
  __device__ __forceinline__ OpenBlock with_exceptions() const {
    OpenBlock b = block;
    b.exception_words = b.payload + (static_cast<uint32_t>(b.payload_bits()) + 31) / 32 * 4;
    return b;
  }

  // A slice that is not coded, from memory; false where it is no raw one either.
  __device__ __forceinline__ bool open_raw(const uint8_t* from, const ExpectedHeader& expected) {
    const WeightedFields h(fields);
    const auto mode = static_cast<BlockMode>(block.header.x >> 8 & 15u);
    const uint32_t plain = kCodedBlockVersion | 1u << 12 | (expected.first & 0xc000u);
    const auto tokens = static_cast<uint32_t>(block.tokens);
    if (!is_raw_mode(mode) || (block.header.x & 0xfff0ffu) != plain ||
        (block.header.y & 0xffffu) != (expected.second | tokens) || (fields & 0xf0ffffffu) != 0 ||
        h.exponent_bits > kMaxExponentBits || (mode == BlockMode::kRaw16 && block.base() != 0)) {
      return false;
    }
    const int32_t tiles =
        (kCodedBlockHeaderBytes + field_bytes(block.tokens, h.exponent_bits) + 15) / 16 * 16;
    raw.tiles = from + tiles;
    raw.bits = raw_bits(mode);
    raw.base = block.base();
    const auto dim_blocks = static_cast<int32_t>(expected.second >> 8 & 0xffu) / kDimBlock;
    const int32_t bytes = tile_count(block.tokens) * raw_tile(raw.bits, dim_blocks).bytes();
    return static_cast<int32_t>(block.units()) * 16 == tiles + bytes;
  }

  // The exponent of token i, of a slice in its slot at `at` or, where it is raw, in memory.
  __device__ __forceinline__ int32_t exponent(uint32_t at, const uint8_t* from, int32_t i) const {
    const int32_t bits = WeightedFields(fields).exponent_bits;
    const int32_t token = min(i, block.tokens - 1);
    const uint32_t above = block.coded ? shared_field(at + kCodedBlockHeaderBytes, token, bits)
                                       : load_field(from + kCodedBlockHeaderBytes, token, bits);
    return (static_cast<int32_t>(block.header.x) >> 24) + static_cast<int32_t>(above);
  }

 private:
  // Finds where this lane's streams lie and returns the bits of all lanes' streams. The two streams
  // of a lane are summed at once, in the halves of a word. Lengths of 2^16 bits or more make the
  // sums wrong; a stream then begins no later than at the returned number of bits.
  __device__ __forceinline__ int32_t find_streams(uint32_t lengths, const WeightedFields& h) {
    const auto lane = static_cast<int32_t>(fresh_lane());
    const auto length = [&](int s) {
      return static_cast<uint32_t>(h.least_length) +
             shared_field(lengths, s * kWarpLanes + lane, h.length_bits);
    };
    uint32_t own = length(0);
    if constexpr (kStreams == 2) own += length(1) << 16;
    uint32_t sum = own;
#pragma unroll
    for (int i = 1; i < kWarpLanes; i *= 2) sum = add_below(sum, i);
    const uint32_t all = __shfl_sync(kFullWarp, sum, kWarpLanes - 1);
    if constexpr (kStreams == 1) {
      ends = sum;
      begin[0] = static_cast<int32_t>(sum - own);
      return static_cast<int32_t>(all);
    } else {
      const uint32_t before = sum - own, bits = (all & 0xffffu) + (all >> 16);
      begin[0] = static_cast<int32_t>(before & 0xffffu);
      begin[1] = static_cast<int32_t>((before >> 16) + (all & 0xffffu));
      ends = sum + (all << 16);
#pragma unroll
      for (int s = 0; s < 2; ++s) begin[s] = min(begin[s], static_cast<int32_t>(bits));
      return static_cast<int32_t>(bits);
    }
  }
};

}  // namespace tierkv
