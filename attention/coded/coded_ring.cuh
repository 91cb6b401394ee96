// SPDX-License-Identifier: Apache-2.0
// How blocks reach a warp: their references a lane each, their bytes through a slot in shared
// memory. No other warp is involved.
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

// A warp's slot and its two barriers: blocks are asked for in the order in which they are used.
struct BlockRing {
  static constexpr uint32_t kOtherBarrier = sizeof(uint64_t);  // what differs in its address
  uint32_t slot, barrier;  // shared addresses; barrier: of the block in turn
  uint32_t slot_bytes;
  uint32_t turn = 0;  // blocks used

  __device__ __forceinline__ void wait() const { wait_barrier(barrier, turn >> 1 & 1u); }
  __device__ __forceinline__ void pass() {
    ++turn;
    barrier ^= kOtherBarrier;
  }
};

}  // namespace tierkv
