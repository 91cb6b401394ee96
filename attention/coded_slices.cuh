// The slices of a block, one behind the other, as a warp comes to them: a head_dim of 256 has two.
//
// A block that fits into its slot lies there whole. One that does not has a raw slice: its slices
// are then looked at in memory one at a time, and the coded ones copied by the warp.
#pragma once

#include "attention/coded_ring.cuh"
#include "attention/coded_tile.cuh"

namespace tierkv {

__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}

struct BlockSlices {
  const uint8_t* bytes;  // of the block, in memory
  uint32_t units;        // of all slices; 0 where the reference is wrong
  uint32_t used;         // by the slices before
  bool whole;            // the block is in the slot

  // Block i of the run, whose slot is waited for.
  __device__ __forceinline__ BlockSlices(const CodedAttention& call, const BlockRun& run,
                                         const BlockRing& ring, int32_t i)
      : bytes(run.bytes_of(call, i)),
        units(__shfl_sync(kFullWarp, run.mine.units, i - run.first)),
        used(0),
        whole(units * 16 <= ring.slot_bytes) {}

  // Brings the slice into the slot, or its header where it is larger.
  __device__ __forceinline__ void stage(const BlockRing& ring) const {
    const auto* from = reinterpret_cast<const uint4*>(bytes) + used;
    const uint32_t own = from->w & 0xffffu;
    const uint32_t count = own * 16 <= ring.slot_bytes && own <= units - used ? own : 1;
    __syncwarp();  // what lay there has been read
    for (uint32_t i = threadIdx.x % 32; i < count; i += 32) {
      store_shared_16(ring.slot + 16 * i, from[i]);
    }
    publish_barriers();  // before the lanes read and before the next copy goes there
  }

  // The slice in turn, which is within the block; false: there is none.
  template <int kStreams>
  __device__ __forceinline__ bool open(const BlockRing& ring, const ExpectedHeader& header,
                                       int32_t tokens, OpenBlock* b) const {
    if (used >= units) return false;
    if (!whole) stage(ring);
    const uint32_t at = whole ? 16 * used : 0;
    *b = open_block<kStreams>(ring.slot + at, ring.slot_bytes - at, header, tokens);
    return b->units() <= units - used;
  }
  __device__ __forceinline__ const uint8_t* place() const { return bytes + int64_t{used} * 16; }
  __device__ __forceinline__ void pass(const OpenBlock& b) { used += b.units(); }
  __device__ __forceinline__ bool at_end() const { return used == units; }
};

}  // namespace tierkv
