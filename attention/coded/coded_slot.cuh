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
  uint32_t neighbours;  // bit i: blocks first + i and first + i + 1 fit into a slot together
  CodedBlockRef mine;   // of this lane's block; 0 units where it lies outside its component

  // Not 0 where this lane's reference leads outside the bytes of its component.
  __device__ __forceinline__ uint32_t load(const CodedAttention& call, int32_t begin,
                                           uint32_t slot_bytes) {
    first = begin;
    mine = CodedBlockRef{};
    uint32_t bad = 0;
    const int32_t i = begin + static_cast<int32_t>(threadIdx.x % 32);
    if (i < count) {
      const CodedBlockRef* refs = i % 2 == 0 ? call.keys.blocks : call.values.blocks;
      const int64_t size = i % 2 == 0 ? call.keys.size : call.values.size;
      mine = refs[first_block + i / 2];
      if (mine.units == 0 || (int64_t{mine.offset} + mine.units) * 16 > size) {
        mine = CodedBlockRef{};
        bad = 1;
      }
    }
    const uint32_t bytes = taken(slot_bytes);
    neighbours =
        __ballot_sync(kFullWarp, bytes + __shfl_down_sync(kFullWarp, bytes, 1) <= slot_bytes);
    return bad;
  }
  // Bytes of a slot that this lane's block takes. If the block is larger than the slot, only its
  // header is copied.
  __device__ __forceinline__ uint32_t taken(uint32_t slot_bytes) const {
    return mine.units * 16 > slot_bytes ? kCodedBlockHeaderBytes : mine.units * 16;
  }
  // Whether block i, which is not that of the last lane, and the next fit together.
  __device__ __forceinline__ bool fits_next(int32_t i) const {
    return (neighbours >> (i - first) & 1u) != 0;
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

// A warp's slot and its two barriers, of keys and of values, which take turns. Each ends a phase
// for every pair of blocks.
struct BlockSlot {
  uint32_t address, barriers;  // shared addresses
  uint32_t bytes;

  __device__ __forceinline__ uint32_t barrier(int32_t i) const {
    return barriers + static_cast<uint32_t>(i % 2) * 8;
  }
};

}  // namespace tierkv
