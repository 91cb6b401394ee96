// SPDX-License-Identifier: Apache-2.0
// How blocks reach a warp of weighted attention, and what it keeps out of its registers meanwhile.
#pragma once

#include "attention/coded/coded_exceptions.cuh"
#include "attention/coded/coded_slot.cuh"
#include "attention/coded/coded_state.cuh"
#include "attention/coded/weighted_block.cuh"
#include "gpu/constants.h"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/local_memory.cuh"

namespace tierkv {

template <int kDimBlocks, class Code>
struct WeightedRun {
  static constexpr int32_t kHeadDim = 16 * kDimBlocks;
  static constexpr int kSlices = (kHeadDim + kSliceDims - 1) / kSliceDims;
  static constexpr int kSliceBlocks = kDimBlocks / kSlices, kSliceDim = kHeadDim / kSlices;
  static constexpr bool kTurns = Code::kTurning != KeyTurning::kNone;
  const CodedAttention& call;
  BlockSlot& slot;
  const CodedKernelParams& params;
  SharedTable<Code::kCopiesLog> key_table;
  bool fits;  // shared memory is as large as it must be
  CodedState<kDimBlocks> state;
  BlockRun run;
  uint32_t turns, means;                 // shared addresses
  LocalMemory<kDimBlocks / 2>& queries;  // see keep_queries()

  // Brings q times a value of a key to log2 units.
  __device__ __forceinline__ float score_scale(int32_t row) const {
    const float scale = call.sm_scale * kLog2E;
    return params.units == nullptr ? scale : scale * params.units[row];
  }

  // tail: shared address of what the warps of the CTA share, then of what each has of its own.
  __device__ __forceinline__ void set_tail(uint32_t tail, int32_t warp) {
    turns = tail;
    means = tail + weighted_turn_bytes(kHeadDim, kTurns) +
            static_cast<uint32_t>(warp) * weighted_warp_bytes(kHeadDim);
    if (fits) store_shared(kept() + kKeptPassed, 0);
  }
  // The turns of places into shared memory, by all threads of the CTA; a barrier follows.
  __device__ __forceinline__ void fill_turns() const {
    const auto* from = reinterpret_cast<const uint4*>(call.weighted.place_turns);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < weighted_turn_bytes(kHeadDim, kTurns) / 16;
         i += blockDim.x) {
      store_shared_16(turns + 16 * i, from[i]);
    }
  }

  // Registers are few while blocks are decoded: what is needed only between blocks lies in shared
  // memory meanwhile.
  struct KeptRow {
    int32_t from, tokens;  // of the row; tokens: see attend_blocks()
    uint32_t passed;       // pairs of blocks, of this row and those before
  };
  // In a KeptRow; after it and 16 bytes each of the run, of the items.
  static constexpr uint32_t kKeptPassed = 8;
  static constexpr uint32_t kKeptOctave = 48, kKeptScale = 52, kKeptIndex = 56;
  __device__ __forceinline__ uint32_t kept() const {
    return means + 2 * kHeadDim;
  }
  __device__ __forceinline__ uint32_t kept_reference() const {
    return kept() + kKeptRowBytes + fresh_lane() * 8;
  }
  // What the warp has passed stays.
  __device__ __forceinline__ void keep_row(int32_t from, int32_t tokens) const {
    store_shared(kept(), static_cast<uint32_t>(from));
    store_shared(kept() + 4, static_cast<uint32_t>(tokens));
  }
  __device__ __forceinline__ KeptRow kept_row() const {
    const uint4 x = load_shared_16(kept());
    return {static_cast<int32_t>(x.x), static_cast<int32_t>(x.y), x.z};
  }
  __device__ __forceinline__ void keep_run() const {
    store_shared_16(kept() + 16,
                    {static_cast<uint32_t>(run.first_block), static_cast<uint32_t>(run.count),
                     static_cast<uint32_t>(run.first), run.neighbours});
    store_shared(kept_reference(), run.mine.offset);
    store_shared(kept_reference() + 4, run.mine.units);
  }
  __device__ __forceinline__ void load_run() {
    const uint4 x = load_shared_16(kept() + 16);
    run.first_block = static_cast<int32_t>(x.x), run.count = static_cast<int32_t>(x.y);
    run.first = static_cast<int32_t>(x.z), run.neighbours = x.w;
    run.mine = {load_shared(kept_reference()), load_shared(kept_reference() + 4)};
  }

