// SPDX-License-Identifier: Apache-2.0
// What decodes groups of coded blocks, by warps.
//
// Reader, beside what codec/gpu/coded/coded_decode.cuh asks of it:
//   Params                       what it needs beside the call; a kernel parameter
//   region_bytes(call)           shared memory of the CTA, a power of two; aligned to its size
//   fill(call, params, region)   by the CTA: what it reads from
#pragma once

#include "bench/baselines/coded/coded_decode.h"
#include "codec/gpu/coded/coded_decode.cuh"

namespace tierkv {

// A slice and where its codes go.
struct SliceJob {
  const CodedDecode& call;
  const CodedGroup& group;
  int32_t first_dim, dims;
};

// By the codebook's table.
struct CallTableReader : TableReader {
  struct Params {};

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
  __device__ __forceinline__ CallTableReader(const CodedDecode& call, const Params&,
                                             uint8_t* region, uint8_t*)
      : TableReader(call.codebook, region) {}
};

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

}  // namespace tierkv
