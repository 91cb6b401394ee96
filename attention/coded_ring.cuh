// How blocks reach a warp: their references a lane each, their bytes through a ring of slots in
// shared memory. No other warp is involved.
#pragma once

#include "attention/coded_attention.h"
#include "attention/coded_shared.h"
#include "attention/ptx.cuh"

namespace tierkv {

// A run of a row's blocks in the order of use (keys, values, keys, ...): the references of 32 of
// them, a lane each. The lane that holds a reference asks for the block.
struct BlockRun {
  const CodedBlockRef* keys;
  const CodedBlockRef* values;
  int32_t count;  // blocks in all
  int32_t first;  // the block of lane 0
  const uint8_t* from;
  uint32_t units;   // of this lane's block
  uint32_t copied;  // bytes of it that fit into a slot, else its header's; 0 where it lies outside

  // Not 0 where this lane's reference leads outside the bytes of its component.
  __device__ __forceinline__ uint32_t load(const CodedAttention& call, int32_t begin,
                                           uint32_t slot_bytes) {
    first = begin;
    units = copied = 0;
    from = nullptr;
    const int32_t i = begin + static_cast<int32_t>(threadIdx.x % 32);
    if (i >= count) return 0;
    const CodedBlockRef ref = i % 2 == 0 ? keys[i / 2] : values[i / 2];
    const int64_t size = i % 2 == 0 ? call.keys.size : call.values.size;
    const int64_t at = int64_t{ref.offset} * 16, bytes = int64_t{ref.units} * 16;
    if (ref.units == 0 || at + bytes > size) return 1;
    from = (i % 2 == 0 ? call.keys.bytes : call.values.bytes) + at;
    units = ref.units;
    copied = bytes > slot_bytes ? kCodedBlockHeaderBytes : static_cast<uint32_t>(bytes);
    return 0;
  }
  // Whether this lane holds the reference of block i; i is one of the 32.
  __device__ __forceinline__ bool holds(int32_t i) const {
    return static_cast<int32_t>(threadIdx.x % 32) == i - first;
  }
  __device__ __forceinline__ const uint8_t* bytes_of(int32_t i) const {
    const auto address = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(from));
    return reinterpret_cast<const uint8_t*>(
        static_cast<uintptr_t>(__shfl_sync(kFullWarp, address, i - first)));
  }
};

// A warp's ring of one or two slots: blocks are asked for in the order in which they are used.
struct BlockRing {
  uint64_t* barriers;  // of this warp
  uint32_t address[2];
  uint32_t slot_bytes;
  int32_t slots;
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t current() const {
    return slot == 0 ? address[0] : address[1];
  }
  __device__ __forceinline__ void request(const BlockRun& run, int32_t i, int32_t to) {
    const uint32_t at = to == 0 ? address[0] : address[1];
    copy_piece_of(i - run.first, barriers + to,
                  {static_cast<uint8_t*>(__cvta_shared_to_generic(at)), run.from, run.copied});
  }
  __device__ __forceinline__ void wait() const { wait_barrier(barriers + slot, parity); }
  __device__ __forceinline__ void pass() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

}  // namespace tierkv
