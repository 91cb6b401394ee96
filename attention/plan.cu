#include "attention/launch.cuh"
#include "attention/plan.h"

namespace tierkv {
namespace {

constexpr int32_t kPlanThreads = 256;
constexpr int32_t kPlanWarps = kPlanThreads / 32;
constexpr int32_t kWarpItems = 31;  // of a warp; its last lane knows where the next warp begins
constexpr int32_t kPlanItems = kPlanWarps * kWarpItems;  // of a CTA
constexpr int32_t kKeptRows = 8192;  // rows whose tokens are kept in shared memory

// Thread t owns rows [t * rows_per_thread, (t + 1) * rows_per_thread).
struct PlanShared {
  RowWork before[kPlanThreads + 1];  // of the rows of the threads before; the last is the total
  RowWork warp_work[kPlanWarps];
};

struct KeptTokens {
  int32_t tier[kAttentionTiers];
};

// Where an item begins.
struct ItemPlace {
  int32_t row;
  int32_t tile;
  RowWork before;  // the row
  RowWork work;    // of the row
  RowTokens tokens;

  __device__ int64_t start() const { return before.tiles + tile; }  // flat tile
};

// One layer's plan: every CTA of the layer scans its rows and makes kPlanItems items.
class LayerPlan {
 public:
  __device__ LayerPlan(const PlanParams& params, int32_t layer, PlanShared& shared,
                       KeptTokens* kept)
      : p_(params), layer_(layer), shared_(shared), kept_(kept) {
    rows_per_thread_ = ceil_div(p_.rows.num_rows, kPlanThreads);
  }

  __device__ void run() {
    const auto t = static_cast<int32_t>(threadIdx.x);
    scan_rows();
    const RowWork total = shared_.before[kPlanThreads];
    const LaunchCost cost{total.cost, row_work(p_.rows, tokens_of(0)).cost};
    const int32_t ctas = working_ctas(p_.rows, p_.max_ctas, p_.even_ctas, cost),
                  items = ctas * p_.warps;
    const int32_t i = static_cast<int32_t>(blockIdx.y) * kPlanItems + t / 32 * kWarpItems + t % 32;
    const bool is_item = i < items;
    ItemPlace place{p_.rows.num_rows, 0, total, {0, 0}, {}};
    if (is_item) place = place_at_cost(EvenCut(total.cost, items).start(i));
    const int64_t next = __shfl_down_sync(kFullWarp, place.start(), 1);
    if (t % 32 == kWarpItems || i > p_.max_ctas * p_.warps) return;
    WorkItem item{place.row, place.tile, 0, {0, 0, 0}};
    if (is_item) item.tiles = static_cast<int32_t>(next - place.start());
#pragma unroll
    for (int32_t k = 0; k < kAttentionTiers; ++k) item.tier[k] = place.tokens.tier[k];
    p_.items[static_cast<int64_t>(layer_) * (p_.max_ctas * p_.warps + 1) + i] = item;
  }

 private:
  __device__ RowTokens tokens_of(int32_t row) const {
    if (row >= kKeptRows) return row_tokens(p_.rows, table_row_of(p_.rows, layer_, row));
    RowTokens n;
    const KeptTokens kept = kept_[row];
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) n.tier[t] = kept.tier[t];
    return n;
  }

  // Reads the rows of this thread.
  __device__ RowWork read_rows() {
    int32_t* status =
        p_.row_status + static_cast<int64_t>(layer_) * (p_.rows.num_rows / p_.rows.passes);
    RowWork mine{0, 0};
    for (int32_t i = 0; i < rows_per_thread_; ++i) {
      const int32_t row = static_cast<int32_t>(threadIdx.x) * rows_per_thread_ + i;
      if (row >= p_.rows.num_rows) break;
      const RowTokens n = row_tokens(p_.rows, table_row_of(p_.rows, layer_, row));
      if (row < kKeptRows) kept_[row] = {{n.tier[0], n.tier[1], n.tier[2]}};
      if (blockIdx.y == 0) {
        status[batch_row_of(p_.rows, row)] =
            static_cast<int32_t>(n.corrupt ? StatusCode::kCorrupt : StatusCode::kOk);
      }
      const RowWork work = row_work(p_.rows, n);
      mine = {mine.tiles + work.tiles, mine.cost + work.cost};
    }
    return mine;
  }

  __device__ void scan_rows() {
    const auto t = static_cast<int32_t>(threadIdx.x), lane = t % 32, warp = t / 32;
    const RowWork upto = scan_warp<32>(read_rows(), lane);
    if (lane == 31) shared_.warp_work[warp] = upto;
    __syncthreads();
    const RowWork none{0, 0};  // by every warp for itself
    const RowWork warps =
        scan_warp<kPlanWarps>(lane < kPlanWarps ? shared_.warp_work[lane] : none, lane);
    const int32_t from = warp > 0 ? warp - 1 : 0;
    RowWork before{__shfl_sync(kFullWarp, warps.tiles, from),
                   __shfl_sync(kFullWarp, warps.cost, from)};
    if (warp == 0) before = {0, 0};
    shared_.before[t + 1] = {before.tiles + upto.tiles, before.cost + upto.cost};
    if (t == 0) shared_.before[0] = {0, 0};
    __syncthreads();
  }

  // Inclusive, of the first kLanes lanes.
  template <int32_t kLanes>
  __device__ static RowWork scan_warp(RowWork x, int32_t lane) {
#pragma unroll
    for (int32_t by = 1; by < kLanes; by *= 2) {
      const int64_t cost = __shfl_up_sync(kFullWarp, x.cost, by);
      const int64_t tiles = __shfl_up_sync(kFullWarp, x.tiles, by);
      if (lane >= by) x = {x.tiles + tiles, x.cost + cost};
    }
    return x;
  }

  // cost is below the total.
  __device__ ItemPlace place_at_cost(int64_t cost) const {
    int32_t owner = 0;  // the last thread before whose rows there is not more
#pragma unroll
    for (int32_t step = kPlanThreads / 2; step > 0; step /= 2) {
      if (shared_.before[owner + step].cost <= cost) owner += step;
    }
    ItemPlace place{owner * rows_per_thread_, 0, shared_.before[owner], {0, 0}, {}};
    while (true) {
      place.tokens = tokens_of(place.row);
      place.work = row_work(p_.rows, place.tokens);
      const int64_t behind = place.before.cost + place.work.cost;
      if (cost < behind || place.row + 1 >= p_.rows.num_rows) break;
      place.before = {place.before.tiles + place.work.tiles, behind};
      ++place.row;
    }
    place.tile = tile_at_cost(p_.rows, place.tokens, cost - place.before.cost);
    return place;
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
  touch_parameters(params, threadIdx.x / 32);
  wait_for_previous_kernel();
  let_next_kernel_start();
  auto& shared = *reinterpret_cast<PlanShared*>(shared_bytes);
  LayerPlan plan(params, blockIdx.x, shared,
                 reinterpret_cast<KeptTokens*>(shared_bytes + sizeof(PlanShared)));
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
  const dim3 grid(params.num_layers, ceil_div(params.max_ctas * params.warps + 1, kPlanItems));
  return launch_after_previous(plan_kernel, grid, kPlanThreads,
                               plan_shared_bytes(params.rows.num_rows), stream, params);
}

}  // namespace tierkv
