// SPDX-License-Identifier: Apache-2.0
// What decodes coded blocks, by warps: of version 1 here, of version 2 in weighted_decode.cuh.
// Launches of version 1 are in coded_decode_launch.cuh.
//
// Reader, how the symbols of a lane's streams become digits:
//   Params                       what it needs beside the call; a kernel parameter
//   region_bytes(call)           shared memory of the CTA, a power of two; aligned to its size
//   kWarpBytes                   shared memory of a warp, a multiple of 16
//   fill(call, params, region)   by the CTA: what it reads from
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

// A slice and where its codes go.
struct SliceJob {
  const CodedDecode& call;
  const CodedGroup& group;
  int32_t first_dim, dims;
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
  struct Params {};
  using Stream = LaneStream<true>;
  static constexpr int32_t kWarpBytes = 0;
  BlockMode mode;
  int32_t streams;  // of a lane
  SharedTable<0> table;
  Stream stream[2];

  static __host__ __device__ int32_t region_bytes(const CodedDecode& call) {
    return table_region_bytes(call.codebook.max_length, 0);
  }
  __device__ static void fill(const CodedDecode& call, const Params&, uint8_t* region) {
    const int32_t entries = region_bytes(call) / 4;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < entries;
         i += static_cast<int32_t>(blockDim.x)) {
      reinterpret_cast<uint32_t*>(region)[i] = call.codebook.table[i];
    }
  }
  // table_of_book: in shared memory, at a multiple of its size.
  __device__ __forceinline__ TableReader(const DeviceCodebook& book, const uint8_t* table_of_book)
      : mode(book.mode),
        streams(book.streams_per_lane),
        table(shared_address(table_of_book), table_mask(book.max_length, 0)) {}
  __device__ __forceinline__ TableReader(const CodedDecode& call, const Params&, uint8_t* region,
                                         uint8_t*)
      : TableReader(call.codebook, region) {}

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

// The real tokens and channels of a tile into memory.
__device__ inline void write_tile(const SliceJob& job, int32_t tile, const int16_t* codes) {
  const int32_t first = tile * kTileTokens, tokens = min(kTileTokens, job.group.tokens - first);
  const CodedDecode& call = job.call;
  const float step = call.values == nullptr ? 0.0f : call.steps[job.group.step];
  const float* mean = call.values == nullptr || call.means == nullptr
                          ? nullptr
                          : call.means + int64_t{job.group.step} * call.head_dim + job.first_dim;
  for (int32_t d = lane_index(); d < job.dims; d += kWarpLanes) {
    const float centre = mean == nullptr ? 0.0f : mean[d];
    int64_t to = job.group.codes + first * call.token_stride + job.first_dim + d;
    for (int32_t t = 0; t < tokens; ++t, to += call.token_stride) {
      const int16_t code = codes[t * kTileStride + d];
      if (call.codes != nullptr) call.codes[to] = code;
      if (call.values != nullptr) {
        call.values[to] = float_to_half(add_rn(mul_rn(step, static_cast<float>(code)), centre));
      }
    }
  }
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

template <class Reader>
__device__ bool decode_slice(const SliceJob& job, const CodedBlockHeader& h,
                             const CodedBlockLayout& at, Reader& reader, const WarpMemory& memory) {
  const BlockStreams streams = block_streams(h, at, memory.block);
  const OpenTiles open{h, at, streams};
  return decode_tiles(
      open, reader, memory,
      [&](int32_t tile, int16_t* codes) {
        decode_tile(
            open, reader, memory, tile, [&](int32_t) { return h.base; }, codes);
      },
      [&](int32_t tile, const int16_t* codes) { write_tile(job, tile, codes); });
}

// By the warp: into shared memory, until it is there.
__device__ __forceinline__ void copy_block(const uint8_t* from, int32_t bytes, uint8_t* to) {
  for (int32_t i = 16 * lane_index(); i < bytes; i += 16 * kWarpLanes) {
    copy_async_16(to + i, from + i, true);
  }
  wait_copies();
  __syncwarp();
}

// Copies what there is of a block and judges it: kOk, kCorrupt or kOutOfRange.
__device__ inline StatusCode open_slice(const SliceJob& job, const uint8_t* from, int32_t size,
                                        const WarpMemory& memory, CodedBlockHeader* header,
                                        CodedBlockLayout* at) {
  if (size < kCodedBlockHeaderBytes) return StatusCode::kCorrupt;
  *header = load_header(from);
  if (!header_is_valid(*header, job.group.tokens, job.dims, job.call.codebook)) {
    return StatusCode::kCorrupt;
  }
  *at = block_layout(*header);
  if (at->bytes != header->units * kBlockAlignment || at->bytes > size) return StatusCode::kCorrupt;
  if (at->bytes > job.call.max_block_bytes) return StatusCode::kOutOfRange;
  copy_block(from, at->bytes, memory.block);
  bool valid = warp_checksum(memory.block, at->bytes) == header->checksum;
  valid &= padding_is_zero(*header, *at, memory.block);
  if (!is_raw_mode(header->mode)) {
    valid &= starts_are_valid(*header, *at, memory.block);
    valid &= exceptions_are_valid(*header, *at, memory.block);
  }
  return valid ? StatusCode::kOk : StatusCode::kCorrupt;
}

template <class Reader>
__device__ StatusCode decode_group(const CodedDecode& call, const CodedGroup& group, Reader& reader,
                                   const WarpMemory& memory) {
  const uint8_t* from = call.bytes + group.offset;
  int32_t left = group.bytes;
  for (int32_t first = 0; first < call.head_dim; first += kSliceDims) {
    const SliceJob job{call, group, first, min(kSliceDims, call.head_dim - first)};
    CodedBlockHeader header;
    CodedBlockLayout at;
    const StatusCode code = open_slice(job, from, left, memory, &header, &at);
    if (code != StatusCode::kOk) return code;
    if (!decode_slice(job, header, at, reader, memory)) return StatusCode::kCorrupt;
    from += at.bytes;
    left -= at.bytes;
  }
  return left == 0 ? StatusCode::kOk : StatusCode::kCorrupt;
}

__device__ inline void write_zeros(const CodedDecode& call, const CodedGroup& group) {
  for (int32_t t = 0; t < group.tokens; ++t) {
    for (int32_t d = lane_index(); d < call.head_dim; d += kWarpLanes) {
      const int64_t to = group.codes + t * call.token_stride + d;
      if (call.codes != nullptr) call.codes[to] = 0;
      if (call.values != nullptr) call.values[to] = 0;
    }
  }
}

__device__ inline bool group_is_valid(const CodedDecode& call, const CodedGroup& g) {
  return g.offset >= 0 && g.offset % kBlockAlignment == 0 && g.bytes >= 0 &&
         g.offset <= call.size && g.bytes <= call.size - g.offset && g.codes >= 0 &&
         g.tokens >= 1 && g.tokens <= kBlockTokens &&
         (call.values == nullptr || (g.step >= 0 && g.step < call.num_steps));
}

template <class Reader>
__host__ __device__ constexpr int32_t decode_warp_bytes(int32_t max_block_bytes) {
  return (max_block_bytes + kDecodeSlackBytes + 15) / 16 * 16 + kCodesTileBytes +
         Reader::kWarpBytes;
}

}  // namespace tierkv
