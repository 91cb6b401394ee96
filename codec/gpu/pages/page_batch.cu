#include <cuda_runtime.h>

#include <algorithm>

#include "codec/gpu/pages/page_batch.h"
#include "codec/gpu/pages/tile_decode.cuh"
#include "codec/gpu/pages/tile_encode.cuh"
#include "gpu/copies.cuh"
#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

constexpr int32_t kMaxWarps = 4;   // of a CTA
constexpr int32_t kCtasPerSm = 6;  // what shared memory admits for fp16 of head_dim 128

__device__ void report(const PageBatch& b, const PageJob& job, StatusCode code) {
  const int32_t row = job.row >= 0 && job.row < b.num_rows ? job.row : 0;
  atomicMax(reinterpret_cast<int32_t*>(b.status) + row, static_cast<int32_t>(code));
}

// The tile of this warp: one each. (A loop over tiles would be hoisted empty by the compiler: the
// addresses of all formats fill the registers.)
struct Item {
  int64_t job;
  int32_t tile;
};
__device__ bool find_item(const PageBatch& b, int32_t max_tiles, Item* item) {
  const int32_t jobs = b.num_used == nullptr ? b.num_jobs : min(*b.num_used, b.num_jobs);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  item->job = i / max_tiles;
  item->tile = static_cast<int32_t>(i % max_tiles);
  return item->job < jobs;
}

// False for a job that is not to be done; what is wrong with it is reported by its first tile.
__device__ bool is_sound(const PageBatch& b, const PageJob& job, int32_t tile) {
  const StatusCode code = check_job(b, job);
  if (code == StatusCode::kOk) return true;
  if (tile == 0 && lane_index() == 0) report(b, job, code);
  return false;
}

__device__ uint8_t* page_bytes(const PageBatch& b, const PageJob& job) {
  return b.pool.base + job.page * b.pool.page_bytes;
}

__device__ TileTask tile_task(const PageBatch& b, const PageJob& job, int32_t tile, Component c,
                              const StageShape& shape, uint8_t* stage) {
  const PageLayout& layout = b.formats.layout[job.format];
  const int32_t index = static_cast<int32_t>(c);
  uint8_t* page = page_bytes(b, job);
  return {
      stage + index * shape.component_bytes,
      shape.pitch,
      reinterpret_cast<CodeMaker*>(stage + 2 * shape.component_bytes + index * shape.maker_bytes),
      page + layout.tile_codes_byte(c, tile),
      page + layout.tile_metadata_byte(c, tile),
      layout.tile(c),
      layout.groups(c),
      b.formats.raw_dtype,
      max(job.first_slot - tile * kTileTokens, 0)};
}

// Lane i: score and position of slot i of the tile.
struct SlotScalars {
  float score;
  int32_t position;
};

__device__ SlotScalars load_scalars(const PageEncode& e, const PageJob& job, TileTokens* t) {
  SlotScalars s = {kNoScore, kNoPosition};
  if (t->token < 0 || !e.batch.formats.layout[job.format].has_records()) return s;
  s.score = e.scores[job.scalars + t->token];
  s.position =
      e.positions == nullptr ? static_cast<int32_t>(t->token) : e.positions[job.scalars + t->token];
  if (s.position < 0) t->code = StatusCode::kInvalidArgument;
  if (!is_finite(s.score)) t->code = StatusCode::kNonFinite;
  return s;
}

// prepare_tile() by the rule of the job's format.
template <DType kDtype, Component kComponent, bool kHasNorm>
__device__ __forceinline__ StatusCode prepare_component(const PageBatch& b, const PageJob& job,
                                                        const TileTask* task) {
  if constexpr (kHasNorm) {
    if (b.formats.rule_of(job.format, kComponent) == StepRule::kNorm) {
      return prepare_tile<kDtype, kComponent, StepRule::kNorm>(task);
    }
  }
  return prepare_tile<kDtype, kComponent>(task);
}

