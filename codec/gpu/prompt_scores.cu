#include "codec/gpu/prompt_scores.h"

#include <cuda_runtime.h>

#include "codec/gpu/score_takers.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

// One launch: `stationary` rows of one head against the stream of a group.
struct ScoreTask {
  PromptScores p;
  const float* lse;  // significance: in
  float* out;
};

#if TKV_HAS_WGMMA

__device__ RowSource source_of(const PromptScores& p, bool is_query, int32_t start,
                               int32_t num_tokens) {
  const int64_t token = is_query ? p.q_token_stride : p.k_token_stride;
  const int64_t head = is_query ? p.q_head_stride : p.k_head_stride;
  const auto* base = static_cast<const uint8_t*>(is_query ? p.q : p.k);
  return {base + 2 * token * start, 2 * token, 2 * head, num_tokens};
}

// 2^log_heads is at least heads.
__device__ int32_t log_heads(int32_t heads) {
  return 32 - __clz(heads - 1);
}

// ---- shared memory ----

template <int32_t kHeadDim>
struct SharedTiles {
  using Shape = ScoreShape<kHeadDim>;
  uint8_t* base;

  __device__ static SharedTiles find() {
    extern __shared__ uint8_t memory[];
    const uint32_t at = shared_byte_address(memory);
    return {memory + ((at + 1023u) / 1024u * 1024u - at)};
  }
  __device__ uint8_t* stationary() const { return base; }
  __device__ uint8_t* stage(int32_t s) const {
    return base + Shape::kStationaryBytes + s * Shape::kStageBytes;
  }
  __device__ float* scalars(int32_t s) const {
    return reinterpret_cast<float*>(base + Shape::kStationaryBytes +
                                    Shape::kStages * Shape::kStageBytes + s * Shape::kScalarBytes);
  }
  __device__ uint64_t* full(int32_t s) const {
    return reinterpret_cast<uint64_t*>(base + Shape::kBarriers) + s;
  }
  __device__ uint64_t* empty(int32_t s) const { return full(Shape::kStages + s); }
  __device__ uint64_t* stationary_full() const { return full(2 * Shape::kStages); }
};

// ---- the copying warpgroup ----

// lse: [heads, total_tokens] of the sequence's first token, or null where columns have no scalar.
template <int32_t kHeadDim>
__device__ void copy_tiles(const SharedTiles<kHeadDim>& shared, const RowSource& rows,
                           const CtaTile& tile, const RowSource& columns, const StreamShape& stream,
                           const float* lse, int32_t total_tokens) {
  using Shape = ScoreShape<kHeadDim>;
  copy_rows<kHeadDim, Shape::kRows>(rows, shared.stationary(), [&](int32_t row) {
    return make_int2(tile.first_row + row, tile.head);
  });
  arrive_after_copies(shared.stationary_full());
  for (int32_t i = 0; i < stream.tiles(); ++i) {
    const int32_t stage = i % Shape::kStages;
    if (i >= Shape::kStages) wait_barrier(shared.empty(stage), (i / Shape::kStages - 1) % 2);
    copy_rows<kHeadDim, kColumns>(columns, shared.stage(stage), [&](int32_t column) {
      return make_int2(stream.token_of(i, column), stream.head_of(column));
    });
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
  wait_copies();
}

// ---- the multiplying warpgroups ----

// Waits for a tile. The copies were ordinary writes; the tensor cores read through the asynchronous
// proxy.
template <int32_t kHeadDim>
__device__ __forceinline__ const uint8_t* wait_tile(const SharedTiles<kHeadDim>& shared,
                                                    int32_t tile) {
  constexpr int32_t kStages = ScoreShape<kHeadDim>::kStages;
  wait_barrier(shared.full(tile % kStages), tile / kStages % 2);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  return shared.stage(tile % kStages);
}
template <int32_t kHeadDim>
__device__ __forceinline__ void release_tile(const SharedTiles<kHeadDim>& shared, int32_t tile) {
  arrive(shared.empty(tile % ScoreShape<kHeadDim>::kStages));
}

// The two warpgroups start their products in turn, so that one takes scores while the other's
// products run. Barriers 1 and 2 are the turns.
__device__ __forceinline__ void wait_turn(int32_t warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int32_t to_warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + to_warpgroup) : "memory");
}

