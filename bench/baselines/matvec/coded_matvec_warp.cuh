// SPDX-License-Identifier: Apache-2.0
// What the warps of both coded products share: how blocks and their units reach them, how a
// fragment is decoded, what makes a block wrong.
#pragma once

#include "attention/coded/coded_exceptions.cuh"
#include "attention/coded/coded_ring.cuh"
#include "attention/coded/coded_tile.cuh"
#include "bench/baselines/coded/coded_tree.cuh"
#include "bench/baselines/matvec/coded_matvec.h"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// What a kernel is launched with: one pass, for at most kCodedColumns columns.
struct MatvecParams {
  CodedMatvec call;  // columns: of this pass, which begin at x and y
  CodedMatvecGrid grid;
  ExpectedHeader header;
  uint32_t mask;        // of the table in shared memory
  int32_t row_columns;  // of a row of x and y
};

// Shared memory that decoding takes beside the slots.
TKV_HD int32_t decoder_region_bytes(const CodedMatvec& call, int32_t copies_log) {
  return call.tree.entries > 0 ? 2 * kMaxSymbols * static_cast<int32_t>(sizeof(uint16_t))
                               : table_region_bytes(call.codebook.max_length, copies_log);
}
// A slot is a block and behind it, at a fixed place, its units.
TKV_HD constexpr int32_t block_unit_bytes(Component component, int32_t head_dim) {
  return 2 * block_unit_count(component, head_dim);
}

// What a lane decodes with: a table, or the tree of codes of kSingle.
template <class Code>
struct Decoding {
  using Table = SharedTable<Code::kCopiesLog>;
  using Streams = LaneCodes<Code>;
};
struct TreeCode : BlockCode<BlockMode::kSingle, 1, 0> {};
struct TreeStreams : LaneCodes<TreeCode> {
  __device__ __forceinline__ void fragment(const TreeWalk& walk, uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int32_t first = walk.symbol(stream[0]), second = walk.symbol(stream[0]);
      a[r] = pack_halves(static_cast<float>(first) / kDigitScale,
                         static_cast<float>(second) / kDigitScale);
    }
  }
};
template <>
struct Decoding<TreeCode> {
  using Table = TreeWalk;
  using Streams = TreeStreams;
};

// A run of blocks of a row: the references of 32 of them, a lane each. The lane that holds a
// reference asks for the block.
struct MatvecRun {
  int32_t first_block;  // in the directory
  int32_t count;
  int32_t first;       // the block of lane 0
  CodedBlockRef mine;  // of this lane's block; 0 units where it lies outside the bytes

  __device__ __forceinline__ void load(const CodedMatvec& call, int32_t begin) {
    first = begin;
    mine = CodedBlockRef{};
    const int32_t i = begin + static_cast<int32_t>(threadIdx.x % 32);
    if (i >= count) return;
    const CodedBlockRef ref = call.blocks[first_block + i];
    if ((int64_t{ref.offset} + ref.units) * kBlockAlignment <= call.size) mine = ref;
  }
  // Block i, one of the 32: 0 units where its reference is wrong; the same in all lanes.
  __device__ __forceinline__ CodedBlockRef ref(int32_t i) const {
    return {__shfl_sync(kFullWarp, mine.offset, i - first),
            __shfl_sync(kFullWarp, mine.units, i - first)};
  }
};

// The blocks of a run, one after the other.
template <int kDimBlocks, class CodeOfBlocks>
struct MatvecBlocks {
  using Code = CodeOfBlocks;
  static constexpr int32_t kHeadDim = 16 * kDimBlocks;
  const MatvecParams& params;
  BlockRing& ring;
  typename Decoding<Code>::Table table;
  uint32_t unit_bytes;
  MatvecRun run;
  uint32_t bad;  // not 0: the block breaks a rule
  RawBlock raw;  // where the block is not coded

  // Asks for block i, if it is the run's, in the slot in turn.
  __device__ __forceinline__ void request(int32_t i) {
    const CodedMatvec& call = params.call;
    const int64_t block = run.first_block + i;
    // A block that is larger than a slot brings its header only.
    const uint32_t bytes = run.mine.units * kBlockAlignment;
    const LanePiece codes{ring.slot, call.bytes + int64_t{run.mine.offset} * kBlockAlignment,
                          bytes > ring.slot_bytes ? kCodedBlockHeaderBytes : bytes};
    const LanePiece units{ring.slot + ring.slot_bytes,
                          reinterpret_cast<const uint8_t*>(call.units) + block * unit_bytes,
                          unit_bytes};
    copy_two_of_lane(i - run.first, ring.barrier, codes, units);
  }
  __device__ __forceinline__ void begin(int32_t first_block, int32_t count) {
    run.first_block = first_block;
    run.count = count;
    run.load(params.call, 0);
#pragma unroll 1
    for (int32_t i = 0; i < ring.slots; ++i) {
      if (i < count) request(i);
      ring.swap();
    }
    // An even number of slots is back at the first one; so is one slot.
  }
  // The slot of block i is free: the block `slots` after it takes its place.
  __device__ __forceinline__ void next(int32_t i) {
    __syncwarp();
    const int32_t wanted = i + ring.slots;
    if (wanted < run.count) {
      if (wanted == run.first + 32) run.load(params.call, i + 1);
      request(wanted);
    }
    ring.pass();
  }

  // Block i in its slot. Where it is not coded, `raw` is set, or bad.
  __device__ __forceinline__ OpenBlock open(int32_t i, int32_t tokens) {
    ring.wait();
    const OpenBlock b =
        open_block<Code::kStreams>(ring.slot, ring.slot_bytes, params.header, tokens);
    const CodedBlockRef ref = run.ref(i);
    bad = static_cast<uint32_t>(ref.units == 0) | (ref.units ^ b.units());
    if (b.coded) return b;
    const uint8_t* from = params.call.bytes + int64_t{ref.offset} * kBlockAlignment;
    if (bad == 0 && !open_raw(b, from, params.header, &raw)) bad = 1;
    return b;
  }
  // A word of two units, of the steps or, `n` halves on, of the lows.
  __device__ __forceinline__ uint32_t unit_word(int32_t first, int32_t n = 0) const {
    return load_shared(ring.slot + ring.slot_bytes + 2 * static_cast<uint32_t>(first + n));
  }
  __device__ __forceinline__ float base() const {
    return static_cast<float>(params.call.codebook.base);
  }
};

__device__ __forceinline__ uint32_t multiply_half_pairs(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// The exponent of a positive number; -127 of a subnormal one.
__device__ __forceinline__ int32_t exponent_of(float x) {
  return static_cast<int32_t>(__float_as_uint(x) >> 23 & 255u) - 127;
}
// The largest of the four lanes of a column.
__device__ __forceinline__ float column_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

}  // namespace tierkv