template <DType kDtype, bool kHasNorm>
__device__ void encode_tile(const PageEncode& e, const PageJob& job, int32_t tile,
                            const StageShape& shape, uint8_t* stage) {
  const PageBatch& b = e.batch;
  TileTokens t = tile_tokens(b, job, tile);
  if (t.begin >= t.end) return;
  stage_rows(e, job, t, shape, stage);
  const SlotScalars scalars = load_scalars(e, job, &t);
  auto* task = reinterpret_cast<TileTask*>(stage + shape.warp_bytes) - 2;
  if (packing_lane() < 2) {
    const auto c = static_cast<Component>(packing_lane());
    task[packing_lane()] = tile_task(b, job, tile, c, shape, stage);
  }
  wait_copies();
  __syncwarp();
  StatusCode code =
      greater(t.code, prepare_component<kDtype, Component::kKey, kHasNorm>(b, job, task));
  code = greater(code, prepare_component<kDtype, Component::kValue, kHasNorm>(b, job, task + 1));
  code = worst_of_warp(code);
  if (code != StatusCode::kOk) {
    if (packing_lane() == 0) report(b, job, code);
    return;
  }
  write_tile<kDtype, Component::kKey>(task);
  write_tile<kDtype, Component::kValue>(task + 1);
  const int32_t slot = packing_lane();
  if (slot < t.begin || slot >= kTileTokens) return;
  const PageLayout& layout = b.formats.layout[job.format];
  if (!layout.has_records()) return;
  uint8_t* page = page_bytes(b, job);
  const int32_t page_slot = tile * kTileTokens + slot;
  *reinterpret_cast<float*>(page + layout.score_byte(page_slot)) = scalars.score;
  *reinterpret_cast<int32_t*>(page + layout.position_byte(page_slot)) = scalars.position;
}

template <DType kDtype, bool kHasNorm>
__global__ void __launch_bounds__(kMaxWarps * 32, kCtasPerSm)
    encode_kernel(const __grid_constant__ PageEncode e, const StageShape shape,
                  const int32_t max_tiles) {
  extern __shared__ __align__(16) uint8_t shared[];
  uint8_t* stage = shared + threadIdx.x / 32 * shape.warp_bytes;
  Item item;
  if (!find_item(e.batch, max_tiles, &item)) return;
  const PageJob job = e.batch.jobs[item.job];
  if (!is_sound(e.batch, job, item.tile)) return;
  encode_tile<kDtype, kHasNorm>(e, job, item.tile, shape, stage);
}

template <DType kDtype, Component kComponent>
__device__ void decode_component(const PageDecode& d, const PageJob& job, const TileTokens& t,
                                 int32_t tile, const StageShape& shape, uint8_t* stage) {
  void* to = kComponent == Component::kKey ? d.k : d.v;
  if (to == nullptr) return;
  const PageLayout& layout = d.batch.formats.layout[job.format];
  const uint8_t* page = page_bytes(d.batch, job);
  stage += static_cast<int32_t>(kComponent) * shape.component_bytes;
  const DecodeTask task = {page + layout.tile_codes_byte(kComponent, tile),
                           page + layout.tile_metadata_byte(kComponent, tile),
                           stage,
                           shape.pitch,
                           layout.tile(kComponent),
                           layout.groups(kComponent),
                           d.batch.formats.raw_dtype};
  decode_to_stage<kDtype, kComponent>(task);
  __syncwarp();
  unstage_rows(d.batch, job, t, shape, stage, to);
}

template <DType kDtype>
__global__ void __launch_bounds__(kMaxWarps * 32, kCtasPerSm)
    decode_kernel(const __grid_constant__ PageDecode d, const StageShape shape,
                  const int32_t max_tiles) {
  extern __shared__ __align__(16) uint8_t shared[];
  const PageBatch& b = d.batch;
  Item item;
  if (!find_item(b, max_tiles, &item)) return;
  const PageJob job = b.jobs[item.job];
  if (!is_sound(b, job, item.tile)) return;
  const TileTokens t = tile_tokens(b, job, item.tile);
  if (t.begin >= t.end) return;
  if (t.code != StatusCode::kOk) report(b, job, t.code);
  uint8_t* stage = shared + threadIdx.x / 32 * shape.warp_bytes;
  decode_component<kDtype, Component::kKey>(d, job, t, item.tile, shape, stage);
  decode_component<kDtype, Component::kValue>(d, job, t, item.tile, shape, stage);
  if (t.token < 0) return;
  const PageLayout& layout = b.formats.layout[job.format];
  const uint8_t* page = page_bytes(b, job);
  const int32_t slot = item.tile * kTileTokens + lane_index();
  const int64_t at = job.scalars + t.token;
  if (!layout.has_records()) return;
  if (d.scores != nullptr) {
    d.scores[at] = *reinterpret_cast<const float*>(page + layout.score_byte(slot));
  }
  if (d.positions != nullptr) {
    d.positions[at] = *reinterpret_cast<const int32_t*>(page + layout.position_byte(slot));
  }
}

