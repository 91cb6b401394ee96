// How blocks reach a warp: their references a lane each, their bytes through a ring of slots in
// shared memory. No other warp is involved.
#pragma once

#include "attention/coded_attention.h"
#include "attention/coded_shared.h"
#include "attention/ptx.cuh"

namespace tierkv {

// The references of a run of blocks, in the order of use (keys, values, keys, ...), a lane each: no
// copy waits for one.
struct RefWindow {
  const CodedBlockRef* keys;
  const CodedBlockRef* values;
  int32_t count;  // references in all
  int32_t first = 0;
  CodedBlockRef mine;

  __device__ __forceinline__ void load(int32_t from) {
    first = from;
    const int32_t i = from + static_cast<int32_t>(threadIdx.x % 32);
    mine = i >= count ? CodedBlockRef{} : i % 2 == 0 ? keys[i / 2] : values[i / 2];
  }
  // By the whole warp; i may be less than the one before by at most 2, slots_per_warp.
  __device__ __forceinline__ CodedBlockRef get(int32_t i) const {
    CodedBlockRef ref;
    ref.offset = __shfl_sync(kFullWarp, mine.offset, i - first);
    ref.units = __shfl_sync(kFullWarp, mine.units, i - first);
    return ref;
  }
};

// A warp's ring: blocks are asked for in the order in which they are used.
struct BlockRing {
  const CodedSharedLayout& layout;
  const CodedAttentionGrid& grid;
  uint64_t* barriers;   // of this warp
  uint32_t first_slot;  // of this warp
  int32_t slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t address(int32_t i) const {
    return layout.slot(first_slot + static_cast<uint32_t>(i),
                       static_cast<uint32_t>(grid.slot_bytes));
  }
  // A block that is larger than a slot brings its header only; nothing where the reference leads
  // outside the bytes.
  __device__ __forceinline__ void request(const CodedComponent& c, CodedBlockRef ref, int32_t i) {
    const int64_t from = int64_t{ref.offset} * 16, bytes = int64_t{ref.units} * 16;
    const bool inside = ref.units > 0 && from + bytes <= c.size;
    CopyPieces pieces;
    pieces.count = inside ? 1 : 0;
    pieces.total = !inside ? 0 : bytes > grid.slot_bytes ? 16 : static_cast<uint32_t>(bytes);
    pieces.piece[0] = {static_cast<uint8_t*>(__cvta_shared_to_generic(address(i))), c.bytes + from,
                       pieces.total};
    copy_pieces(barriers + i, pieces);
  }
  __device__ __forceinline__ void wait() { wait_barrier(barriers + slot, parity); }
  __device__ __forceinline__ void pass() {
    if (++slot == grid.slots_per_warp) slot = 0, parity ^= 1;
  }
};

}  // namespace tierkv
