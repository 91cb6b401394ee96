// SPDX-License-Identifier: Apache-2.0
// Scores by wgmma, on sm_90a.
//
// A CTA holds two warpgroups that multiply, each with its stationary rows in registers, and one
// that copies rows of the stream to shared memory.
#pragma once

#include "codec/gpu/score_takers.cuh"
#include "codec/gpu/score_tiles.cuh"
#include "gpu/barrier.cuh"
#include "gpu/constants.h"
#include "gpu/copies.cuh"
#include "gpu/shared_memory.cuh"
#include "gpu/wgmma.cuh"

namespace tierkv {

inline constexpr int32_t kCopyThreads = 128;
inline constexpr int32_t kScoreThreads = kMathThreads + kCopyThreads;
// The bound tells the host whether an image holds these kernels' bodies.
inline constexpr int32_t kEmptyBound = 32;
inline constexpr int32_t kWgmmaBound = TKV_HAS_WGMMA ? kScoreThreads : kEmptyBound;

// Shared memory of a CTA, from a base aligned to 1024 bytes.
template <int32_t kHeadDim>
struct ScoreShape {
  static constexpr int32_t kPanels = (kHeadDim + 63) / 64;
  static constexpr int32_t kSubTiles = StationaryRows<kHeadDim>::kSubTiles;
  static constexpr int32_t kSteps = kHeadDim / 16;
  static constexpr int32_t kStages = kHeadDim > 128 ? 3 : 4;
  static constexpr int32_t kStageBytes = kColumns * kPanels * 128;
  static constexpr int32_t kScalarBytes = kColumns * 4;  // one float a column
  static constexpr int32_t kBarriers = kStages * (kStageBytes + kScalarBytes);
  static constexpr int32_t kSharedBytes = kBarriers + 8 * 2 * kStages + 1024;
};

#if TKV_HAS_WGMMA

// d = 64 rows x 128 columns of products over all dims. An operand counts 16 bytes.
template <int32_t kSteps, DType kDtype>
__device__ __forceinline__ void start_products(const uint32_t (&rows)[kSteps][4], uint64_t columns,
                                               float (&d)[kScoresPerThread]) {
  begin_products();
#pragma unroll
  for (int32_t step = 0; step < kSteps; ++step) {
    const int32_t panel = step / 4, byte = step % 4 * 32;
    multiply_step<kDtype>(d, rows[step], columns + (panel * kColumns * 128 + byte) / 16, step > 0);
  }
  commit_products();
}

// ---- shared memory ----

template <int32_t kHeadDim>
struct SharedTiles {
  using Shape = ScoreShape<kHeadDim>;
  uint8_t* base;

  __device__ static SharedTiles find() {
    extern __shared__ uint8_t memory[];
    const uint32_t at = shared_address(memory);
    return {memory + ((at + 1023u) / 1024u * 1024u - at)};
  }
  __device__ uint8_t* stage(int32_t s) const { return base + s * Shape::kStageBytes; }
  __device__ float* scalars(int32_t s) const {
    return reinterpret_cast<float*>(base + Shape::kStages * Shape::kStageBytes +
                                    s * Shape::kScalarBytes);
  }
  __device__ uint64_t* full(int32_t s) const {
    return reinterpret_cast<uint64_t*>(base + Shape::kBarriers) + s;
  }
  __device__ uint64_t* empty(int32_t s) const { return full(Shape::kStages + s); }
};

// ---- the copying warpgroup ----

// Behind `before` tiles of other streams. lse: [heads, total_tokens] of the sequence's first token,
// or null where columns have no scalar.
template <int32_t kHeadDim>
__device__ __forceinline__ void copy_tiles(const SharedTiles<kHeadDim>& shared, int32_t before,
                                           const CtaTile& tile, const RowSource& columns,
                                           const StreamShape& stream, const float* lse,
                                           int32_t total_tokens) {
  using Shape = ScoreShape<kHeadDim>;
  for (int32_t i = 0; i < stream.tiles(); ++i) {
    const int32_t place = before + i, stage = place % Shape::kStages;
    if (place >= Shape::kStages) {
      wait_barrier(shared.empty(stage), (place / Shape::kStages - 1) % 2);
    }
    copy_columns<kHeadDim, kCopyThreads>(columns, stream, i, shared.stage(stage));
    if (lse != nullptr) {
      const int32_t column = static_cast<int32_t>(threadIdx.x) % kCopyThreads;
      const int32_t token = stream.token_of(i, column);
      const bool present = token < columns.num_tokens;
      copy_async_4(shared.scalars(stage) + column,
                   lse + (present ? tile.scalar(stream.head_of(column), token, total_tokens) : 0),
                   present);
    }
    arrive_after_copies(shared.full(stage));
  }
}

// ---- the multiplying warpgroups ----

// Waits for the tile at a place, which counts the tiles of all streams. The copies were ordinary
// writes; the tensor cores read through the asynchronous proxy.
template <int32_t kHeadDim>
__device__ __forceinline__ void wait_tile(const SharedTiles<kHeadDim>& shared, int32_t place) {
  constexpr int32_t kStages = ScoreShape<kHeadDim>::kStages;
  wait_barrier(shared.full(place % kStages), place / kStages % 2);
  fence_shared_writes();
}
template <int32_t kHeadDim>
__device__ __forceinline__ void release_tile(const SharedTiles<kHeadDim>& shared, int32_t place) {
  arrive(shared.empty(place % ScoreShape<kHeadDim>::kStages));
}

// The two warpgroups start their products in turn, so that one takes scores while the other's
// products run. Barriers 1 and 2 are the turns. The first turn is warpgroup 0's; warpgroup 1 gives
// it one for each of its own, of which the last has no tile.
__device__ __forceinline__ void wait_turn(int32_t warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int32_t to_warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + to_warpgroup) : "memory");
}