// Streams all tiles past the warpgroup's rows and gives the taker their scores: take(sub, tile,
// scores, scalars).
template <int32_t kHeadDim, DType kDtype, class Taker>
__device__ __forceinline__ void multiply_tiles(const SharedTiles<kHeadDim>& shared, int32_t tiles,
                                               TileRange needed, Taker* taker) {
  using Shape = ScoreShape<kHeadDim>;
  constexpr int32_t kLast = Shape::kSubTiles - 1;
  const int32_t warpgroup = warpgroup_index();
  const uint8_t* rows = shared.stationary() + warpgroup * Shape::kSubTiles * 64 * 128;
  float scores[Shape::kSubTiles][kScoresPerThread];
  wait_barrier(shared.stationary_full(), 0);
  if (warpgroup == 1) give_turn(0);
  for (int32_t i = 0; i < tiles; ++i) {
    const uint8_t* columns = wait_tile(shared, i);
    const float* scalars = shared.scalars(i % Shape::kStages);
    const bool is_needed = __shfl_sync(kAllLanes, i >= needed.begin && i < needed.end, 0);
    const bool gives_turn = warpgroup == 0 || i + 1 < tiles;
    wait_turn(warpgroup);
    if (is_needed) {
#pragma unroll
      for (int32_t sub = 0; sub < Shape::kSubTiles; ++sub) {
        start_products<kHeadDim, kDtype>(rows + sub * 64 * 128, Shape::kRows * 128, columns,
                                         scores[sub]);
      }
      if (gives_turn) give_turn(1 - warpgroup);
      if constexpr (Shape::kSubTiles == 2) {
        wait_products<1>(scores[0]);
        taker->take(0, i, scores[0], scalars);
      }
      wait_products<0>(scores[kLast]);
      taker->take(kLast, i, scores[kLast], scalars);
    } else if (gives_turn) {
      give_turn(1 - warpgroup);
    }
    release_tile(shared, i);
  }
}
// ---- kernels ----

// Tile, head and sequence of this CTA; false where the sequence has no such tile. Heavy tiles
// first.
__device__ bool find_tile(const PromptScores& p, int32_t rows, bool is_last_heaviest,
                          CtaTile* tile) {
  tile->start = p.starts[blockIdx.y];
  tile->num_tokens = p.starts[blockIdx.y + 1] - tile->start;
  tile->head = static_cast<int32_t>(blockIdx.x);
  const auto index =
      static_cast<int32_t>(is_last_heaviest ? gridDim.z - 1 - blockIdx.z : blockIdx.z);
  tile->first_row = index * rows;
  return tile->first_row < tile->num_tokens;
}

template <int32_t kHeadDim>
__device__ void init_barriers(const SharedTiles<kHeadDim>& shared) {
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < ScoreShape<kHeadDim>::kStages; ++s) {
      init_barrier(shared.full(s), kCopyThreads);
      init_barrier(shared.empty(s), kMathThreads);
    }
    init_barrier(shared.stationary_full(), kCopyThreads);
  }
  __syncthreads();
}
#endif

template <int32_t kHeadDim, DType kDtype>
__global__ void __launch_bounds__(kScoreThreads, 1)
    significance_kernel(const __grid_constant__ ScoreTask task) {
#if TKV_HAS_WGMMA
  using Shape = ScoreShape<kHeadDim>;
  const PromptScores& p = task.p;
  CtaTile tile;
  if (!find_tile(p, Shape::kRows, false, &tile)) return;
  const int32_t heads = p.num_q_heads / p.num_kv_heads;
  const StreamShape stream = {tile.first_row, tile.num_tokens, tile.head * heads, heads,
                              log_heads(heads)};
  const auto shared = SharedTiles<kHeadDim>::find();
  init_barriers(shared);
  if (warpgroup_index() == kMathThreads / 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_tiles(shared, source_of(p, false, tile.start, tile.num_tokens), tile,
               source_of(p, true, tile.start, tile.num_tokens), stream, task.lse, p.total_tokens);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    SignificanceTaker<kHeadDim> taker = {};
    taker.stream = stream;
    taker.num_tokens = tile.num_tokens;
    taker.first_key = tile.first_row + warpgroup_index() * 64 * Shape::kSubTiles;
    taker.scale = static_cast<float>(p.sm_scale);
    multiply_tiles<kHeadDim, kDtype>(shared, stream.tiles(), taker.needed(), &taker);
    taker.finish(tile, p.total_tokens, task.out);
  }
#endif
}

