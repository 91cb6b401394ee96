// SPDX-License-Identifier: Apache-2.0
// Scores by mma.sync, on sm_80 and up: for devices and binaries without wgmma.
//
// Eight warps, as two warpgroups, hold their stationary rows in registers, 16 rows of each sub-tile
// a warp, and multiply them with the stream, which all threads copy to shared memory three stages
// deep. A stage has at most 128 dims of a tile; shared memory stays below 99 KB.
#pragma once

#include "codec/gpu/score_takers.cuh"
#include "codec/gpu/score_tiles.cuh"
#include "gpu/constants.h"
#include "gpu/copies.cuh"
#include "gpu/mma.cuh"

namespace tierkv {

template <int32_t kHeadDim>
struct MmaShape {
  static constexpr int32_t kSubTiles = StationaryRows<kHeadDim>::kSubTiles;
  static constexpr int32_t kRows = StationaryRows<kHeadDim>::kRows;
  static constexpr int32_t kStages = 3;
  static constexpr int32_t kStageDims = kHeadDim > 128 ? 128 : kHeadDim;
  static constexpr int32_t kParts = kHeadDim / kStageDims;  // stages of a tile
  static constexpr int32_t kStageSteps = kStageDims / 16;   // products deep
  static constexpr int32_t kSteps = kHeadDim / 16;
  static constexpr int32_t kPanelBytes = kColumns * 128;
  static constexpr int32_t kRowBytes = (kStageDims + 63) / 64 * kPanelBytes;
  static constexpr int32_t kStageBytes = kRowBytes + kColumns * 4;  // and a float a column
  static constexpr int32_t kSharedBytes = kStages * kStageBytes;
};
static_assert(MmaShape<256>::kSharedBytes <= 99 * 1024);

// Part `part` of all tiles' parts into its stage. lse: [heads, total_tokens], or null where columns
// have no scalar; they come with the last part of a tile.
template <int32_t kHeadDim>
__device__ __forceinline__ void copy_part(uint8_t* shared, RowSource columns,
                                          const StreamShape& stream, const CtaTile& tile,
                                          const float* lse, int32_t total_tokens, int32_t part) {
  using Shape = MmaShape<kHeadDim>;
  const int32_t i = part / Shape::kParts, dims = part % Shape::kParts * Shape::kStageDims;
  uint8_t* stage = shared + part % Shape::kStages * Shape::kStageBytes;
  columns.base += 2 * dims;
  copy_columns<Shape::kStageDims, kMathThreads>(columns, stream, i, stage);
  const auto column = static_cast<int32_t>(threadIdx.x);
  if (lse == nullptr || column >= kColumns || part % Shape::kParts != Shape::kParts - 1) return;
  const int32_t token = stream.token_of(i, column);
  const bool present = token < columns.num_tokens;
  copy_async_4(stage + Shape::kRowBytes + 4 * column,
               lse + (present ? tile.scalar(stream.head_of(column), token, total_tokens) : 0),
               present);
}

// Adds the products of a stage: kStep is the first of its steps.
template <int32_t kHeadDim, DType kDtype, int32_t kStep>
__device__ __forceinline__ void multiply_part(
    const uint8_t* stage, const uint32_t (&a)[MmaShape<kHeadDim>::kSubTiles][kHeadDim / 16][4],
    float (&scores)[MmaShape<kHeadDim>::kSubTiles][kScoresPerThread]) {
  using Shape = MmaShape<kHeadDim>;
  // Matrices 0 and 1 of a load are 8 columns at 8 dims and the next 8; 2 and 3 the next 8 columns.
  const int32_t lane = lane_index(), half = lane / 8 % 2;
  const uint8_t* rows = stage + (lane / 16 * 8 + lane % 8) * 128;
#pragma unroll
  for (int32_t step = 0; step < Shape::kStageSteps; ++step) {
    const uint8_t* piece =
        rows + step / 4 * Shape::kPanelBytes + ((2 * (step % 4) + half) ^ lane % 8) * 16;
#pragma unroll
    for (int32_t pair = 0; pair < kColumns / 16; ++pair) {
      uint32_t b[4];
      load_matrices(b, piece + pair * 16 * 128);
#pragma unroll
      for (int32_t i = 0; i < 2 * Shape::kSubTiles; ++i) {
        const int32_t sub = i / 2, first = 4 * (2 * pair + i % 2);
        float d[4] = {scores[sub][first], scores[sub][first + 1], scores[sub][first + 2],
                      scores[sub][first + 3]};
        if constexpr (kDtype == DType::kBFloat16) {
          mma_m16n8k16_bf16(d, a[sub][kStep + step], b[2 * (i % 2)], b[2 * (i % 2) + 1]);
        } else {
          mma_m16n8k16(d, a[sub][kStep + step], b[2 * (i % 2)], b[2 * (i % 2) + 1]);
        }
#pragma unroll
        for (int32_t k = 0; k < 4; ++k) scores[sub][first + k] = d[k];
      }
    }
  }
}

// Streams all tiles past the CTA's rows and gives the taker those that it needs.
template <int32_t kHeadDim, DType kDtype, class Taker>
__device__ __forceinline__ void multiply_stream(uint8_t* shared, const RowSource& rows,
                                                const CtaTile& tile, const RowSource& columns,
                                                const StreamShape& stream, const float* lse,
                                                int32_t total_tokens, ScoreTiles needed,
                                                Taker* taker) {
  using Shape = MmaShape<kHeadDim>;
  const int32_t parts = stream.tiles() * Shape::kParts;
  const auto start = [&](int32_t part) {
    if (part < parts) {
      copy_part<kHeadDim>(shared, columns, stream, tile, lse, total_tokens, part);
    }
    close_copy_group();  // also an empty one, so that their number is known
  };
#pragma unroll 1
  for (int32_t part = 0; part + 1 < Shape::kStages; ++part) start(part);
  uint32_t a[Shape::kSubTiles][Shape::kSteps][4];
  load_stationary<kHeadDim>(rows, tile, a);
  float scores[Shape::kSubTiles][kScoresPerThread];
#pragma unroll 1
  for (int32_t i = 0; i < stream.tiles(); ++i) {
    const bool is_needed = __shfl_sync(kFullWarp, i >= needed.begin && i < needed.end, 0);
#pragma unroll
    for (int32_t of_tile = 0; of_tile < Shape::kParts; ++of_tile) {
      const int32_t part = i * Shape::kParts + of_tile;
      wait_copies<Shape::kStages - 2>();
      __syncthreads();  // of all threads; and nobody reads the stage that is filled next
      start(part + Shape::kStages - 1);
      if (!is_needed) continue;
      const uint8_t* stage = shared + part % Shape::kStages * Shape::kStageBytes;
      if (of_tile == 0) {
#pragma unroll
        for (int32_t k = 0; k < Shape::kSubTiles * kScoresPerThread; ++k) {
          scores[k / kScoresPerThread][k % kScoresPerThread] = 0.0f;
        }
        multiply_part<kHeadDim, kDtype, 0>(stage, a, scores);
      } else {
        multiply_part<kHeadDim, kDtype, (Shape::kParts - 1) * Shape::kStageSteps>(stage, a, scores);
      }
      if (of_tile != Shape::kParts - 1) continue;
      const auto* scalars = reinterpret_cast<const float*>(stage + Shape::kRowBytes);
#pragma unroll
      for (int32_t sub = 0; sub < Shape::kSubTiles; ++sub) {
        taker->take(sub, i, scores[sub], scalars);
      }
    }
  }
}

// Taker: who takes the scores.
template <class Taker, DType kDtype>
__global__ void __launch_bounds__(kMathThreads, 1)
    mma_scores(const __grid_constant__ ScoreTask task) {
  extern __shared__ __align__(128) uint8_t score_stages[];
  constexpr int32_t kHeadDim = Taker::kDims;
  constexpr bool kRowsAreQueries = Taker::kRowsAreQueries;
  const typename Taker::Work work(task, MmaShape<kHeadDim>::kRows);
  if (work.is_empty()) return;
  work.each([&](const CtaTile& tile, const StreamShape& stream) {
    const SignificanceCall& p = task.p;
    Taker taker(task, tile, stream);
    multiply_stream<kHeadDim, kDtype>(
        score_stages, source_of(p, kRowsAreQueries, tile.start, tile.num_tokens), tile,
        source_of(p, !kRowsAreQueries, tile.start, tile.num_tokens), stream,
        kRowsAreQueries ? nullptr : task.lse, p.total_tokens, taker.needed(tile), &taker);
    taker.finish(tile, p.total_tokens, task.out);
    __syncthreads();  // nobody reads the stages any more
  });
}

}  // namespace tierkv
