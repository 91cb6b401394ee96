// SPDX-License-Identifier: Apache-2.0
// What checks a slice in shared memory and decodes its tiles, by a warp.
#pragma once

#include "codec/format/coded_block_format.h"
#include "codec/format/quantize.h"
#include "codec/gpu/coded/coded_batch.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/copies.cuh"
#include "gpu/shared_memory.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kCodedDecodeWarps = 16;
// Codes from one token of a tile to the next: lanes of eight tokens meet in no bank.
inline constexpr int32_t kTileStride = kSliceDims + 8;
inline constexpr int32_t kCodesTileBytes = kTileTokens * kTileStride * 2;

// ---- checks ----

// Fields that can be judged by the header and the codebook alone.
__device__ inline bool header_is_valid(const BlockHeader& h, int32_t tokens, int32_t dims,
                                       Component component, const DeviceCodebook& book) {
  if (h.version != kCodedBlockVersion || static_cast<int32_t>(h.mode) >= kNumBlockModes ||
      h.component != component || h.tokens != tokens || h.dims != dims ||
      h.exponent_bits > kMaxExponentBits || h.length_bits > kMaxLengthBits) {
    return false;
  }
  if (is_raw_mode(h.mode)) {
    return h.streams_per_lane == 1 && h.table_id == 0 && h.least_length == 0 &&
           h.length_bits == 0 && h.exceptions == 0 &&
           (h.mode != BlockMode::kRaw16 || h.base_or_books == 0);
  }
  return h.mode == book.mode && h.table_id == book.table_id &&
         h.streams_per_lane == book.streams_per_lane && h.base_or_books == 0;
}

// Zeros from a bit on to a byte, both inside whole words: those that the lane looks at.
__device__ __forceinline__ bool gap_is_zero(const uint8_t* block, int32_t from_bit,
                                            int32_t to_byte) {
  bool zero = true;
#pragma unroll 1
  for (int32_t i = from_bit / 32 + lane_index(); 4 * i < to_byte; i += kWarpLanes) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(block)[i];
    zero &= (i == from_bit / 32 ? word >> from_bit % 32 : word) == 0;
  }
  return zero;
}

// Strictly ascending, inside the block, not zero: those that the lane looks at. That the sums are
// 16-bit integers shows when they are added.
__device__ __forceinline__ bool exceptions_are_valid(const BlockHeader& h, const BlockLayout& at,
                                                     const uint8_t* block) {
  const auto* exceptions = reinterpret_cast<const uint32_t*>(block + at.exceptions);
  bool valid = true;
#pragma unroll 1
  for (int32_t i = lane_index(); i < h.exceptions; i += kWarpLanes) {
    const uint32_t index = exceptions[i] & 0xffffu;
    valid &= exceptions[i] >> 16 != 0 && index / kSliceDims < h.tokens &&
             index % kSliceDims < h.dims && (i == 0 || (exceptions[i - 1] & 0xffffu) < index);
  }
  return valid;
}

// ---- codes ----

// Where the streams of this lane lie.
struct BlockStreams {
  const uint8_t* payload;  // in shared memory, 4-byte aligned
  int32_t count;
  int32_t first[2], last[2];  // bits of the payload
};
// By the codebook's table.
struct TableReader {
  int32_t streams;  // of a lane
  SharedTable<0> table;
  LaneStream<true> stream[2];

  // table_of_book: in shared memory, at a multiple of its size.
  __device__ __forceinline__ TableReader(const DeviceCodebook& book, const uint8_t* table_of_book)
      : streams(book.streams_per_lane),
        table(shared_address(table_of_book), table_mask(book.max_length, 0)) {}
  __device__ __forceinline__ void open(const BlockStreams& of) {
    const uint32_t payload = shared_address(of.payload);
    stream[0].open(payload, of.first[0], SharedTable<0>::kBias);
    if (streams == 2) stream[1].open(payload, of.first[1], SharedTable<0>::kBias);
  }
  __device__ __forceinline__ bool ends(const BlockStreams& of) const {
    const uint32_t payload = shared_address(of.payload);
    bool valid = stream[0].end(payload, SharedTable<0>::kBias) == of.last[0];
    if (streams == 2) valid &= stream[1].end(payload, SharedTable<0>::kBias) == of.last[1];
    return valid;
  }
};

// Two codes from an entry of the table in shared memory, 16 bits each.
struct PairBase {
  int32_t base;

  // What the table in shared memory holds for an entry of the codebook's: the first digit in byte
  // 1, the second one in byte 2. A first code below 0 takes one from the code above it, which the
  // second digit makes good.
  __device__ __forceinline__ uint32_t shared_entry(uint32_t entry) const {
    const uint32_t first = entry >> 6 & 31u, second = entry >> 22 & 31u;
    const uint32_t taken = static_cast<int32_t>(first) + base < 0 ? 1u : 0u;
    return (entry & 63u) | first << 8 | (second + taken) << 16;
  }
  __device__ __forceinline__ uint32_t codes(uint32_t shared_entry) const {
    return __byte_perm(shared_entry, 0, 0x4241) + static_cast<uint32_t>(base) * 0x10001u;
  }
};

