// SPDX-License-Identifier: Apache-2.0
// What a slice of a coded block has besides its codes, exponents and lengths of streams, and
// what its form, coded or raw, follows from.
#pragma once

#include "codec/format/coded_block_format.h"
#include "codec/format/weighted_step.h"
#include "codec/gpu/coded/coded_symbols.cuh"
#include "gpu/warp_sums.cuh"

namespace tierkv {

// Sizes of a slice in the codebook's mode: bits of the streams before each of the lane's own, bits
// of those, and of all streams.
struct SlicePlan {
  int32_t start[2], bits[2];  // of the lane's streams
  int32_t payload_bits, exceptions;
  bool possible;
};

// Two codes in a word, each less or greater.
struct CodeRange {
  uint32_t low = 0x7fff7fffu, high = 0x80008000u;

  __device__ __forceinline__ void add(uint32_t pair) {
    low = __vmins2(low, pair);
    high = __vmaxs2(high, pair);
  }
  __device__ __forceinline__ int32_t lowest() const {
    return __reduce_min_sync(kFullWarp, min(static_cast<int32_t>(static_cast<int16_t>(low)),
                                            static_cast<int32_t>(low) >> 16));
  }
  __device__ __forceinline__ int32_t highest() const {
    return __reduce_max_sync(kFullWarp, max(static_cast<int32_t>(static_cast<int16_t>(high)),
                                            static_cast<int32_t>(high) >> 16));
  }
};

__device__ __forceinline__ void clear_block(void* block, int32_t bytes) {
  for (int32_t i = lane_index(); i < bytes / 16; i += kWarpLanes) {
    static_cast<uint4*>(block)[i] = make_uint4(0, 0, 0, 0);
  }
  __syncwarp();
}

// The form in which a block is stored: its header without the checksum.
struct BlockForm {
  BlockHeader header;
  BlockLayout at;
  bool coded;
};
__device__ __forceinline__ uint64_t sum_of_warp(uint64_t x) {
#pragma unroll
  for (int32_t i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  return x;
}

// block_checksum() of a block that is 16-byte aligned.
__device__ __forceinline__ uint32_t warp_checksum(const uint8_t* block, int32_t bytes) {
  const auto* words = reinterpret_cast<const uint4*>(block);
  const auto left = static_cast<uint32_t>(bytes / 4);
  const auto times = [](uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b; };
  uint64_t sum = 0;  // below 2^56: at most 4116 words
  for (auto i = static_cast<uint32_t>(lane_index()); 4 * i < left; i += kWarpLanes) {
    const uint4 x = words[i];
    const uint32_t weight = left - 4 * i;
    sum += times(weight, x.x) + times(weight - 1, x.y) + times(weight - 2, x.z) +
           times(weight - 3, i == 0 ? x.w & 0xffffu : x.w);
  }
  return static_cast<uint32_t>(sum_of_warp(sum) % kChecksumPrime);
}

// The header and the checksum of a block whose rest is written.
__device__ inline void finish_block(const BlockForm& form, uint8_t* bytes) {
  __syncwarp();
  if (lane_index() == 0) store_header(form.header, bytes);
  __syncwarp();
  const uint32_t checksum = warp_checksum(bytes, form.at.bytes);
  __syncwarp();
  if (lane_index() == 0) store_u16(bytes + 14, checksum);
  __syncwarp();
}

// store_field() where lanes share words.
__device__ __forceinline__ void or_field(uint32_t* part, int32_t i, int32_t bits, uint32_t x) {
  if (bits == 0) return;
  const int32_t from = i * bits, skip = from % 32;
  atomicOr(part + from / 32, x << skip);
  if (skip + bits > 32) atomicOr(part + from / 32 + 1, x >> (32 - skip));
}

// A codebook in the shared memory of a CTA.
struct alignas(16) SharedBook {
  int32_t words;  // where its words begin in the CTA's
  int32_t base, levels;
  int32_t quick_levels;      // 0 where the alphabet has codes that quick ones are not sure of
  const uint16_t* cheapest;  // global memory
  int32_t streams;
  int32_t second_row;  // where a lane's second stream begins
  uint8_t table_id;
  bool usable;  // of pairs
};

// What a slice's form is chosen by.
struct EncodedSlice {
  const int8_t* exponents;  // [tokens], shared memory; null behind the first slice
  int32_t streams;
  int32_t second_row;  // as SharedBook
  uint8_t table_id;
  Component component;
  int32_t dims, tokens;

  // As the host's raw_header().
  __device__ __forceinline__ BlockHeader raw_header(const CodeRange& range) const {
    const RawForm raw = raw_form(range.lowest(), range.highest());
    BlockHeader h;
    h.mode = raw.mode;
    h.component = component;
    h.tokens = static_cast<uint8_t>(tokens);
    h.dims = static_cast<uint8_t>(dims);
    h.base_or_books = static_cast<uint16_t>(raw.base);
    if (exponents == nullptr) return h;
    int32_t least = kMostExponent, most = kLeastExponent;
    for (int32_t t = lane_index(); t < tokens; t += kWarpLanes) {
      least = min(least, static_cast<int32_t>(exponents[t]));
      most = max(most, static_cast<int32_t>(exponents[t]));
    }
    least = __reduce_min_sync(kFullWarp, least);
    most = __reduce_max_sync(kFullWarp, most);
    h.least_exponent = static_cast<int8_t>(least);
    h.exponent_bits = static_cast<uint8_t>(bits_for(static_cast<uint32_t>(most - least)));
    return h;
  }
  __device__ __forceinline__ void write_bounds(const BlockForm& form, const SlicePlan& plan,
                                               uint32_t* block) const {
    const BlockHeader& h = form.header;
    for (int32_t t = lane_index(); exponents != nullptr && t < tokens; t += kWarpLanes) {
      or_field(block + form.at.exponents / 4, t, h.exponent_bits,
               static_cast<uint32_t>(exponents[t] - h.least_exponent));
    }
    if (!form.coded) return;
#pragma unroll
    for (int32_t s = 0; s < 2; ++s) {
      if (s == streams) break;
      or_field(block + form.at.lengths / 4, s * kWarpLanes + lane_index(), h.length_bits,
               static_cast<uint32_t>(plan.bits[s] - h.least_length));
    }
  }
};

// Coded where that is possible and smaller, as the host's encode_slice(). The same code for keys
// and values.
__device__ __noinline__ inline BlockForm choose_form(EncodedSlice of, CodeRange range,
                                                     SlicePlan plan) {
  BlockForm form{of.raw_header(range), {}, false};
  form.at = block_layout(form.header);
  const int32_t other = of.streams == 2 ? plan.bits[1] : plan.bits[0];
  const int32_t least = __reduce_min_sync(kFullWarp, min(plan.bits[0], other));
  const int32_t most = __reduce_max_sync(kFullWarp, max(plan.bits[0], other));
  if (plan.possible) {
    BlockHeader h = form.header;
    h.mode = BlockMode::kPair;
    h.streams_per_lane = static_cast<uint8_t>(of.streams);
    h.table_id = of.table_id;
    h.base_or_books = 0;
    h.payload_bits = static_cast<uint16_t>(plan.payload_bits);
    h.least_length = static_cast<uint16_t>(least);
    h.length_bits = static_cast<uint8_t>(bits_for(static_cast<uint32_t>(most - least)));
    h.exceptions = static_cast<uint16_t>(plan.exceptions);
    const BlockLayout at = block_layout(h);
    if (at.bytes < form.at.bytes) form = {h, at, true};
  }
  form.header.units = static_cast<uint16_t>(form.at.bytes / kBlockAlignment);
  return form;
}

}  // namespace tierkv
