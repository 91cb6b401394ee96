// SPDX-License-Identifier: Apache-2.0
// Warps that decode blocks, and the decoders that they are given:
//
//   kWarpBytes                  what a warp needs in shared memory beside its block
//   region_bytes(call)          shared memory of the CTA, at a multiple of its size: a power of two
//   fill(call, region)          fills it, by the CTA
//   decode(lane)                writes the digits of the lane's stream
#pragma once

#include "bench/baselines/tree/tree_decode.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/copies.cuh"
#include "gpu/shared_memory.cuh"
#include "gpu/warp.cuh"
#include "gpu/warp_sums.cuh"

namespace tierkv {

inline constexpr int32_t kTreeDecodeWarps = 32;
// A decoder reads words behind the last stream: three of a LaneStream, one of the array tree.
inline constexpr int32_t kTreeDecodeSlack = 16;

struct TreeLane {
  const uint8_t* payload;  // shared memory
  int32_t begin, end;      // bits of the payload
  uint8_t* room;           // of the warp, kWarpBytes
  uint32_t* digits;        // global memory; the words of the lane are kWarpLanes apart
};

struct TreeRegion {
  static constexpr int32_t kEntries = 512;  // of 256 symbols
  const uint16_t* nodes;

  static TKV_HD int32_t region_bytes(const TreeDecode&) { return 2 * kEntries; }
  __device__ static void fill(const TreeDecode& call, uint8_t* region) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < call.tree_entries;
         i += static_cast<int32_t>(blockDim.x)) {
      reinterpret_cast<uint16_t*>(region)[i] = call.tree[i];
    }
  }
  __device__ TreeRegion(const TreeDecode&, const uint8_t* region)
      : nodes(reinterpret_cast<const uint16_t*>(region)) {}
};

// Each bit selects a child. The child is written as if it were a symbol. The place to write moves
// on by one at leaves only, and the node becomes the root again there. Steps are the bits of the
// stream, in whole words: up to 31 bits of the next stream are decoded as well.
struct ArrayTree : TreeRegion {
  // Lanes that write digits of the same number meet in no bank: an odd number of words.
  static constexpr int32_t kLaneRoom = kLaneCodes + 32 + 4;
  static constexpr int32_t kWarpBytes = (kLaneRoom * kWarpLanes + 15) / 16 * 16;
  using TreeRegion::TreeRegion;

  __device__ __forceinline__ void walk(const uint32_t* payload, int32_t begin, int32_t end,
                                       uint8_t* symbols) const {
    const uint32_t* word = payload + begin / 32;
    uint32_t node = 0, at = 0;
#pragma unroll 1
    for (int32_t left = end - begin; left > 0; left -= 32, ++word) {
      const uint32_t bits = __funnelshift_r(word[0], word[1], static_cast<uint32_t>(begin));
#pragma unroll
      for (int32_t i = 0; i < 32; ++i) {
        const uint32_t child = nodes[2 * node + (bits >> i & 1u)];
        const uint32_t is_leaf = child / kLeaf;
        symbols[at] = static_cast<uint8_t>(child);
        at += is_leaf;
        node = child & (is_leaf - 1u);
      }
    }
  }
  __device__ __forceinline__ void decode(const TreeLane& lane) const {
    uint8_t* const symbols = lane.room + lane_index() * kLaneRoom;
    walk(reinterpret_cast<const uint32_t*>(lane.payload), lane.begin, lane.end, symbols);
    for (int32_t i = 0; i < kLaneWords; ++i) {
      lane.digits[i * kWarpLanes] = reinterpret_cast<const uint32_t*>(symbols)[i];
    }
  }
};

struct TreeLoop : TreeRegion {
  static constexpr int32_t kWarpBytes = 0;
  using TreeRegion::TreeRegion;

  __device__ __forceinline__ uint32_t symbol(LaneStream<true>& stream) const {
    uint32_t bits = __funnelshift_r(stream.low, stream.high, stream.position);
    uint32_t node = 0, length = 0;
    do {
      node = nodes[2 * node + (bits & 1u)];
      bits >>= 1;
      ++length;
    } while (node < kLeaf);
    stream.advance(stream.position + length);
    return node & 0xffu;
  }
  __device__ __forceinline__ void decode(const TreeLane& lane) const {
    LaneStream<true> stream;
    stream.open(shared_address(lane.payload), lane.begin, 0);
    for (int32_t i = 0; i < kLaneWords; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int32_t b = 0; b < 4; ++b) word |= symbol(stream) << 8 * b;
      lane.digits[i * kWarpLanes] = word;
    }
  }
};