// Adds the exceptions of a tile; false where a sum is no 16-bit integer.
__device__ inline bool add_exceptions(const BlockHeader& h, const BlockLayout& at,
                                      const uint8_t* block, int32_t tile, int16_t* codes) {
  const auto* exceptions = reinterpret_cast<const uint32_t*>(block + at.exceptions);
  bool fits = true;
#pragma unroll 1
  for (int32_t i = lane_index(); i < h.exceptions; i += kWarpLanes) {
    const auto index = static_cast<int32_t>(exceptions[i] & 0xffffu);
    const int32_t token = index / kSliceDims - tile * kTileTokens;
    if (token < 0 || token >= kTileTokens) continue;
    int16_t& code = codes[token * kTileStride + index % kSliceDims];
    const int32_t sum = code + static_cast<int16_t>(exceptions[i] >> 16);
    fits &= sum >= INT16_MIN && sum <= INT16_MAX;
    code = static_cast<int16_t>(sum);
  }
  return fits;
}

// The codes of a dim block from its lane's first one on.
template <bool kKey, int32_t kStreams>
__device__ __forceinline__ void decode_dim_block(TableReader& reader, const PairBase& base,
                                                 int16_t* to) {
  constexpr auto kComponent = kKey ? Component::kKey : Component::kValue;
  uint32_t e[kPairsPerFragment];
  if constexpr (kStreams == 1) {
    reader.stream[0].step(reader.table, &e[0], &e[1]);
    reader.stream[0].step(reader.table, &e[2], &e[3]);
  } else {
    reader.stream[0].step(reader.table, &e[0], &e[2]);
    reader.stream[1].step(reader.table, &e[1], &e[3]);
  }
#pragma unroll
  for (int32_t r = 0; r < kPairsPerFragment; ++r) {
    const PairPosition at = pair_position(kComponent, 0, 0, r, 0);
    const uint32_t pair = base.codes(e[r]);
    int16_t* const first = to + at.token * kTileStride + at.dim;
    if constexpr (kKey) {
      *reinterpret_cast<uint32_t*>(first) = pair;
    } else {
      first[0] = static_cast<int16_t>(pair);
      first[kTileStride] = static_cast<int16_t>(pair >> 16);
    }
  }
}

// The codes of a coded tile without exceptions. Slices have an even number of dim blocks.
template <bool kKey, int32_t kStreams>
__device__ __forceinline__ void decode_pair_tile(TableReader& reader, int32_t dims,
                                                 const PairBase& base, int16_t* codes) {
  constexpr auto kComponent = kKey ? Component::kKey : Component::kValue;
  const int32_t blocks = dim_block_count(dims);
  const auto dim_of = [&](int32_t i) { return dim_block_at(kComponent, blocks, i) * kDimBlock; };
  const PairPosition lane = pair_position(kComponent, 0, 0, 0, lane_index());
  int16_t* to = codes + lane.token * kTileStride + lane.dim;
#pragma unroll 1
  for (int32_t i = 0; i < blocks; i += 2, to += dim_of(2)) {
    decode_dim_block<kKey, kStreams>(reader, base, to);
    decode_dim_block<kKey, kStreams>(reader, base, to + dim_of(1));
  }
}
template <bool kKey>
__device__ __forceinline__ void decode_pair_tile(TableReader& reader, int32_t dims,
                                                 const PairBase& base, int16_t* codes) {
  if (reader.streams == 1) {
    decode_pair_tile<kKey, 1>(reader, dims, base, codes);
  } else {
    decode_pair_tile<kKey, 2>(reader, dims, base, codes);
  }
}

// The codes of a raw tile.
__device__ __forceinline__ void read_raw_tile(const BlockHeader& h, const uint8_t* payload,
                                              int32_t tile, int16_t* codes) {
  const TileLayout layout = raw_tile(raw_bits(h.mode), dim_block_count(h.dims));
  const uint8_t* plane = payload + tile * layout.bytes();
  const uint32_t mask = (1u << layout.type.bits()) - 1u;
  for (int32_t f = 0; f < dim_block_count(h.dims); ++f) {
#pragma unroll
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const PairPosition at = pair_position(h.component, 0, f, r, lane_index());
      const CodePosition p = code_position(layout, h.component, at.token, at.dim);
      const uint32_t word = *reinterpret_cast<const uint32_t*>(plane + p.byte) >> p.bit;
      int16_t* to = codes + at.token * kTileStride + at.dim;
      to[0] = static_cast<int16_t>(h.base() + static_cast<int32_t>(word & mask));
      to[h.component == Component::kKey ? 1 : kTileStride] =
          static_cast<int16_t>(h.base() + static_cast<int32_t>(word >> 16 & mask));
    }
  }
}

// By the warp: into shared memory, until it is there.
__device__ __forceinline__ void copy_block(const uint8_t* from, int32_t bytes, uint8_t* to) {
#pragma unroll 2
  for (int32_t i = 16 * lane_index(); i < bytes; i += 16 * kWarpLanes) {
    copy_async_16(to + i, from + i, true);
  }
  wait_copies();
  __syncwarp();
}

}  // namespace tierkv
