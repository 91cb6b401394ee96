// The kernel that decodes groups of coded blocks.
//
// Reader, how the symbols of a lane's streams become digits:
//   Params                       what it needs beside the call; a kernel parameter
//   region_bytes(call)           shared memory of the CTA, a power of two; aligned to its size
//   kWarpBytes                   shared memory of a warp, a multiple of 16
//   fill(call, params, region)   by the CTA: what it reads from
//   open(streams), pairs(f)      by a lane: its streams; the four pairs of its next dim block
//   ends(streams)                whether they end where the next ones begin
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/format/quantize.h"
#include "codec/gpu/coded/coded_batch.h"
#include "codec/gpu/coded/coded_open.cuh"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/copies.cuh"
#include "gpu/cuda_device.cuh"
#include "gpu/shared_memory.cuh"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kDecodeWarps = 16;
// A stream that begins inside the payload can be read this far behind its end.
inline constexpr int32_t kDecodeSlackBytes =
    kBlockTokens * kSliceDims / kWarpLanes * kMaxCodeLength / 8 + 16;
inline constexpr int32_t kCodesTileBytes = kTileTokens * kSliceDims * 2;

// Two codes less the base.
struct DigitPair {
  int32_t first, second;
};

// What a warp has in shared memory. The slack follows the block.
struct WarpMemory {
  uint8_t* block;
  int16_t* tile;    // [kTileTokens][kSliceDims], codes
  uint8_t* reader;  // kWarpBytes of the reader
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

// Where the streams of a block lie, each lane's at starts[stream * kWarpLanes + lane].
struct BlockStreams {
  const uint8_t* payload;  // in shared memory, 4-byte aligned
  const uint16_t* starts;
  int32_t count;  // of a lane
  int32_t bits;   // of the payload
  int32_t codes;  // of a lane, padding included

  __device__ __forceinline__ int32_t begin(int32_t stream) const {
    return starts[stream * kWarpLanes + lane_index()];
  }
  __device__ __forceinline__ int32_t end(int32_t stream) const {
    const int32_t i = stream * kWarpLanes + lane_index();
    return i == kWarpLanes * count - 1 ? bits : starts[i + 1];
  }
};

// By the codebook's table.
struct TableReader {
  struct Params {};
  using Stream = LaneStream<true>;
  static constexpr int32_t kWarpBytes = 0;
  const DeviceCodebook& book;
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
  __device__ TableReader(const CodedDecode& call, const Params&, uint8_t* region, uint8_t*)
      : book(call.codebook),
        table(shared_address(region), table_mask(call.codebook.max_length, 0)) {}

