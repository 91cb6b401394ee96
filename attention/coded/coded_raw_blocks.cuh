// What a warp does with raw blocks. w: a CodedWarp.
//
// Among coded blocks they are rare: their code is short, not fast, and reads them from memory. In a
// call that has no others they come from their slots, bound by memory: a fragment is 7 masks and
// shifts beside its product.
#pragma once

#include "attention/coded/coded_raw.cuh"
#include "attention/coded/coded_ring.cuh"
#include "attention/coded/coded_tile.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/mma.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// Where the tiles of a raw block begin in its slot; null where they are in memory only.
template <class Worker>
__device__ __forceinline__ const uint8_t* tiles_in_slot(const Worker& w, const OpenBlock& b) {
  const uint32_t tiles = Worker::Streams::start_of(b, 0), block = tiles - kCodedBlockHeaderBytes;
  if (block - w.ring.slot + b.units() * kBlockAlignment > w.ring.slot_bytes) return nullptr;
  return shared_pointer(tiles);
}

// visit(words) with a lane's words of `bits`; false where raw blocks so wide are not for slots.
template <int32_t kDims, class Visit>
__device__ __forceinline__ bool with_raw_words(int32_t bits, const Visit& visit) {
  if (bits == 2) {
    visit(RawWords<2, kDims>());
  } else if (bits == 4) {
    visit(RawWords<4, kDims>());
  } else if (bits == 8) {
    visit(RawWords<8, kDims>());
  } else {
    return false;
  }
  return true;
}

// Sums of B operands first .. first + count - 1 over what is contracted, of columns 2t and 2t + 1,
// twice.
template <int kCount>
__device__ __forceinline__ void sum_operands(const uint32_t (&b)[kCount][2], int first, int count,
                                             float (&sum)[4]) {
  constexpr uint32_t ones[4] = {kOneHalves, kOneHalves, kOneHalves, kOneHalves};
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < count; ++i) mma_m16n8k16(sum, ones, b[first + i][0], b[first + i][1]);
}

// Scores of keys, added to s; false where the block has to be read from memory. Here and below: of
// the call without coded blocks.
template <int kSlice, class Worker>
__device__ __forceinline__ bool score_raw_slot(Worker& w, const OpenBlock& b, const RawBlock& raw,
                                               float (&s)[kItemTiles][4]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
  const uint8_t* tiles = tiles_in_slot(w, b);
  if (tiles == nullptr) return false;
  return with_raw_words<Worker::kSliceDim>(raw.bits, [&](auto words) {
    const float base = static_cast<float>(raw.base) / kDigitScale;
    float sum[4];
    sum_operands(w.state.q, kSlice * kBlocks, kBlocks, sum);
#pragma unroll 1
    for (int o = 0; o < kItemTiles; ++o) {
      float tile[4];
      Worker::begin_tile(s, tile);
      if (o < tile_count(b.tokens)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[i] = fmaf(base, sum[i], tile[i]);
        words.load(tiles + o * words.kTile.bytes(), static_cast<int32_t>(fresh_lane()));
#pragma unroll
        for (int f = 0; f < kBlocks; ++f) {
          uint32_t a[4];
          words.template digits<Component::kKey>(f, a);
          const uint32_t(&q)[2] = w.state.q[kSlice * kBlocks + f];
          mma_m16n8k16(tile, a, q[0], q[1]);
        }
      }
      push_tile(s, tile);
    }
  });
}

// Outputs of values; uses p up unless it is false, where the block has to be read from memory.
template <int kSlice, class Worker>
__device__ __forceinline__ bool add_raw_slot(Worker& w, const OpenBlock& b, const RawBlock& raw,
                                             uint32_t (&p)[kItemTiles][2]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
  const uint8_t* tiles = tiles_in_slot(w, b);
  if (tiles == nullptr) return false;
  return with_raw_words<Worker::kSliceDim>(raw.bits, [&](auto words) {
    const float base = static_cast<float>(raw.base) / kDigitScale;
    float sum[4];
    sum_operands(p, 0, kItemTiles, sum);
#pragma unroll
    for (int f = 0; f < kBlocks; ++f) {
      float(&out)[4] = w.state.out[kSlice * kBlocks + f];
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = fmaf(base, sum[i], out[i]);
    }
#pragma unroll 1
    for (int o = 0; o < tile_count(b.tokens); ++o) {
      words.load(tiles + o * words.kTile.bytes(), static_cast<int32_t>(fresh_lane()));
#pragma unroll
      for (int f = 0; f < kBlocks; ++f) {
        uint32_t a[4];
        words.template digits<Component::kValue>(f, a);
        mma_m16n8k16(w.state.out[kSlice * kBlocks + f], a, p[0][0], p[0][1]);
      }
      shift_tiles(p);
    }
  });
}

// Scores of the keys of a raw block, added to s.
template <int kSlice, class Worker>
__device__ __forceinline__ void score_raw(Worker& w, const OpenBlock& b, const RawBlock& raw,
                                          float (&s)[kItemTiles][4]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
  if constexpr (Worker::kIsRaw) {
    if (score_raw_slot<kSlice>(w, b, raw, s)) return;
  }
#pragma unroll 1
  for (int o = 0; o < kItemTiles; ++o) {
    float tile[4];
    Worker::begin_tile(s, tile);
#pragma unroll 1
    for (int f = 0; f < kBlocks && o < tile_count(b.tokens); ++f) {
      uint32_t a[4], q[2] = {0, 0};
#pragma unroll
      for (int z = 0; z < kBlocks; ++z) {
        const uint32_t(&of_slice)[2] = w.state.q[kSlice * kBlocks + z];
        if (z == f) q[0] = of_slice[0], q[1] = of_slice[1];
      }
      raw_fragment(raw, Worker::kSliceDim, Component::kKey, o, f, a);
      mma_m16n8k16(tile, a, q[0], q[1]);
    }
    push_tile(s, tile);
  }
}
// Outputs of the values of one; uses p up.
template <int kSlice, class Worker>
__device__ __forceinline__ void add_raw(Worker& w, const OpenBlock& b, const RawBlock& raw,
                                        uint32_t (&p)[kItemTiles][2]) {
  constexpr int kBlocks = Worker::kSliceBlocks;
  if constexpr (Worker::kIsRaw) {
    if (add_raw_slot<kSlice>(w, b, raw, p)) return;
  }
#pragma unroll 1
  for (int o = 0; o < tile_count(b.tokens); ++o) {
#pragma unroll 1
    for (int f = 0; f < kBlocks; ++f) {
      uint32_t a[4];
      float sum[4] = {};
      raw_fragment(raw, Worker::kSliceDim, Component::kValue, o, f, a);
      mma_m16n8k16(sum, a, p[0][0], p[0][1]);
#pragma unroll
      for (int z = 0; z < kBlocks; ++z) {
        float(&out)[4] = w.state.out[kSlice * kBlocks + z];
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] += z == f ? sum[j] : 0.0f;
      }
    }
    shift_tiles(p);
  }
}

}  // namespace tierkv
