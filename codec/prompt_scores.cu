#include "codec/prompt_scores.h"

#include <cuda_runtime.h>

#include <string>

#include "codec/score_tiles.cuh"

namespace tierkv {
namespace {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// One launch: `stationary` rows of one head against the stream of a group.
struct ScoreTask {
  PromptScores p;
  const float* lse;  // significance: in
  float* out;
};

// A tile of one sequence, as all warps of the CTA see it.
struct CtaTile {
  int32_t start, num_tokens;  // of the sequence
  int32_t first_row;          // of the stationary tile, in the sequence
  int32_t head;               // of the stationary rows

  __device__ int64_t scalar(int32_t head_index, int32_t token, int32_t total_tokens) const {
    return static_cast<int64_t>(head_index) * total_tokens + start + token;
  }
};

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

#if TKV_HAS_WGMMA

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

// Rows of a thread in the 64 x 128 scores of a sub-tile: g and g + 8; columns 8 c + 2 t + {0, 1}.
__device__ __forceinline__ int32_t thread_row() {
  return static_cast<int32_t>(threadIdx.x) % 128 / 32 * 16 + lane_index() / 4;
}
__device__ __forceinline__ int32_t thread_column() {
  return lane_index() % 4 * 2;
}

// Streams all tiles past the warpgroup's rows. Taker: needs(tile), take(sub, tile, scores,
// scalars).
template <int32_t kHeadDim, DType kDtype, class Taker>
__device__ __forceinline__ void multiply_tiles(const SharedTiles<kHeadDim>& shared, int32_t tiles,
                                               Taker* taker) {
  using Shape = ScoreShape<kHeadDim>;
  const int32_t warpgroup = static_cast<int32_t>(threadIdx.x) / 128;
  const uint8_t* rows = shared.stationary() + warpgroup * Shape::kSubTiles * 64 * 128;
  float scores[Shape::kSubTiles][kScoresPerThread];
  wait_barrier(shared.stationary_full(), 0);
  for (int32_t i = 0; i < tiles; ++i) {
    const int32_t stage = i % Shape::kStages;
    wait_barrier(shared.full(stage), i / Shape::kStages % 2);
    // The copies were ordinary writes; the tensor cores read through the asynchronous proxy.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (taker->needs(i)) {
#pragma unroll
      for (int32_t sub = 0; sub < Shape::kSubTiles; ++sub) {
        start_products<kHeadDim, kDtype>(rows + sub * 64 * 128, Shape::kRows * 128,
                                         shared.stage(stage), scores[sub]);
      }
      if constexpr (Shape::kSubTiles == 2) {
        wait_products<1>(scores[0]);
        taker->take(0, i, scores[0], shared.scalars(stage));
      }
      wait_products<0>(scores[Shape::kSubTiles - 1]);
      taker->take(Shape::kSubTiles - 1, i, scores[Shape::kSubTiles - 1], shared.scalars(stage));
    }
    __syncwarp();
    if (lane_index() == 0) arrive(shared.empty(stage));
  }
}

// ---- significance ----

// Adds to each of the thread's two rows (keys) the maximum over kHeads heads of the probability,
// over the thread's queries.
template <int32_t kHeads, bool kMasked>
__device__ __forceinline__ void add_probabilities(const float (&scores)[kScoresPerThread],
                                                  const float* lse, float scale, int32_t key,
                                                  int32_t first_query, int32_t num_tokens,
                                                  float (&sum)[2]) {
#pragma unroll
  for (int32_t eight = 0; eight < kColumns / 8 / kHeads; ++eight) {
    float top[4];
#pragma unroll
    for (int32_t h = 0; h < kHeads; ++h) {
      const int32_t c = eight * kHeads + h;
      const float2 l = *reinterpret_cast<const float2*>(lse + 8 * c + thread_column());
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float x = __fmaf_rn(scores[4 * c + i], scale, i % 2 == 0 ? -l.x : -l.y);
        top[i] = h == 0 ? x : nan_max(top[i], x);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const float p = exp2_approx(top[i] * kLog2E);
      const int32_t query = first_query + 8 * eight + thread_column() + i % 2;
      const bool counts = !kMasked || (query > key + 8 * (i / 2) && query < num_tokens);
      sum[i / 2] += counts ? p : 0.0f;
    }
  }
}

template <int32_t kHeadDim>
struct SignificanceTaker {
  static constexpr int32_t kSubTiles = ScoreShape<kHeadDim>::kSubTiles;
  StreamShape stream;
  int32_t num_tokens;
  int32_t first_key;  // of the warpgroup
  float scale;
  float sum[kSubTiles][2];