// Streams all tiles past the warpgroup's rows and gives the taker the scores of those that it
// needs: take(sub, tile, scores, scalars). `before`: tiles of other streams.
template <int32_t kHeadDim, DType kDtype, class Taker>
__device__ __forceinline__ void multiply_tiles(
    const SharedTiles<kHeadDim>& shared,
    const uint32_t (&rows)[ScoreShape<kHeadDim>::kSubTiles][ScoreShape<kHeadDim>::kSteps][4],
    int32_t before, int32_t tiles, ScoreTiles needed, Taker* taker) {
  using Shape = ScoreShape<kHeadDim>;
  constexpr int32_t kLast = Shape::kSubTiles - 1;
  const int32_t warpgroup = warpgroup_index();
  float scores[Shape::kSubTiles][kScoresPerThread];
  const auto wait_for = [&](int32_t i) {
    if (i < tiles) wait_tile(shared, before + i);
  };
  wait_for(0);
  for (int32_t i = 0; i < tiles; ++i) {
    const int32_t stage = (before + i) % Shape::kStages;
    const uint64_t columns = operand(shared.stage(stage));
    const float* scalars = shared.scalars(stage);
    const bool is_needed = __shfl_sync(kFullWarp, i >= needed.begin && i < needed.end, 0);
    wait_turn(warpgroup);
    if (is_needed) {
#pragma unroll
      for (int32_t sub = 0; sub < Shape::kSubTiles; ++sub) {
        start_products<Shape::kSteps, kDtype>(rows[sub], columns, scores[sub]);
      }
      give_turn(1 - warpgroup);
      if constexpr (Shape::kSubTiles == 2) {
        wait_products<1>(scores[0]);
        taker->take(0, i, scores[0], scalars);
      }
      // wait_for() has a loop. Without one here the compiler waits for all products before it takes
      // any score.
      wait_for(i + 1);
      wait_products<0>(scores[kLast]);
      taker->take(kLast, i, scores[kLast], scalars);
    } else {
      give_turn(1 - warpgroup);
      wait_for(i + 1);
    }
    release_tile(shared, before + i);
  }
}

// ---- kernels ----

template <int32_t kHeadDim>
__device__ void init_barriers(const SharedTiles<kHeadDim>& shared) {
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < ScoreShape<kHeadDim>::kStages; ++s) {
      init_barrier(shared.full(s), kCopyThreads);
      init_barrier(shared.empty(s), kMathThreads);
    }
  }
  __syncthreads();
}

#endif

// Taker: who takes the scores.
template <class Taker, DType kDtype>
__global__ void __launch_bounds__(kWgmmaBound, 1)
    wgmma_scores(const __grid_constant__ ScoreTask task) {
#if TKV_HAS_WGMMA
  constexpr int32_t kHeadDim = Taker::kDims;
  constexpr bool kRowsAreQueries = Taker::kRowsAreQueries;
  const typename Taker::Work work(task, StationaryRows<kHeadDim>::kRows);
  if (work.is_empty()) return;
  const SignificanceCall& p = task.p;
  const auto shared = SharedTiles<kHeadDim>::find();
  init_barriers(shared);
  int32_t before = 0;
  if (warpgroup_index() == kMathThreads / 128) {
    give_registers<56>();
    work.each([&](const CtaTile& tile, const StreamShape& stream) {
      copy_tiles(shared, before, tile, source_of(p, !kRowsAreQueries, tile.start, tile.num_tokens),
                 stream, kRowsAreQueries ? nullptr : task.lse, p.total_tokens);
      before += stream.tiles();
    });
    wait_copies();
  } else {
    take_registers<224>();
    if (warpgroup_index() == 1) give_turn(0);
    work.each([&](const CtaTile& tile, const StreamShape& stream) {
      uint32_t rows[ScoreShape<kHeadDim>::kSubTiles][ScoreShape<kHeadDim>::kSteps][4];
      load_stationary<kHeadDim>(source_of(p, kRowsAreQueries, tile.start, tile.num_tokens), tile,
                                rows);
      Taker taker(task, tile, stream);
      multiply_tiles<kHeadDim, kDtype>(shared, rows, before, stream.tiles(), taker.needed(tile),
                                       &taker);
      taker.finish(tile, p.total_tokens, task.out);
      before += stream.tiles();
    });
    if (warpgroup_index() == 0) wait_turn(0);
  }
#endif
}

}  // namespace tierkv