  __device__ __forceinline__ void open(const BlockStreams& streams) {
    const uint32_t payload = shared_address(streams.payload);
    stream[0].open(payload, streams.begin(0), SharedTable<0>::kBias);
    if (streams.count == 2) stream[1].open(payload, streams.begin(1), SharedTable<0>::kBias);
  }
  __device__ __forceinline__ bool ends(const BlockStreams& streams) const {
    bool valid = true;
    for (int32_t s = 0; s < streams.count; ++s) {
      valid &= (s == 0 ? stream[0] : stream[1])
                   .end(shared_address(streams.payload), SharedTable<0>::kBias) == streams.end(s);
    }
    return valid;
  }
  __device__ __forceinline__ void pairs(DigitPair (&pairs)[4]) {
    const int32_t streams = book.streams_per_lane;
    if (book.mode == BlockMode::kQuad) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        uint32_t e;
        if (streams == 1 || half == 0) {
          stream[0].step_one(table, &e);
        } else {
          stream[1].step_one(table, &e);
        }
        pairs[2 * half] = entry_digits(book.mode, e);
        pairs[2 * half + 1] = entry_digits(book.mode, e >> 2);
      }
      return;
    }
    if (book.mode == BlockMode::kSingle) {
#pragma unroll
      for (int32_t r = 0; r < 4; ++r) {
        uint32_t a, b;
        if (streams == 1 || r % 2 == 0) {
          stream[0].step(table, &a, &b);
        } else {
          stream[1].step(table, &a, &b);
        }
        pairs[r] = {static_cast<int32_t>(a >> 16 & 255u), static_cast<int32_t>(b >> 16 & 255u)};
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
    for (int32_t r = 0; r < 4; ++r) pairs[r] = entry_digits(book.mode, e[r]);
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
  int16_t* to = tile + at.token * kSliceDims + at.dim;
  const int32_t first = base + pair.first, second = base + pair.second;
  if (component == Component::kKey) {
    *reinterpret_cast<uint32_t*>(to) = __byte_perm(first, second, 0x5410);  // dims are even
  } else {
    to[0] = static_cast<int16_t>(first);
    to[kSliceDims] = static_cast<int16_t>(second);
  }
}

// Adds the exceptions of a tile; false where a sum is no 16-bit integer.
__device__ inline bool add_exceptions(const CodedBlockHeader& h, const CodedBlockLayout& at,
                                      const uint8_t* block, int32_t tile, int16_t* codes) {
  const auto* exceptions = reinterpret_cast<const uint32_t*>(block + at.exceptions);
  bool fits = true;
  for (int32_t i = lane_index(); i < h.exceptions; i += kWarpLanes) {
    const auto index = static_cast<int32_t>(exceptions[i] & 0xffffu) - tile * kTileTokens * 128;
    if (index < 0 || index >= kTileTokens * kSliceDims) continue;
    const int32_t sum = codes[index] + static_cast<int16_t>(exceptions[i] >> 16);
    fits &= sum >= INT16_MIN && sum <= INT16_MAX;
    codes[index] = static_cast<int16_t>(sum);
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
      const int16_t code = codes[t * kSliceDims + d];
      if (call.codes != nullptr) call.codes[to] = code;
      if (call.values != nullptr) {
        call.values[to] = float_to_half(add_rn(mul_rn(step, static_cast<float>(code)), centre));
      }
    }
  }
}

// A whole block in shared memory whose header, size, checksum, starts and exceptions are valid.
template <class Reader>
__device__ bool decode_slice(const SliceJob& job, const CodedBlockHeader& h,
                             const CodedBlockLayout& at, Reader& reader, const WarpMemory& memory) {
  const bool raw = is_raw_mode(h.mode);
  const int32_t lane = lane_index(), blocks = dim_block_count(h.dims);
  const TileLayout layout = raw_tile(raw ? raw_bits(h.mode) : 4, blocks);
  const BlockStreams streams = {
      memory.block + at.payload, reinterpret_cast<const uint16_t*>(memory.block + at.starts),
      h.streams_per_lane, h.payload_bits, tile_count(h.tokens) * blocks * 2 * kPairsPerFragment};
  if (!raw) reader.open(streams);
  bool valid = true;
  for (int32_t tile = 0; tile < tile_count(h.tokens); ++tile) {
    const uint8_t* plane = memory.block + (raw ? at.payload : at.low_plane) + tile * layout.bytes();
    for (int32_t f = 0; f < blocks; ++f) {
      DigitPair pairs[4] = {};
      if (!raw) reader.pairs(pairs);
#pragma unroll
      for (int32_t r = 0; r < 4; ++r) {
        const PairPosition place = pair_position(h.component, 0, f, r, lane);
        if (raw || h.mode == BlockMode::kSplit) {
          const DigitPair low = raw_pair(plane, layout, h.component, place);
          pairs[r] = {pairs[r].first + low.first, pairs[r].second + low.second};
        }
        store_pair(h.component, place, pairs[r], h.base, memory.tile);
      }
    }
    __syncwarp();
    valid &= add_exceptions(h, at, memory.block, tile, memory.tile);
    __syncwarp();
    write_tile(job, tile, memory.tile);
    __syncwarp();
  }
  if (!raw) valid &= reader.ends(streams);
  return __all_sync(kFullWarp, valid);
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
  for (int32_t i = 16 * lane_index(); i < at->bytes; i += 16 * kWarpLanes) {
    copy_async_16(memory.block + i, from + i, true);
  }
  wait_copies();
  __syncwarp();
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

// Shared memory: the reader's region, at a multiple of its size, then the warps.
template <class Reader>
__global__ void __launch_bounds__(kDecodeWarps * 32, 1)
    coded_decode_kernel(const __grid_constant__ CodedDecode call,
                        const __grid_constant__ typename Reader::Params params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const auto bytes = static_cast<uint32_t>(Reader::region_bytes(call));
  const uint32_t start = shared_address(shared);
  uint8_t* region = shared + ((start + bytes - 1) / bytes * bytes - start);
  Reader::fill(call, params, region);
  __syncthreads();
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto warps = static_cast<int32_t>(blockDim.x / 32);
  uint8_t* mine = region + bytes + warp * decode_warp_bytes<Reader>(call.max_block_bytes);
  mine = shared + ((mine - shared + 15) & ~15);
  const WarpMemory memory{mine + kCodesTileBytes + Reader::kWarpBytes,
                          reinterpret_cast<int16_t*>(mine), mine + kCodesTileBytes};
  Reader reader(call, params, region, memory.reader);
  const auto stride = static_cast<int32_t>(gridDim.x) * warps;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * warps + warp; i < call.num_groups;
       i += stride) {
    const CodedGroup group = call.groups[i];
    auto code = StatusCode::kInvalidArgument;
    if (group_is_valid(call, group)) {
      code = decode_group(call, group, reader, memory);
      if (code != StatusCode::kOk) write_zeros(call, group);
    }
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

// A valid call with groups.
template <class Reader>
Status launch_coded_decode(const CodedDecode& call, const typename Reader::Params& params,
                           GpuStream stream) {
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // The region's own alignment may cost its size once more.
  const int32_t shared = 2 * Reader::region_bytes(call) + 16,
                each = decode_warp_bytes<Reader>(call.max_block_bytes);
  const int32_t warps = std::min(kDecodeWarps, (limits->shared_bytes - shared) / each);
  if (warps < 1) return Status(StatusCode::kUnsupported, "coded decode: too little shared memory");
  const int32_t bytes = shared + warps * each;
  if (Status s =
          cuda_status(cudaFuncSetAttribute(coded_decode_kernel<Reader>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                      "shared memory");
      !s) {
    return s;
  }
  const int32_t ctas = std::min(limits->sms, (call.num_groups + warps - 1) / warps);
  coded_decode_kernel<Reader><<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
                                static_cast<size_t>(bytes), stream>>>(call, params);
  return cuda_status(cudaGetLastError(), "decode_coded");
}

}  // namespace tierkv