template <bool kPairs>
struct TableLookup {
  static constexpr int32_t kWarpBytes = 0, kCopiesLog = 4;
  using Table = SharedTable<kCopiesLog>;
  Table table;

  static TKV_HD int32_t region_bytes(const TreeDecode& call) {
    return table_region_bytes(call.codebook.max_length, kCopiesLog);
  }
  __device__ static void fill(const TreeDecode& call, uint8_t* region) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < region_bytes(call) / 4;
         i += static_cast<int32_t>(blockDim.x)) {
      reinterpret_cast<uint32_t*>(region)[i] = call.codebook.table[i >> kCopiesLog];
    }
  }
  __device__ TableLookup(const TreeDecode& call, const uint8_t* region)
      : table(shared_address(region), table_mask(call.codebook.max_length, kCopiesLog)) {}

  __device__ __forceinline__ void decode(const TreeLane& lane) const {
    LaneStream<true> stream;
    stream.open(shared_address(lane.payload), lane.begin, Table::kBias);
    for (int32_t i = 0; i < kLaneWords; ++i) {
      uint32_t e[4];
      stream.step(table, &e[0], &e[1]);
      if constexpr (kPairs) {  // digits in bits 6-10 and 22-26
        lane.digits[i * kWarpLanes] =
            __byte_perm(e[0] >> 6 & 0x1f001fu, e[1] >> 6 & 0x1f001fu, 0x6420);
      } else {  // a digit in bits 16-23
        stream.step(table, &e[2], &e[3]);
        lane.digits[i * kWarpLanes] =
            __byte_perm(__byte_perm(e[0], e[1], 0x62), __byte_perm(e[2], e[3], 0x62), 0x5410);
      }
    }
  }
};

template <class Decoder>
TKV_HD int32_t tree_decode_warp_bytes(const TreeDecode& call) {
  return call.most_bytes + kTreeDecodeSlack + Decoder::kWarpBytes;
}

// By a CTA of whole warps. shared: the region at a multiple of its size, then the warps.
template <class Decoder>
__device__ __forceinline__ void decode_tree_blocks(const TreeDecode& call, uint8_t* shared) {
  const auto size = static_cast<uint32_t>(Decoder::region_bytes(call));
  const uint32_t start = shared_address(shared);
  uint8_t* const region = shared + ((start + size - 1) / size * size - start);
  Decoder::fill(call, region);
  __syncthreads();
  const Decoder decoder(call, region);
  const auto warp = static_cast<int32_t>(threadIdx.x / 32u);
  const auto warps = static_cast<int32_t>(blockDim.x / 32u);
  uint8_t* const room = region + size + warp * tree_decode_warp_bytes<Decoder>(call);
  uint8_t* const block = room + Decoder::kWarpBytes;
  const auto stride = static_cast<int32_t>(gridDim.x) * warps;
  for (int32_t i = static_cast<int32_t>(blockIdx.x) * warps + warp; i < call.num_blocks;
       i += stride) {
    const uint8_t* const from = call.bytes + int64_t{kBlockAlignment} * call.units[i];
    const auto bytes = static_cast<int32_t>(kBlockAlignment * (call.units[i + 1] - call.units[i]));
    for (int32_t at = 16 * lane_index(); at < bytes; at += 16 * kWarpLanes) {
      copy_async_16(block + at, from + at, true);
    }
    wait_copies();
    __syncwarp();
    const BlockHeader header = load_header(block);
    const BlockLayout layout = block_layout(header);
    const uint32_t above = load_field(block + layout.lengths, lane_index(), header.length_bits);
    const int32_t length = header.least_length + static_cast<int32_t>(above);
    int32_t total;
    const int32_t begin = sum_before(length, &total);
    decoder.decode({block + layout.payload, begin, begin + length, room,
                    call.digits + int64_t{kTreeBlockCodes / 4} * i + lane_index()});
    __syncwarp();
  }
}

}  // namespace tierkv
