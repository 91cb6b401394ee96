// SPDX-License-Identifier: Apache-2.0
// The slices of a block, one behind the other, as a warp comes to them: a head_dim of 256 has two.
//
// A block that fits into its slot lies there whole. One that does not has a raw slice: its slices
// are then looked at in memory one at a time, and the coded ones copied by the warp.
#pragma once

#include "attention/coded/coded_raw_blocks.cuh"
#include "attention/coded/coded_ring.cuh"
#include "attention/coded/coded_tile.cuh"
#include "gpu/barrier.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

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

  // Where the header of the slice in turn begins, a shared address; 0: there is no slice.
  __device__ __forceinline__ uint32_t find(const BlockRing& ring) const {
    if (used >= units) return 0;
    if (!whole) stage(ring);
    return ring.slot + (whole ? 16 * used : 0);
  }
  // The slice at `at`; false where it reaches beyond the block.
  template <int kStreams>
  __device__ __forceinline__ bool open(const BlockRing& ring, uint32_t at,
                                       const ExpectedHeader& header, int32_t tokens,
                                       OpenBlock* b) const {
    *b = open_block<kStreams>(at, ring.slot_bytes - (at - ring.slot), header, tokens);
    return b->units() <= units - used;
  }
  __device__ __forceinline__ const uint8_t* place() const { return bytes + int64_t{used} * 16; }
  __device__ __forceinline__ void pass(const OpenBlock& b) { used += b.units(); }
  __device__ __forceinline__ bool at_end() const { return used == units; }
};

// The codebook that a slice names: the first of its family unless it is another's.
template <int kCopiesLog>
struct SliceBook {
  ExpectedHeader header;
  SharedTable<kCopiesLog> table;
  int32_t base = 0;  // less that of the first

  // word: the slice's first.
  __device__ __forceinline__ SliceBook(const ExpectedHeader& first,
                                       const SharedTable<kCopiesLog>& first_table,
                                       const CodedFamily& family, uint32_t table_bytes,
                                       uint32_t word)
      : header(first), table(first_table) {
#pragma unroll 1
    for (int32_t i = 0; i < family.count; ++i) {
      if (family.headers[i].first != word) continue;
      header = family.headers[i];
      table.mask = family.masks[i];
      table.address = first_table.address + (i + 1) * table_bytes;
      base =
          (static_cast<int32_t>(header.second) >> 16) - (static_cast<int32_t>(first.second) >> 16);
    }
  }
  // The base as an A operand of digits.
  __device__ __forceinline__ uint32_t base_halves() const {
    return pack_halves(static_cast<float>(base) / kDigitScale,
                       static_cast<float>(base) / kDigitScale);
  }
};

// What digits of another codebook lack: its base less that of the first, times all q or all p of a
// block. w: a CodedWarp, here and below; base: two halves.
template <int kSlice, class Worker>
__device__ __forceinline__ void score_base(Worker& w, uint32_t base, float (&s)[kItemTiles][4]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
  const uint32_t a[4] = {base, base, base, base};
  float sum[4] = {};
#pragma unroll
  for (int f = kSlice * kBlocks; f < (kSlice + 1) * kBlocks; ++f) {
    mma_m16n8k16(sum, a, w.state.q[f][0], w.state.q[f][1]);
  }
#pragma unroll
  for (int o = 0; o < kItemTiles; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[o][i] += sum[i];
  }
}
template <int kSlice, class Worker>
__device__ __forceinline__ void add_base(Worker& w, uint32_t base,
                                         const uint32_t (&p)[kItemTiles][2]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
  const uint32_t a[4] = {base, base, base, base};
  float sum[4] = {};
#pragma unroll
  for (int o = 0; o < kItemTiles; ++o) mma_m16n8k16(sum, a, p[o][0], p[o][1]);
#pragma unroll
  for (int f = kSlice * kBlocks; f < (kSlice + 1) * kBlocks; ++f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w.state.out[f][i] += sum[i];
  }
}

// Slices from kSlice on: scores of keys, or outputs of values. False where one breaks a rule.
template <int kSlice, class Worker>
__device__ __forceinline__ bool score_slices(Worker& w, BlockSlices& slices, int32_t tokens,
                                             float (&s)[kItemTiles][4]) {
  const uint32_t at = slices.find(w.ring);
  if (at == 0) return false;
  const CodedKernelParams& params = w.params;
  const SliceBook book(params.headers.keys, w.key_table, params.key_family, params.table_bytes,
                       load_shared(at));
  OpenBlock b;
  RawBlock raw;
  if (!slices.open<Worker::Streams::kStreams>(w.ring, at, book.header, tokens, &b)) return false;
  if (b.coded) {
    if (book.base != 0) score_base<kSlice>(w, book.base_halves(), s);
    w.template score_coded<kSlice>(b, book.table, s);
  } else if (open_raw(b, slices.place(), params.headers.keys, &raw)) {
    score_raw<kSlice>(w, b, raw, s);
  } else {
    return false;
  }
  slices.pass(b);
  if constexpr (kSlice + 1 < Worker::kSlices) return score_slices<kSlice + 1>(w, slices, tokens, s);
  return slices.at_end();
}
template <int kSlice, class Worker>
__device__ __forceinline__ bool add_slices(Worker& w, BlockSlices& slices, int32_t tokens,
                                           const uint32_t (&p)[kItemTiles][2]) {
  const uint32_t at = slices.find(w.ring);
  if (at == 0) return false;
  const CodedKernelParams& params = w.params;
  const SliceBook book(params.headers.values, w.value_table, params.value_family,
                       params.table_bytes, load_shared(at));
  OpenBlock b;
  RawBlock raw;
  uint32_t mine[kItemTiles][2];
#pragma unroll
  for (int o = 0; o < kItemTiles; ++o) mine[o][0] = p[o][0], mine[o][1] = p[o][1];
  if (!slices.open<Worker::Streams::kStreams>(w.ring, at, book.header, tokens, &b)) return false;
  if (b.coded) {
    if (book.base != 0) add_base<kSlice>(w, book.base_halves(), p);
    w.template add_coded<kSlice>(b, book.table, mine);
  } else if (open_raw(b, slices.place(), params.headers.values, &raw)) {
    add_raw<kSlice>(w, b, raw, mine);
  } else {
    return false;
  }
  slices.pass(b);
  if constexpr (kSlice + 1 < Worker::kSlices) return add_slices<kSlice + 1>(w, slices, tokens, p);
  return slices.at_end();
}

}  // namespace tierkv