int32_t max_tiles(const PageFormats& f) {
  int32_t tiles = 0;
  for (int32_t i = 0; i < f.count; ++i) tiles = std::max(tiles, f.layout[i].tiles());
  return tiles;
}

struct Launch {
  int32_t ctas = 0, warps = 0;
  size_t shared_bytes = 0;
};

Result<Launch> plan_launch(const void* kernel, int64_t items, int32_t warp_bytes) {
  int device = 0, shared = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (Status s = cuda_status(error, "device attributes"); !s) return s;
  Launch launch;
  launch.warps = std::min(kMaxWarps, shared / warp_bytes);
  if (launch.warps == 0) {
    return Status(StatusCode::kUnsupported, "a tile does not fit into the device's shared memory");
  }
  const int64_t ctas = (items + launch.warps - 1) / launch.warps;
  if (ctas > INT32_MAX) return Status(StatusCode::kUnsupported, "num_jobs is beyond a grid");
  launch.ctas = static_cast<int32_t>(ctas);
  launch.shared_bytes = static_cast<size_t>(launch.warps) * warp_bytes;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(launch.shared_bytes));
  if (Status s = cuda_status(error, "kernel attributes"); !s) return s;
  return launch;
}

// `kernel` on the tiles of all jobs.
template <class Call>
Status launch(void (*kernel)(Call, StageShape, int32_t), const Call& call, GpuStream stream) {
  const PageBatch& b = call.batch;
  const int32_t tiles = max_tiles(b.formats);
  const StageShape shape = stage_shape(b.formats, b.dtype);
  const Result<Launch> plan = plan_launch(reinterpret_cast<const void*>(kernel),
                                          int64_t{b.num_jobs} * tiles, shape.warp_bytes);
  if (!plan) return plan.status();
  kernel<<<plan->ctas, 32 * plan->warps, plan->shared_bytes, stream>>>(call, shape, tiles);
  return cuda_status(cudaGetLastError(), "kernel launch");
}

// Codes clipped at the norm have kernels of their own, so that the usual ones have none of their
// code.
template <DType kDtype>
Status launch_encode(const PageEncode& e, GpuStream stream) {
  return launch(
      e.batch.formats.has_norm() ? encode_kernel<kDtype, true> : encode_kernel<kDtype, false>, e,
      stream);
}

}  // namespace

Status encode_pages(const PageEncode& e, GpuStream stream) {
  if (Status s = e.validate(); !s) return s;
  if (e.batch.num_jobs == 0) return Status::ok();
  const DType dtype = e.batch.dtype;
  return dtype == DType::kFloat16    ? launch_encode<DType::kFloat16>(e, stream)
         : dtype == DType::kBFloat16 ? launch_encode<DType::kBFloat16>(e, stream)
                                     : launch_encode<DType::kFloat32>(e, stream);
}

Status decode_pages(const PageDecode& d, GpuStream stream) {
  if (Status s = d.validate(); !s) return s;
  if (d.batch.num_jobs == 0) return Status::ok();
  const DType dtype = d.batch.dtype;
  return launch(dtype == DType::kFloat16    ? decode_kernel<DType::kFloat16>
                : dtype == DType::kBFloat16 ? decode_kernel<DType::kBFloat16>
                                            : decode_kernel<DType::kFloat32>,
                d, stream);
}

}  // namespace tierkv
