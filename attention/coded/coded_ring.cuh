// SPDX-License-Identifier: Apache-2.0
// How blocks reach a warp: their references a lane each, their bytes through a ring of slots in
// shared memory. No other warp is involved.
#pragma once

#include "attention/coded/coded_attention.h"
#include "attention/coded/coded_shared.h"
#include "gpu/barrier.cuh"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// A run of a row's blocks in the order of use (keys, values, keys, ...): the references of 32 of
// them, a lane each. The lane that holds a reference asks for the block.
struct BlockRun {
  int32_t first_block;  // in the directories
  int32_t count;        // blocks in all, keys and values
  int32_t first;        // the block of lane 0
  CodedBlockRef mine;   // of this lane's block; 0 units where it lies outside its component

  // Not 0 where this lane's reference leads outside the bytes of its component.
  __device__ __forceinline__ uint32_t load(const CodedAttention& call, int32_t begin) {
    first = begin;
    mine = CodedBlockRef{};
    const int32_t i = begin + static_cast<int32_t>(threadIdx.x % 32);
    if (i >= count) return 0;
    const CodedBlockRef* refs = i % 2 == 0 ? call.keys.blocks : call.values.blocks;
    const int64_t size = i % 2 == 0 ? call.keys.size : call.values.size;
    mine = refs[first_block + i / 2];
    if (mine.units > 0 && (int64_t{mine.offset} + mine.units) * 16 <= size) return 0;
    mine = CodedBlockRef{};
    return 1;
  }
  // Whether this lane holds the reference of block i; i is one of the 32.
  __device__ __forceinline__ bool holds(int32_t i) const {
    return static_cast<int32_t>(threadIdx.x % 32) == i - first;
  }
  // Block i in memory, if this lane holds its reference.
  __device__ __forceinline__ const uint8_t* bytes(const CodedAttention& call, int32_t i) const {
    return (i % 2 == 0 ? call.keys.bytes : call.values.bytes) + int64_t{mine.offset} * 16;
  }
  // The same in all lanes.
  __device__ __forceinline__ const uint8_t* bytes_of(const CodedAttention& call, int32_t i) const {
    const uint32_t offset = __shfl_sync(kFullWarp, mine.offset, i - first);
    return (i % 2 == 0 ? call.keys.bytes : call.values.bytes) + int64_t{offset} * 16;
  }
};

// A warp's ring of one or two slots: blocks are asked for in the order in which they are used.
struct BlockRing {
  uint32_t slot, barrier;         // shared addresses of the slot in turn
  uint32_t other, other_barrier;  // what differs in those of the other slot; 0 with one slot
  uint32_t slot_bytes;
  int32_t slots;
  uint32_t turn = 0;  // blocks used

  __device__ __forceinline__ void request(const CodedAttention& call, const BlockRun& run,
                                          int32_t i) const {
    // A block that is larger than a slot brings its header only.
    const uint32_t bytes = run.mine.units * 16;
    copy_of_lane(i - run.first, barrier, slot, run.bytes(call, i),
                 bytes > slot_bytes ? kCodedBlockHeaderBytes : bytes);
  }
  __device__ __forceinline__ void wait() const { wait_barrier(barrier, turn >> (slots - 1) & 1u); }
  __device__ __forceinline__ void swap() { slot ^= other, barrier ^= other_barrier; }
  __device__ __forceinline__ void pass() {
    ++turn;
    swap();
  }
};

// This warp's ring: its slots and barriers follow those of the warps before. block_bytes: of a slot
// of slot_bytes.
__device__ __forceinline__ BlockRing warp_ring(const CodedSharedLayout& layout,
                                               const uint64_t* barriers, uint32_t slot_bytes,
                                               uint32_t block_bytes, int32_t slots) {
  const auto first_slot = static_cast<uint32_t>(static_cast<int32_t>(threadIdx.x / 32) * slots);
  const uint32_t slot = layout.slot(first_slot, slot_bytes);
  const bool two = slots == 2;
  return {slot,
          shared_address(barriers),
          two ? slot ^ layout.slot(first_slot + 1, slot_bytes) : 0,
          two ? static_cast<uint32_t>(sizeof(uint64_t)) : 0,
          block_bytes,
          slots};
}

}  // namespace tierkv
