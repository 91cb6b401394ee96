#include "attention/launch.cuh"
#include "attention/plan.h"

namespace tierkv {
namespace {

constexpr int32_t kPlanThreads = 1024;
constexpr int32_t kPlanWarps = kPlanThreads / 32;
constexpr int32_t kKeptRows = 8192;  // rows whose tokens are kept in shared memory

// Prefixes by thread; thread t owns rows [t * rows_per_thread, (t + 1) * rows_per_thread).
struct PlanShared {
  int64_t cost[kPlanThreads + 1];
  int64_t tiles[kPlanThreads + 1];
  int64_t cta_starts[kMaxCtas + 1];  // flat tiles
  int64_t warp_cost[kPlanWarps], warp_tiles[kPlanWarps];
};

struct KeptTokens {
  int32_t tier[kAttentionTiers];
};

// The last of n sorted entries that is not above x; the first one is not.
__device__ int32_t last_not_above(const int64_t* sorted, int32_t n, int64_t x) {
  int32_t low = 0, high = n;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (sorted[middle] <= x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct RowPlace {
  int32_t row;
  int32_t tile;
  int64_t row_start;  // flat tile
  int64_t row_tiles;
  RowTokens tokens;
};

// One layer's plan: every CTA of the layer scans its rows and makes kPlanThreads items.
class LayerPlan {
 public:
  __device__ LayerPlan(const PlanParams& params, int32_t layer, PlanShared& shared,
                       KeptTokens* kept)
      : p_(params), layer_(layer), shared_(shared), kept_(kept) {
    rows_per_thread_ = ceil_div(p_.rows.num_rows, kPlanThreads);
  }

  __device__ void run() {
    read_rows();
    scan_rows();
    const int64_t cost = shared_.cost[kPlanThreads];
    const int32_t ctas = working_ctas(p_.rows, p_.max_ctas, cost), items = ctas * p_.warps;
    WorkItem* to = p_.items + static_cast<int64_t>(layer_) * (p_.max_ctas * p_.warps + 1);
    for (int32_t c = threadIdx.x; c < ctas; c += kPlanThreads) {
      const RowPlace place = place_at_cost(part_start(cost, c * p_.warps, items));
      shared_.cta_starts[c] = place.row_start + place.tile;
    }
    __syncthreads();
    const auto i = static_cast<int32_t>(blockIdx.y * kPlanThreads + threadIdx.x);
    if (i < p_.max_ctas * p_.warps + 1) to[i] = i < items ? make_item(i, items, ctas) : none();
  }

 private:
  __device__ WorkItem none() const { return {p_.rows.num_rows, 0, 0, {0, 0, 0}, 0, 0}; }

  __device__ RowTokens tokens_of(int32_t row) const {
    if (row >= kKeptRows) return row_tokens(p_.rows, table_row_of(p_.rows, layer_, row));
    RowTokens n;
    const KeptTokens kept = kept_[row];
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) n.tier[t] = kept.tier[t];
    return n;
  }

  __device__ void read_rows() {
    const bool is_first = blockIdx.y == 0;
    int32_t* status = p_.row_status + static_cast<int64_t>(layer_) * p_.rows.num_rows;
    for (int32_t row = threadIdx.x; row < p_.rows.num_rows; row += kPlanThreads) {
      const RowTokens n = row_tokens(p_.rows, table_row_of(p_.rows, layer_, row));
      if (row < kKeptRows) kept_[row] = {{n.tier[0], n.tier[1], n.tier[2]}};
      if (is_first)
        status[row] = static_cast<int32_t>(n.corrupt ? StatusCode::kCorrupt : StatusCode::kOk);
    }
    __syncthreads();
  }

  __device__ void scan_rows() {
    const auto t = static_cast<int32_t>(threadIdx.x), lane = t % 32, warp = t / 32;
    RowWork mine{0, 0};
    for (int32_t i = 0; i < rows_per_thread_; ++i) {
      const int32_t row = t * rows_per_thread_ + i;
      if (row >= p_.rows.num_rows) break;
      const RowWork work = row_work(p_.rows, tokens_of(row));
      mine.cost += work.cost;
      mine.tiles += work.tiles;
    }
    const RowWork upto = scan_warp(mine, lane);
    if (lane == 31) {
      shared_.warp_cost[warp] = upto.cost;
      shared_.warp_tiles[warp] = upto.tiles;
    }
    __syncthreads();
    RowWork before{lane < kPlanWarps ? shared_.warp_tiles[lane] : 0,
                   lane < kPlanWarps ? shared_.warp_cost[lane] : 0};
    before = scan_warp(before, lane);  // by every warp for itself
    const int32_t from = warp > 0 ? warp - 1 : 0;
    before.cost = __shfl_sync(kFullWarp, before.cost, from);
    before.tiles = __shfl_sync(kFullWarp, before.tiles, from);
    if (warp == 0) before = {0, 0};
    shared_.cost[t + 1] = before.cost + upto.cost;
    shared_.tiles[t + 1] = before.tiles + upto.tiles;
    if (t == 0) shared_.cost[0] = shared_.tiles[0] = 0;
    __syncthreads();
  }

  // Inclusive.
  __device__ static RowWork scan_warp(RowWork x, int32_t lane) {
#pragma unroll
    for (int32_t by = 1; by < 32; by *= 2) {
      const int64_t cost = __shfl_up_sync(kFullWarp, x.cost, by);
      const int64_t tiles = __shfl_up_sync(kFullWarp, x.tiles, by);
      if (lane >= by) x = {x.tiles + tiles, x.cost + cost};
    }
    return x;
  }

  __device__ RowPlace place_at_cost(int64_t cost) const {
    const int32_t owner = last_not_above(shared_.cost, kPlanThreads, cost);
    cost -= shared_.cost[owner];
    RowPlace place{owner * rows_per_thread_, 0, shared_.tiles[owner], 0, {}};
    while (true) {
      place.tokens = tokens_of(place.row);
      const RowWork work = row_work(p_.rows, place.tokens);
      place.row_tiles = work.tiles;
      if (cost < work.cost || place.row + 1 >= p_.rows.num_rows) break;
      cost -= work.cost;
      place.row_start += work.tiles;
      ++place.row;
    }
    place.tile = tile_at_cost(p_.rows, place.tokens, cost);
    return place;
  }

  __device__ WorkItem make_item(int32_t i, int32_t items, int32_t ctas) const {
    const int64_t cost = shared_.cost[kPlanThreads];
    const RowPlace place = place_at_cost(part_start(cost, i, items));
    int64_t end = shared_.tiles[kPlanThreads];
    if (i + 1 < items) {
      const RowPlace next = place_at_cost(part_start(cost, i + 1, items));
      end = next.row_start + next.tile;
    }
    WorkItem item{place.row, place.tile, 0, {0, 0, 0}, 0, 0};
    item.tiles = static_cast<int32_t>(end - place.row_start - place.tile);
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) item.tier[t] = place.tokens.tier[t];
    item.span_first = last_not_above(shared_.cta_starts, ctas, place.row_start);
    item.span_last =
        last_not_above(shared_.cta_starts, ctas, place.row_start + place.row_tiles - 1);
    return item;
  }

  const PlanParams& p_;
  int32_t layer_;
  PlanShared& shared_;
  KeptTokens* kept_;  // [min(num_rows, kKeptRows)]
  int32_t rows_per_thread_;
};

__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ PlanParams params) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  auto& shared = *reinterpret_cast<PlanShared*>(shared_bytes);
  LayerPlan plan(params, blockIdx.x, shared,
                 reinterpret_cast<KeptTokens*>(shared_bytes + sizeof(PlanShared)));
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int32_t i = threadIdx.x; i < params.max_ctas; i += kPlanThreads) params.arrivals[i] = 0;
  }
  plan.run();
}

size_t plan_shared_bytes(int32_t num_rows) {
  return sizeof(PlanShared) + smaller(num_rows, kKeptRows) * sizeof(KeptTokens);
}

}  // namespace

Status prepare_plan() {
  return cuda_status(cudaFuncSetAttribute(reinterpret_cast<const void*>(plan_kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(plan_shared_bytes(kKeptRows))),
                     "shared memory of the plan kernel");
}

Status launch_plan(const PlanParams& params, GpuStream stream) {
  const dim3 grid(params.num_layers, ceil_div(params.max_ctas * params.warps + 1, kPlanThreads));
  return launch_after_previous(plan_kernel, grid, kPlanThreads,
                               plan_shared_bytes(params.rows.num_rows), stream, params);
}

}  // namespace tierkv
