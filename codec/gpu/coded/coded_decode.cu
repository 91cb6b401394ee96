#include <cuda_runtime.h>

#include <algorithm>

#include "codec/format/quantize.h"
#include "codec/gpu/coded/coded_batch.h"
#include "codec/gpu/coded/coded_open.cuh"
#include "codec/gpu/coded/coded_stream.cuh"
#include "codec/gpu/coded/coded_tree.cuh"
#include "gpu/copies.cuh"
#include "gpu/cuda_device.cuh"
#include "gpu/shared_memory.cuh"
#include "gpu/warp.cuh"

namespace tierkv {
namespace {

constexpr int32_t kMaxWarps = 16;
using Stream = TreeWalk::Stream;
// A stream that begins inside the payload can be read this far behind its end.
constexpr int32_t kSlackBytes = kBlockTokens * kSliceDims / kWarpLanes * kMaxCodeLength / 8 + 16;
constexpr int32_t kTileBytes = kTileTokens * kSliceDims * 2;

constexpr int32_t kTreeBytes = 2 * kMaxSymbols * static_cast<int32_t>(sizeof(uint16_t));

// What a warp has in shared memory. The slack follows the block.
struct WarpMemory {
  uint8_t* block;
  int16_t* tile;  // [kTileTokens][kSliceDims], codes
  uint32_t tree;  // shared address, of all warps
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

// The four pairs of a lane in one dim block, from its streams.
__device__ __forceinline__ void next_pairs(const DeviceCodebook& c, const SharedTable<0>& table,
                                           Stream (&stream)[2], DigitPair (&pairs)[4]) {
  const int32_t streams = c.streams_per_lane;
  if (c.mode == BlockMode::kQuad) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      uint32_t e;
      if (streams == 1 || half == 0) {
        stream[0].step_one(table, &e);
      } else {
        stream[1].step_one(table, &e);
      }
      pairs[2 * half] = entry_digits(c.mode, e);
      pairs[2 * half + 1] = entry_digits(c.mode, e >> 2);
    }
    return;
  }
  if (c.mode == BlockMode::kSingle) {
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
  for (int32_t r = 0; r < 4; ++r) pairs[r] = entry_digits(c.mode, e[r]);
}

// The values of a lane's pair in a raw tile.
__device__ __forceinline__ DigitPair raw_pair(const uint8_t* tile, const TileLayout& layout,
                                              Component component, PairPosition at) {
  const CodePosition p = code_position(layout, component, at.token, at.dim);
  const uint32_t word = *reinterpret_cast<const uint32_t*>(tile + p.byte) >> p.bit;
  const uint32_t mask = (1u << layout.bits) - 1u;
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
__device__ bool add_exceptions(const CodedBlockHeader& h, const CodedBlockLayout& at,
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
__device__ void write_tile(const SliceJob& job, int32_t tile, const int16_t* codes) {
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
template <bool kWalk>
__device__ bool decode_slice(const SliceJob& job, const CodedBlockHeader& h,
                             const CodedBlockLayout& at, uint32_t table_address,
                             const WarpMemory& memory) {
  const DeviceCodebook& c = job.call.codebook;
  const bool raw = is_raw_mode(h.mode);
  const int32_t lane = lane_index(), blocks = dim_block_count(h.dims);
  const TreeWalk walk{memory.tree, static_cast<uint32_t>(c.tree_entries - 1), c.max_length,
                      c.levels};
  const TileLayout layout = raw_tile(raw ? raw_bits(h.mode) : 4, blocks);
  const SharedTable<0> table(table_address, table_mask(c.max_length, 0));
  const uint32_t payload = shared_address(memory.block + at.payload);
  const auto* starts = reinterpret_cast<const uint16_t*>(memory.block + at.starts);
  Stream stream[2];
  if (!raw) {
    stream[0].open(payload, starts[lane], SharedTable<0>::kBias);
    if (h.streams_per_lane == 2) {
      stream[1].open(payload, starts[kWarpLanes + lane], SharedTable<0>::kBias);
    }
  }
  bool valid = true;
  for (int32_t tile = 0; tile < tile_count(h.tokens); ++tile) {
    const uint8_t* plane = memory.block + (raw ? at.payload : at.low_plane) + tile * layout.bytes();
    for (int32_t f = 0; f < blocks; ++f) {
      DigitPair pairs[4] = {};
      if (kWalk && !raw) {
#pragma unroll
        for (int32_t r = 0; r < 4; ++r) {
          pairs[r] =
              walk.pair(c.mode, h.streams_per_lane == 2 && r % 2 == 1 ? stream[1] : stream[0]);
        }
      } else if (!raw) {
        next_pairs(c, table, stream, pairs);
      }
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
  if (!raw) {
    const int32_t last = kWarpLanes * h.streams_per_lane - 1;
    for (int32_t s = 0; s < h.streams_per_lane; ++s) {
      const int32_t i = s * kWarpLanes + lane;
      const int32_t end = i == last ? h.payload_bits : starts[i + 1];
      valid &= (s == 0 ? stream[0] : stream[1]).end(payload, SharedTable<0>::kBias) == end;
    }
  }
  return __all_sync(kAllLanes, valid);
}

// Copies what there is of a block and judges it: kOk, kCorrupt or kOutOfRange.
__device__ StatusCode open_slice(const SliceJob& job, const uint8_t* from, int32_t size,
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

template <bool kWalk>
__device__ StatusCode decode_group(const CodedDecode& call, const CodedGroup& group,
                                   uint32_t table_address, const WarpMemory& memory) {
  const uint8_t* from = call.bytes + group.offset;
  int32_t left = group.bytes;
  for (int32_t first = 0; first < call.head_dim; first += kSliceDims) {
    const SliceJob job{call, group, first, min(kSliceDims, call.head_dim - first)};
    CodedBlockHeader header;
    CodedBlockLayout at;
    const StatusCode code = open_slice(job, from, left, memory, &header, &at);
    if (code != StatusCode::kOk) return code;
    if (!decode_slice<kWalk>(job, header, at, table_address, memory)) return StatusCode::kCorrupt;
    from += at.bytes;
    left -= at.bytes;
  }
  return left == 0 ? StatusCode::kOk : StatusCode::kCorrupt;
}

__device__ void write_zeros(const CodedDecode& call, const CodedGroup& group) {
  for (int32_t t = 0; t < group.tokens; ++t) {
    for (int32_t d = lane_index(); d < call.head_dim; d += kWarpLanes) {
      const int64_t to = group.codes + t * call.token_stride + d;
      if (call.codes != nullptr) call.codes[to] = 0;
      if (call.values != nullptr) call.values[to] = 0;
    }
  }
}

__device__ bool group_is_valid(const CodedDecode& call, const CodedGroup& g) {
  return g.offset >= 0 && g.offset % kBlockAlignment == 0 && g.bytes >= 0 &&
         g.offset <= call.size && g.bytes <= call.size - g.offset && g.codes >= 0 &&
         g.tokens >= 1 && g.tokens <= kBlockTokens &&
         (call.values == nullptr || (g.step >= 0 && g.step < call.num_steps));
}

__host__ __device__ constexpr int32_t warp_bytes(int32_t max_block_bytes) {
  return (max_block_bytes + kSlackBytes + 15) / 16 * 16 + kTileBytes;
}

// Shared memory: the table, at a multiple of its size, then the warps.
template <bool kWalk>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    decode_kernel(const __grid_constant__ CodedDecode call) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint16_t tree[kWalk ? 2 * kMaxSymbols : 1];
  const auto region = static_cast<uint32_t>(table_region_bytes(call.codebook.max_length, 0));
  const uint32_t table_address = (shared_address(shared) + region - 1) / region * region;
  uint8_t* table = shared + (table_address - shared_address(shared));
  const uint32_t entries = is_raw_mode(call.codebook.mode) ? 0 : region / 4;
  for (uint32_t i = threadIdx.x; i < entries; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(table)[i] = call.codebook.table[i];
  }
  if constexpr (kWalk) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < call.codebook.tree_entries;
         i += static_cast<int32_t>(blockDim.x)) {
      tree[i] = call.codebook.tree[i];
    }
  }
  __syncthreads();
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  const auto warps = static_cast<int32_t>(blockDim.x / 32);
  uint8_t* mine = table + region + warp * warp_bytes(call.max_block_bytes);
  mine = shared + ((mine - shared + 15) & ~15);
  const WarpMemory memory{mine + kTileBytes, reinterpret_cast<int16_t*>(mine),
                          shared_address(tree)};
  const auto stride = static_cast<int32_t>(gridDim.x) * warps;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * warps + warp; i < call.num_groups;
       i += stride) {
    const CodedGroup group = call.groups[i];
    auto code = StatusCode::kInvalidArgument;
    if (group_is_valid(call, group)) {
      code = decode_group<kWalk>(call, group, table_address, memory);
      if (code != StatusCode::kOk) write_zeros(call, group);
    }
    if (lane_index() == 0) call.status[i] = code;
    __syncwarp();
  }
}

}  // namespace

Status decode_coded(const CodedDecode& call, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_groups == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // The table's own alignment may cost its size once more.
  const int32_t region = table_region_bytes(call.codebook.max_length, 0);
  const int32_t tables = 2 * region + 16 + kTreeBytes, each = warp_bytes(call.max_block_bytes);
  const int32_t warps = std::min(kMaxWarps, (limits->shared_bytes - tables) / each);
  if (warps < 1) return Status(StatusCode::kUnsupported, "coded decode: too little shared memory");
  const int32_t bytes = tables - kTreeBytes + warps * each;
  const auto kernel = call.walk_tree ? decode_kernel<true> : decode_kernel<false>;
  if (Status s = cuda_status(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "shared memory");
      !s) {
    return s;
  }
  const int32_t ctas = std::min(limits->sms, (call.num_groups + warps - 1) / warps);
  kernel<<<static_cast<uint32_t>(ctas), static_cast<uint32_t>(warps) * 32,
           static_cast<size_t>(bytes), stream>>>(call);
  return cuda_status(cudaGetLastError(), "decode_coded");
}

}  // namespace tierkv
