// SPDX-License-Identifier: Apache-2.0
// The plan on the device, with the results of plan_items(). Only its latency counts: every stage
// waits for the one before.
#pragma once

#include "attention/work/plan_rows.cuh"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kPlanWarps = kPlanThreads / 32;
inline constexpr int32_t kWarpItems = 31;  // the last lane knows where the next warp begins
inline constexpr int32_t kPlanItems = kPlanWarps * kWarpItems;  // of a CTA

// Sums over consecutive rows. Cost is 32 bits where a launch's fits, else 64; tiles wrap around, as
// the tiles of an item, a difference, do not.
template <class Cost>
struct RowSum {
  Cost cost;
  uint32_t tiles;

  __device__ void add(Cost more_cost, uint32_t more_tiles) {
    cost += more_cost;
    tiles += more_tiles;
  }
};

// Lane l of warp w owns rows_per_thread rows from row (32 w + l) * rows_per_thread on.
template <class Cost>
struct PlanShared {
  Cost lane_cost[kPlanThreads];  // of the rows of the warp's lanes before
  uint32_t lane_tiles[kPlanThreads];
  Cost warp_cost[kPlanWarps];
  uint32_t warp_tiles[kPlanWarps];
};

// Where an item begins.
struct ItemPlace {
  int32_t row;
  int32_t tile;
  uint32_t start;  // flat tile
  KeptRow kept;    // the row
};

// Inclusive, of the first kLanes lanes.
template <int32_t kLanes, class Cost>
__device__ RowSum<Cost> scan_warp(RowSum<Cost> x, int32_t lane) {
#pragma unroll
  for (int32_t by = 1; by < kLanes; by *= 2) {
    const Cost cost = __shfl_up_sync(kFullWarp, x.cost, by);
    const uint32_t tiles = __shfl_up_sync(kFullWarp, x.tiles, by);
    if (lane >= by) x.add(cost, tiles);
  }
  return x;
}

// One layer's plan: every CTA of the layer scans its rows and makes kPlanItems items.
template <class Cost, int32_t kClasses>
class LayerPlan {
 public:
  __device__ LayerPlan(const PlanLaunchOf<kClasses>& launch, int32_t layer,
                       PlanShared<Cost>& shared, KeptRow* kept)
      : l_(launch), p_(launch.plan), layer_(layer), shared_(shared), rows_(launch, layer, kept) {}

  __device__ void run() {
    rows_.keep();
    scan_rows();
    __syncthreads();
    sum_warps();
    make_items();
  }

 private:
  // Within the warp.
  __device__ void scan_rows() {
    const auto t = static_cast<int32_t>(threadIdx.x), lane = t % 32;
    const RowSum<Cost> mine = own_rows(), upto = scan_warp<32>(mine, lane);
    shared_.lane_cost[t] = upto.cost - mine.cost;
    shared_.lane_tiles[t] = upto.tiles - mine.tiles;
    if (lane == 31) {
      shared_.warp_cost[t / 32] = upto.cost;
      shared_.warp_tiles[t / 32] = upto.tiles;
    }
  }

  __device__ RowSum<Cost> own_rows() const {
    RowSum<Cost> mine{0, 0};
    const int32_t first = static_cast<int32_t>(threadIdx.x) * l_.rows_per_thread,
                  end = smaller(first + l_.rows_per_thread, p_.rows.num_rows);
#pragma unroll 1
    for (int32_t row = first; row < end; ++row) {
      const KeptRow kept = rows_.at(row);
      mine.add(kept.cost, kept.tiles());
    }
    return mine;
  }

  // By every warp for itself.
  __device__ void sum_warps() {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    RowSum<Cost> warp{0, 0};
    if (lane < kPlanWarps) warp = {shared_.warp_cost[lane], shared_.warp_tiles[lane]};
    const RowSum<Cost> upto = scan_warp<kPlanWarps>(warp, lane);
    before_warp_ = {upto.cost - warp.cost, upto.tiles - warp.tiles};
    total_ = {__shfl_sync(kFullWarp, upto.cost, kPlanWarps - 1),
              __shfl_sync(kFullWarp, upto.tiles, kPlanWarps - 1)};
  }