template <int32_t kHeadDim, DType kDtype>
__global__ void __launch_bounds__(kScoreThreads, 1)
    lse_kernel(const __grid_constant__ ScoreTask task) {
#if TKV_HAS_WGMMA
  using Shape = ScoreShape<kHeadDim>;
  const PromptScores& p = task.p;
  CtaTile tile;
  if (!find_tile(p, Shape::kRows, true, &tile)) return;
  const int32_t end = min(tile.first_row + Shape::kRows, tile.num_tokens);
  const StreamShape stream = {0, end, tile.head / (p.num_q_heads / p.num_kv_heads), 1, 0};
  const auto shared = SharedTiles<kHeadDim>::find();
  init_barriers(shared);
  if (warpgroup_index() == kMathThreads / 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_tiles<kHeadDim>(shared, source_of(p, true, tile.start, tile.num_tokens), tile,
                         source_of(p, false, tile.start, tile.num_tokens), stream, nullptr,
                         p.total_tokens);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    LseTaker<kHeadDim> taker = {};
    taker.num_tokens = tile.num_tokens;
    taker.first_query = tile.first_row + warpgroup_index() * 64 * Shape::kSubTiles;
    taker.scale = static_cast<float>(p.sm_scale) * kLog2E;
    for (int32_t i = 0; i < 2 * Shape::kSubTiles; ++i) taker.top[i / 2][i % 2] = -INFINITY;
    multiply_tiles<kHeadDim, kDtype>(shared, stream.tiles(), taker.needed(stream.tiles()), &taker);
    taker.finish(tile, p.total_tokens, task.out);
  }
#endif
}

// ---- launches ----

Status check_device() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (Status s = cuda_status(error, "device attributes"); !s) return s;
  if (major == 9) return Status::ok();
  return Status(StatusCode::kUnsupported, "prompt scores need a device of compute capability 9.0");
}

template <int32_t kHeadDim, DType kDtype>
Status launch(const ScoreTask& task, bool is_lse, GpuStream stream) {
  using Shape = ScoreShape<kHeadDim>;
  const auto kernel = is_lse ? lse_kernel<kHeadDim, kDtype> : significance_kernel<kHeadDim, kDtype>;
  const PromptScores& p = task.p;
  const dim3 grid(is_lse ? p.num_q_heads : p.num_kv_heads, p.num_sequences,
                  (p.max_tokens + Shape::kRows - 1) / Shape::kRows);
  if (Status s =
          cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           Shape::kSharedBytes),
                      "kernel attributes");
      !s) {
    return s;
  }
  kernel<<<grid, kScoreThreads, Shape::kSharedBytes, stream>>>(task);
  return cuda_status(cudaGetLastError(), "prompt scores");
}

template <DType kDtype>
Status launch_head_dim(const ScoreTask& task, bool is_lse, GpuStream stream) {
  switch (task.p.head_dim) {
    case 64:
      return launch<64, kDtype>(task, is_lse, stream);
    case 96:
      return launch<96, kDtype>(task, is_lse, stream);
    case 128:
      return launch<128, kDtype>(task, is_lse, stream);
    default:
      return launch<256, kDtype>(task, is_lse, stream);
  }
}

Status run(const ScoreTask& task, bool is_lse, GpuStream stream) {
  if (Status s = task.p.validate(); !s) return s;
  if (task.p.total_tokens == 0 || task.p.num_sequences == 0) return Status::ok();
  if (task.out == nullptr || (!is_lse && task.lse == nullptr)) {
    return Status(StatusCode::kInvalidArgument, "lse or significance is null");
  }
  if (Status s = check_device(); !s) return s;
  return task.p.dtype == DType::kFloat16 ? launch_head_dim<DType::kFloat16>(task, is_lse, stream)
                                         : launch_head_dim<DType::kBFloat16>(task, is_lse, stream);
}

}  // namespace

Status prompt_significance(const PromptScores& p, const float* lse, float* significance,
                           GpuStream stream) {
  return run({p, lse, significance}, false, stream);
}
Status prompt_lse(const PromptScores& p, float* lse, GpuStream stream) {
  return run({p, nullptr, lse}, true, stream);
}

}  // namespace tierkv
