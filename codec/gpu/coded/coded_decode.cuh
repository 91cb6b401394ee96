// SPDX-License-Identifier: Apache-2.0
// What decodes the tiles of coded blocks, by warps, whatever the version of their headers.
//
// Reader, how the symbols of a lane's streams become digits:
//   kWarpBytes                   shared memory of a warp, a multiple of 16
//   open(streams), pairs(f)      by a lane: its streams; the four pairs of its next dim block
//   ends(streams)                whether they end where the next ones begin
#pragma once

#include "codec/format/quantize.h"
#include "codec/gpu/coded/coded_batch.h"
#include "codec/gpu/coded/coded_open.cuh"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/copies.cuh"
#include "gpu/shared_memory.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kDecodeWarps = 16;
// A stream that begins inside the payload can be read this far behind its end.
inline constexpr int32_t kDecodeSlackBytes =
    kBlockTokens * kSliceDims / kWarpLanes * kMaxCodeLength / 8 + 16;
// Codes from one token of a tile to the next: lanes of eight tokens meet in no bank.
inline constexpr int32_t kTileStride = kSliceDims + 8;
inline constexpr int32_t kCodesTileBytes = kTileTokens * kTileStride * 2;

// Two codes less the base.
struct DigitPair {
  int32_t first, second;
};

// What a warp has in shared memory. The slack follows the block.
struct WarpMemory {
  uint8_t* block;
  int16_t* tile;      // [kTileTokens][kTileStride], codes
  uint8_t* reader;    // kWarpBytes of the reader
  int32_t apart = 0;  // codes from one tile to the next
};

__device__ __forceinline__ DigitPair entry_digits(BlockMode mode, uint32_t e) {
  if (mode == BlockMode::kPair) {
    return {static_cast<int32_t>(e >> 6 & 31u), static_cast<int32_t>(e >> 22 & 31u)};
  }
  if (mode == BlockMode::kSplit) {
    return {static_cast<int32_t>(e >> 6 & 15u) * 16, static_cast<int32_t>(e >> 22 & 15u) * 16};
  }
  return {static_cast<int32_t>(e >> 6 & 3u), static_cast<int32_t>(e >> 22 & 3u)};  // kQuad
}

// Where the streams of this lane lie.
struct BlockStreams {
  const uint8_t* payload;  // in shared memory, 4-byte aligned
  int32_t count;
  int32_t first[2], last[2];  // bits of the payload
  int32_t codes;              // of a lane, padding included

  __device__ __forceinline__ int32_t begin(int32_t stream) const {
    return stream == 0 ? first[0] : first[1];
  }
  __device__ __forceinline__ int32_t end(int32_t stream) const {
    return stream == 0 ? last[0] : last[1];
  }
};
// The streams of a valid block in shared memory; raw modes have none.
__device__ __forceinline__ BlockStreams block_streams(const CodedBlockHeader& h,
                                                      const CodedBlockLayout& at,
                                                      const uint8_t* block) {
  BlockStreams streams{block + at.payload,
                       h.streams_per_lane,
                       {0, 0},
                       {0, 0},
                       tile_count(h.tokens) * dim_block_count(h.dims) * 2 * kPairsPerFragment};
  if (is_raw_mode(h.mode)) return streams;
  const auto* starts = reinterpret_cast<const uint16_t*>(block + at.starts) + lane_index();
  const bool last_lane = lane_index() == kWarpLanes - 1;
  for (int32_t s = 0; s < 2; ++s) {
    if (s == streams.count) break;
    const bool last = last_lane && s == streams.count - 1;
    streams.first[s] = starts[s * kWarpLanes];
    streams.last[s] = last ? h.payload_bits : starts[s * kWarpLanes + 1];
  }
  return streams;
}

// By the codebook's table.
struct TableReader {
  using Stream = LaneStream<true>;
  static constexpr int32_t kWarpBytes = 0;
  BlockMode mode;
  int32_t streams;  // of a lane
  SharedTable<0> table;
  Stream stream[2];

  // table_of_book: in shared memory, at a multiple of its size.
  __device__ __forceinline__ TableReader(const DeviceCodebook& book, const uint8_t* table_of_book)
      : mode(book.mode),
        streams(book.streams_per_lane),
        table(shared_address(table_of_book), table_mask(book.max_length, 0)) {}
  __device__ __forceinline__ void open(const BlockStreams& of) {
    const uint32_t payload = shared_address(of.payload);
    stream[0].open(payload, of.begin(0), SharedTable<0>::kBias);
    if (streams == 2) stream[1].open(payload, of.begin(1), SharedTable<0>::kBias);
  }
  __device__ __forceinline__ bool ends(const BlockStreams& of) const {
    const uint32_t payload = shared_address(of.payload);
    bool valid = stream[0].end(payload, SharedTable<0>::kBias) == of.end(0);
    if (streams == 2) valid &= stream[1].end(payload, SharedTable<0>::kBias) == of.end(1);
    return valid;
  }
  __device__ __forceinline__ void pairs(DigitPair (&out)[4]) {
    if (mode == BlockMode::kQuad) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        uint32_t e;
        if (streams == 1 || half == 0) {
          stream[0].step_one(table, &e);
        } else {
          stream[1].step_one(table, &e);
        }
        out[2 * half] = entry_digits(mode, e);
        out[2 * half + 1] = entry_digits(mode, e >> 2);
      }
      return;
    }
    if (mode == BlockMode::kSingle) {
#pragma unroll
      for (int32_t r = 0; r < 4; ++r) {
        uint32_t a, b;
        if (streams == 1 || r % 2 == 0) {
          stream[0].step(table, &a, &b);
        } else {
          stream[1].step(table, &a, &b);
        }
        out[r] = {static_cast<int32_t>(a >> 16 & 255u), static_cast<int32_t>(b >> 16 & 255u)};
      }
      return;
    }
    uint32_t e[4];
    if (streams == 1) {
      stream[0].step(table, &e[0], &e[1]);
      stream[0].step(table, &e[2], &e[3]);
    } else {
      stream[0].step(table, &e[0], &e[2]);
      stream[1].step(table, &e[1], &e[3]);
    }