  __device__ void make_items() const {
    const LaunchCost cost{static_cast<int64_t>(total_.cost), rows_.at(0).cost};
    const int32_t ctas = working_ctas(p_.rows, p_.max_ctas, p_.even_ctas, cost);
    const auto t = static_cast<int32_t>(threadIdx.x), lane = t % 32;
    const int32_t i = static_cast<int32_t>(blockIdx.y) * kPlanItems + t / 32 * kWarpItems + lane;
    const bool is_item = i < ctas * p_.warps;
    const int64_t at = EvenCut(cost.total, items_divisor(ctas)).start(is_item ? i : 0);
    ItemPlace place = place_at_cost(static_cast<Cost>(at));
    if (!is_item) place = {p_.rows.num_rows, 0, total_.tiles, {}};
    const uint32_t next = __shfl_down_sync(kFullWarp, place.start, 1);
    if (lane < kWarpItems && i <= p_.max_ctas * p_.warps) write_item(i, place, next - place.start);
  }

  __device__ Divisor items_divisor(int32_t ctas) const {
    if (ctas == p_.max_ctas) return l_.max_items;
    if (ctas == p_.even_ctas) return l_.even_items;
    return Divisor(ctas * p_.warps);
  }

  __device__ void write_item(int32_t i, const ItemPlace& place, uint32_t tiles) const {
    const int32_t* n = place.kept.tokens;
    p_.items[static_cast<int64_t>(layer_) * (p_.max_ctas * p_.warps + 1) + i] = {
        place.row, place.tile, static_cast<int32_t>(tiles), {n[0], n[1], n[2]}};
  }

  // Where an item begins whose work starts at `cost` of the layer, which is below the total. Each
  // lane asks for a cost of its own; all lanes of the warp must call.
  __device__ ItemPlace place_at_cost(Cost cost) const {
    int32_t warp = 0;  // the last before whose rows there is not more
    Cost before = 0;
#pragma unroll
    for (int32_t step = kPlanWarps / 2; step > 0; step /= 2) {
      const Cost there = __shfl_sync(kFullWarp, before_warp_.cost, warp + step);
      if (there <= cost) {
        warp += step;
        before = there;
      }
    }
    const uint32_t start = __shfl_sync(kFullWarp, before_warp_.tiles, warp);
    return place_in_warp(warp, start, cost - before);
  }

  // start: the flat tile where the rows of the warp begin. cost: of these rows.
  __device__ ItemPlace place_in_warp(int32_t warp, uint32_t start, Cost cost) const {
    int32_t owner = 32 * warp;  // the last thread before whose rows there is not more
    Cost before = 0;
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) {
      const Cost there = shared_.lane_cost[owner + step];
      if (there <= cost) {
        owner += step;
        before = there;
      }
    }
    return place_from(owner * l_.rows_per_thread, start + shared_.lane_tiles[owner], cost - before);
  }

  // start: the flat tile where `row` begins. cost: of it and the rows behind.
  __device__ ItemPlace place_from(int32_t row, uint32_t start, Cost cost) const {
    KeptRow kept = rows_.at(row);
#pragma unroll 1
    while (cost >= kept.cost && row + 1 < p_.rows.num_rows) {
      cost -= kept.cost;
      start += kept.tiles();
      kept = rows_.at(++row);
    }
    const int32_t tile = tile_at_cost(l_.tile_cost + rows_.first_tier(row), kept.tokens,
                                      static_cast<uint32_t>(cost));
    return {row, tile, start + static_cast<uint32_t>(tile), kept};
  }

  const PlanLaunchOf<kClasses>& l_;
  const PlanParamsOf<kClasses>& p_;
  int32_t layer_;
  PlanShared<Cost>& shared_;
  PlanRows<kClasses> rows_;
  RowSum<Cost> before_warp_;  // lane w: of the rows of the warps before w
  RowSum<Cost> total_;
};

template <class Cost, int32_t kClasses>
__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ PlanLaunchOf<kClasses> launch) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  touch_parameters(launch, threadIdx.x / 32);
  wait_for_previous_kernel();
  let_next_kernel_start();
  auto& shared = *reinterpret_cast<PlanShared<Cost>*>(shared_bytes);
  LayerPlan<Cost, kClasses> plan(
      launch, blockIdx.x, shared,
      reinterpret_cast<KeptRow*>(shared_bytes + sizeof(PlanShared<Cost>)));
  plan.run();
}

template <class Cost>
constexpr size_t plan_shared_bytes(int32_t num_rows) {
  static_assert(sizeof(PlanShared<Cost>) % alignof(KeptRow) == 0, "the kept rows follow");
  return sizeof(PlanShared<Cost>) + kept_bytes(num_rows);
}
static_assert(plan_shared_bytes<uint64_t>(kKeptRows) <= 99 << 10, "of compute capability 8.6, 8.9");

}  // namespace tierkv