  __device__ __forceinline__ int32_t end_query(int32_t tile) const {
    return stream.begin + (tile + 1) * stream.tokens_per_tile();
  }
  __device__ __forceinline__ bool needs(int32_t tile) const {
    return end_query(tile) - 1 > first_key;
  }
  template <bool kMasked>
  __device__ __forceinline__ void add(int32_t sub, int32_t tile,
                                      const float (&scores)[kScoresPerThread], const float* lse) {
    const int32_t key = first_key + 64 * sub + thread_row();
    const int32_t query = stream.begin + tile * stream.tokens_per_tile();
    switch (stream.log_heads) {
      case 0:
        return add_probabilities<1, kMasked>(scores, lse, scale, key, query, num_tokens, sum[sub]);
      case 1:
        return add_probabilities<2, kMasked>(scores, lse, scale, key, query, num_tokens, sum[sub]);
      case 2:
        return add_probabilities<4, kMasked>(scores, lse, scale, key, query, num_tokens, sum[sub]);
      case 3:
        return add_probabilities<8, kMasked>(scores, lse, scale, key, query, num_tokens, sum[sub]);
      default:
        return add_probabilities<16, kMasked>(scores, lse, scale, key, query, num_tokens, sum[sub]);
    }
  }
  __device__ __forceinline__ void take(int32_t sub, int32_t tile,
                                       const float (&scores)[kScoresPerThread], const float* lse) {
    const int32_t first_query = end_query(tile) - stream.tokens_per_tile();
    if (first_query <= first_key + 64 * sub + 63 || end_query(tile) > num_tokens) {
      add<true>(sub, tile, scores, lse);
    } else {
      add<false>(sub, tile, scores, lse);
    }
  }
  // Joins the four lanes of a row and writes the means.
  __device__ void finish(const CtaTile& tile, int32_t total_tokens, float* out) const {
#pragma unroll
    for (int32_t i = 0; i < 2 * kSubTiles; ++i) {
      float total = sum[i / 2][i % 2];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const int32_t key = first_key + 64 * (i / 2) + thread_row() + 8 * (i % 2);
      if (key >= num_tokens || lane_index() % 4 != 0) continue;
      const auto later = static_cast<float>(num_tokens - 1 - key);
      out[tile.scalar(tile.head, key, total_tokens)] = later == 0.0f ? 0.0f : total / later;
    }
  }
};

// ---- log-sum-exp ----

template <int32_t kHeadDim>
struct LseTaker {
  static constexpr int32_t kSubTiles = ScoreShape<kHeadDim>::kSubTiles;
  int32_t num_tokens;
  int32_t first_query;  // of the warpgroup
  float scale;          // to base 2
  float top[kSubTiles][2], sum[kSubTiles][2];