#pragma unroll
    for (int32_t r = 0; r < 4; ++r) out[r] = entry_digits(mode, e[r]);
  }
};

// The values of a lane's pair in a raw tile.
__device__ __forceinline__ DigitPair raw_pair(const uint8_t* tile, const TileLayout& layout,
                                              Component component, PairPosition at) {
  const CodePosition p = code_position(layout, component, at.token, at.dim);
  const uint32_t word = *reinterpret_cast<const uint32_t*>(tile + p.byte) >> p.bit;
  const uint32_t mask = (1u << layout.type.bits()) - 1u;
  return {static_cast<int32_t>(word & mask), static_cast<int32_t>(word >> 16 & mask)};
}

// A pair into the codes of the tile, padding included.
__device__ __forceinline__ void store_pair(Component component, PairPosition at, DigitPair pair,
                                           int32_t base, int16_t* tile) {
  int16_t* to = tile + at.token * kTileStride + at.dim;
  const int32_t first = base + pair.first, second = base + pair.second;
  if (component == Component::kKey) {
    *reinterpret_cast<uint32_t*>(to) = __byte_perm(first, second, 0x5410);  // dims are even
  } else {
    to[0] = static_cast<int16_t>(first);
    to[kTileStride] = static_cast<int16_t>(second);
  }
}

// Adds the exceptions of a tile; false where a sum is no 16-bit integer.
__device__ inline bool add_exceptions(const CodedBlockHeader& h, const CodedBlockLayout& at,
                                      const uint8_t* block, int32_t tile, int16_t* codes) {
  const auto* exceptions = reinterpret_cast<const uint32_t*>(block + at.exceptions);
  bool fits = true;
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

// A whole block in shared memory whose header, size, checksum, bounds of streams and exceptions are
// valid.
struct OpenTiles {
  const CodedBlockHeader& header;
  const CodedBlockLayout& at;
  const BlockStreams& streams;
  DimBlockOrder order = DimBlockOrder::kAscending;
};

// The codes of a tile, without exceptions. base_of(f): the code of digit 0 in dim block f, asked
// for before the reader is.
template <class Reader, class BaseOf>
__device__ __forceinline__ void decode_tile(const OpenTiles& open, Reader& reader,
                                            const WarpMemory& memory, int32_t tile,
                                            const BaseOf& base_of, int16_t* codes) {
  const CodedBlockHeader& h = open.header;
  const bool raw = is_raw_mode(h.mode);
  const int32_t lane = lane_index(), blocks = dim_block_count(h.dims);
  const TileLayout layout = raw_tile(raw ? raw_bits(h.mode) : 4, blocks);
  const uint8_t* plane =
      memory.block + (raw ? open.at.payload : open.at.low_plane) + tile * layout.bytes();
  for (int32_t i = 0; i < blocks; ++i) {
    const int32_t f = dim_block_at(open.order, blocks, i);
    const int32_t base = base_of(f);
    DigitPair pairs[4] = {};
    if (!raw) reader.pairs(pairs);
#pragma unroll
    for (int32_t r = 0; r < 4; ++r) {
      const PairPosition place = pair_position(h.component, 0, f, r, lane);
      if (raw || h.mode == BlockMode::kSplit) {
        const DigitPair low = raw_pair(plane, layout, h.component, place);
        pairs[r] = {pairs[r].first + low.first, pairs[r].second + low.second};
      }
      store_pair(h.component, place, pairs[r], base, codes);
    }
  }
}

// Its tiles: finish(tile, codes) of each, with codes [kTileTokens][kTileStride]; decode(tile,
// codes) finds them without exceptions.
template <class Reader, class Decode, class Finish>
__device__ __forceinline__ bool decode_tiles(const OpenTiles& open, Reader& reader,
                                             const WarpMemory& memory, const Decode& decode,
                                             const Finish& finish) {
  const bool raw = is_raw_mode(open.header.mode);
  if (!raw) reader.open(open.streams);
  bool valid = true;
  for (int32_t tile = 0; tile < tile_count(open.header.tokens); ++tile) {
    int16_t* const codes = memory.tile + tile * memory.apart;
    decode(tile, codes);
    __syncwarp();
    valid &= add_exceptions(open.header, open.at, memory.block, tile, codes);
    __syncwarp();
    finish(tile, codes);
    __syncwarp();
  }
  if (!raw) valid &= reader.ends(open.streams);
  return __all_sync(kFullWarp, valid);
}

// By the warp: into shared memory, until it is there.
__device__ __forceinline__ void copy_block(const uint8_t* from, int32_t bytes, uint8_t* to) {
  for (int32_t i = 16 * lane_index(); i < bytes; i += 16 * kWarpLanes) {
    copy_async_16(to + i, from + i, true);
  }
  wait_copies();
  __syncwarp();
}

template <class Reader>
__host__ __device__ constexpr int32_t decode_warp_bytes(int32_t max_block_bytes) {
  return (max_block_bytes + kDecodeSlackBytes + 15) / 16 * 16 + kCodesTileBytes +
         Reader::kWarpBytes;
}

}  // namespace tierkv