  // A warp's one slot holds two blocks where both fit: those of keys from its beginning on, those
  // of values up to its end. So a block of values comes while keys are decoded.
  __device__ __forceinline__ void request(int32_t i) const {
    const uint32_t bytes = run.taken(slot.bytes);
    copy_of_lane(i - run.first, slot.barrier(i),
                 slot.address + (i % 2 == 0 ? 0 : slot.bytes - bytes), run.bytes(call, i), bytes);
  }
  // Asks for the first of `count` blocks of keys and of values. Not 0 where a reference is wrong.
  __device__ __forceinline__ uint32_t begin_blocks(int32_t first, int32_t count) {
    run.first_block = first;
    run.count = 2 * count;
    const uint32_t bad = run.load(call, 0, slot.bytes);
    request(0);
    if (run.fits_next(0)) request(1);
    return bad;
  }
  // Block `used` has been read: asks for those that its place has room for.
  __device__ __forceinline__ void pass_block(int32_t used) {
    __syncwarp();
    load_run();
    const int32_t next = used + 1;
    if (next >= run.count) return;
    if (!run.fits_next(used)) request(next);
    if (next + 1 >= run.count) return;
    if (next + 1 - run.first >= kWarpLanes) {
      state.bad |= run.load(call, next, slot.bytes);
      keep_run();
    }
    if (run.fits_next(next)) request(next + 1);
  }

  // A block in its slot; or, of a block that is larger than the slot, raw slices in memory.
  struct Block {
    WeightedSlice<Code::kStreams> slice[kSlices];
    int32_t exponents[2];  // of tokens lane and lane + 32
    bool coded;            // all slices
    bool valid;
  };

  // passed: pairs of blocks before it.
  __device__ __forceinline__ Block open_block(int32_t i, uint32_t passed,
                                              const ExpectedHeader& expected, int32_t tokens) {
    wait_barrier(slot.barrier(i), passed & 1u);
    const uint8_t* bytes = run.bytes_of(call, i);
    const uint32_t units = __shfl_sync(kFullWarp, run.mine.units, i - run.first);
    const bool whole = units * 16 <= slot.bytes;
    const uint32_t first =
        slot.address +
        (i % 2 == 0 ? 0 : slot.bytes - (whole ? units * 16 : kCodedBlockHeaderBytes));
    Block x;
    x.coded = true, x.valid = units > 0;
    uint32_t used = 0;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const bool there = x.valid && used < units;
      const uint32_t at = first + (whole && there ? 16 * used : 0);
      const uint8_t* memory = bytes + int64_t{there ? used : 0} * 16;
      const uint4 header =
          whole || s == 0 ? load_shared_16(at) : *reinterpret_cast<const uint4*>(memory);
      auto& slice = x.slice[s];
      slice.open(header, at, whole && there ? 16 * (units - used) : 0, expected, tokens);
      used += slice.block.units();
      bool valid = there && used <= units;
      if (valid && !slice.block.coded) valid = slice.open_raw(memory, expected);
      x.valid = valid;
      x.coded &= slice.block.coded;
      if (s == 0 && valid) {
        const auto lane = static_cast<int32_t>(fresh_lane());
        x.exponents[0] = slice.exponent(at, memory, lane);
        x.exponents[1] = slice.exponent(at, memory, lane + 32);
      } else if (!valid) {
        x.exponents[0] = x.exponents[1] = 0;
      }
    }
    x.valid &= used == units;
    state.bad |= static_cast<uint32_t>(!x.valid);
    return x;
  }
  __device__ __forceinline__ void check_exponents(const Block& x, int32_t least, int32_t most) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.bad |= static_cast<uint32_t>(x.exponents[h] < least || x.exponents[h] > most);
    }
  }
};

}  // namespace tierkv