  __device__ __forceinline__ bool needs(int32_t tile) const {
    return tile * kColumns < first_query + 64 * kSubTiles;
  }
  __device__ __forceinline__ void take(int32_t sub, int32_t tile, float (&scores)[kScoresPerThread],
                                       const float*) {
    const int32_t query = first_query + 64 * sub + thread_row();
    if ((tile + 1) * kColumns > first_query + 64 * sub) {  // keys after a query: masked
#pragma unroll
      for (int32_t i = 0; i < kScoresPerThread; ++i) {
        const int32_t key = tile * kColumns + i / 4 * 8 + thread_column() + i % 2;
        if (key > query + i % 4 / 2 * 8) scores[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int32_t r = 0; r < 2; ++r) {
      float highest = top[sub][r];
#pragma unroll
      for (int32_t i = 0; i < kScoresPerThread; ++i) {
        if (i % 4 / 2 == r) highest = nan_max(highest, scores[i]);
      }
      const float shift = highest == -INFINITY ? 0.0f : highest * scale;
      float total = sum[sub][r] * exp2_approx(__fmaf_rn(top[sub][r], scale, -shift));
#pragma unroll
      for (int32_t i = 0; i < kScoresPerThread; ++i) {
        if (i % 4 / 2 == r) total += exp2_approx(__fmaf_rn(scores[i], scale, -shift));
      }
      top[sub][r] = highest;
      sum[sub][r] = total;
    }
  }
  __device__ void finish(const CtaTile& tile, int32_t total_tokens, float* out) const {
#pragma unroll
    for (int32_t i = 0; i < 2 * kSubTiles; ++i) {
      float highest = top[i / 2][i % 2], total = sum[i / 2][i % 2];
#pragma unroll
      for (int32_t lanes = 1; lanes <= 2; lanes *= 2) {
        const float other = __shfl_xor_sync(kAllLanes, highest, lanes);
        const float other_total = __shfl_xor_sync(kAllLanes, total, lanes);
        const float both = nan_max(highest, other);
        const float shift = both == -INFINITY ? 0.0f : both * scale;
        total = total * exp2_approx(__fmaf_rn(highest, scale, -shift)) +
                other_total * exp2_approx(__fmaf_rn(other, scale, -shift));
        highest = both;
      }
      const int32_t query = first_query + 64 * (i / 2) + thread_row() + 8 * (i % 2);
      if (query >= num_tokens || lane_index() % 4 != 0) continue;
      out[tile.scalar(tile.head, query, total_tokens)] = (highest * scale + log2f(total)) * kLn2;
    }
  }
};
#endif

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

#if TKV_HAS_WGMMA
template <int32_t kHeadDim>
__device__ void init_barriers(const SharedTiles<kHeadDim>& shared) {
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < ScoreShape<kHeadDim>::kStages; ++s) {
      init_barrier(shared.full(s), kCopyThreads);
      init_barrier(shared.empty(s), kMathThreads / 32);
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
  if (threadIdx.x >= kMathThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_tiles(shared, source_of(p, false, tile.start, tile.num_tokens), tile,
               source_of(p, true, tile.start, tile.num_tokens), stream, task.lse, p.total_tokens);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    SignificanceTaker<kHeadDim> taker = {};
    taker.stream = stream;
    taker.num_tokens = tile.num_tokens;
    taker.first_key =
        tile.first_row + static_cast<int32_t>(threadIdx.x) / 128 * 64 * Shape::kSubTiles;
    taker.scale = static_cast<float>(p.sm_scale);
    multiply_tiles<kHeadDim, kDtype>(shared, stream.tiles(), &taker);
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
  if (threadIdx.x >= kMathThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_tiles<kHeadDim>(shared, source_of(p, true, tile.start, tile.num_tokens), tile,
                         source_of(p, false, tile.start, tile.num_tokens), stream, nullptr,
                         p.total_tokens);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    LseTaker<kHeadDim> taker = {};
    taker.num_tokens = tile.num_tokens;
    taker.first_query =
        tile.first_row + static_cast<int32_t>(threadIdx.x) / 128 * 64 * Shape::kSubTiles;
    taker.scale = static_cast<float>(p.sm_scale) * kLog2E;
    for (int32_t i = 0; i < 2 * Shape::kSubTiles; ++i) taker.top[i / 2][i % 2] = -INFINITY;
    multiply_tiles<kHeadDim, kDtype>(shared, stream.tiles(), &taker);
    taker.finish(tile, p.total_tokens, task.out);
  }
#endif
}

// ---- launches ----

Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status::ok();
  return Status(StatusCode::kCuda, std::string(what) + ": " + cudaGetErrorString(error));
}

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
