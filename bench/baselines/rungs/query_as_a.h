// SPDX-License-Identifier: Apache-2.0
// Rung 2's shape: warps, steps and shared memory of a CTA.
#pragma once

#include "bench/baselines/rungs/rung_params.h"

namespace tierkv {

inline constexpr int32_t kCoopWarps = 4;
inline constexpr int32_t kCoopThreads = kCoopWarps * 32;
inline constexpr int32_t kCoopTiles = kCoopWarps;  // of a chunk, one per warp
inline constexpr int32_t kCoopChunks = 2;          // of a step
inline constexpr int32_t kCoopStages = 2;
inline constexpr int32_t kCoopSteps = 3;  // whose chunks are known
inline constexpr int32_t kCoopWarpDims = kRungHeadDim / kCoopWarps;
// Halves; rows lie 4 banks apart.
inline constexpr int32_t kWeightStride = kCoopChunks * kCoopTiles * kTileTokens + 8;

struct alignas(8) CoopChunk {
  const uint8_t* page;
  int32_t tier, tile;
  int32_t tiles, tokens;  // 0 where there is none or its page is stray
};

// Offsets into the dynamic shared memory of a CTA; the stages are before them.
struct CoopShared {
  int32_t chunks;   // CoopChunk [kCoopSteps][kCoopChunks]
  int32_t weights;  // half [8][kWeightStride]
  int32_t maxima;   // float [kCoopWarps][8]
  int32_t sums;     // float [kCoopWarps][8]
  int32_t states;   // SoftmaxState [8]
  int32_t parts;    // float [8][128], in the stages when they are done
  int32_t bytes;
};
TKV_HD constexpr CoopShared coop_shared(int32_t slot_bytes) {
  CoopShared s{};
  const int32_t part_bytes = kRungMaxGroup * kRungHeadDim * 4;
  const int32_t stages = kCoopStages * kCoopChunks * slot_bytes;
  s.chunks = stages > part_bytes ? stages : part_bytes;
  s.weights = s.chunks + ceil_div(kCoopSteps * kCoopChunks * sizeof(CoopChunk), 16) * 16;
  s.maxima = s.weights + kRungMaxGroup * kWeightStride * 2;
  s.sums = s.maxima + kCoopWarps * kRungMaxGroup * 4;
  s.states = s.sums + kCoopWarps * kRungMaxGroup * 4;
  s.bytes = s.states + kRungMaxGroup * 8;
  return s;
}

}  // namespace tierkv
