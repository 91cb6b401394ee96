#include <cub/block/block_scan.cuh>

#include "attention/launch.cuh"
#include "attention/plan.h"

namespace tierkv {
namespace {

constexpr int32_t kPlanThreads = 512;
static_assert(kMaxItems <= kPlanThreads, "one thread makes one item");

struct AddWork {
  __device__ RowWork operator()(RowWork a, RowWork b) const {
    return {a.chunks + b.chunks, a.cost + b.cost};
  }
};
struct Largest {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return a > b ? a : b; }
};

// Exclusive prefixes by thread; thread t owns rows [t * rows_per_thread, (t + 1) *
// rows_per_thread).
struct PlanShared {
  int64_t cost[kPlanThreads + 1];
  int32_t chunks[kPlanThreads + 1];
  int32_t starts[kMaxItems + 1];
  union {
    cub::BlockScan<RowWork, kPlanThreads>::TempStorage work;
    cub::BlockScan<int32_t, kPlanThreads>::TempStorage start;
  } scan;
};

// The last of n sorted entries that is not above x; the first one is not.
template <class T>
__device__ int32_t last_not_above(const T* sorted, int32_t n, int64_t x) {
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

// Rows of one layer, and how many of them a thread owns.
struct LayerRows {
  const AttentionRows& rows;
  int32_t layer;
  int32_t rows_per_thread;

  __device__ RowTokens tokens(int32_t row) const {
    return row_tokens(rows, table_row_of(rows, layer, row));
  }
};

struct RowPlace {
  int32_t row;
  int32_t chunk;  // in the row
  int32_t row_chunks;
};

// The flat chunk that holds cost unit `cost`.
__device__ int32_t flat_chunk_at_cost(const LayerRows& in, const PlanShared& shared, int64_t cost) {
  const int32_t owner = last_not_above(shared.cost, kPlanThreads, cost);
  int32_t flat = shared.chunks[owner];
  cost -= shared.cost[owner];
  for (int32_t row = owner * in.rows_per_thread;; ++row) {
    const RowTokens tokens = in.tokens(row);
    const RowWork work = row_work(in.rows, tokens);
    if (cost < work.cost || row + 1 >= in.rows.num_rows) {
      return flat + chunk_at_cost(in.rows, tokens, cost);
    }
    cost -= work.cost;
    flat += work.chunks;
  }
}

__device__ RowPlace place_of_flat_chunk(const LayerRows& in, const PlanShared& shared,
                                        int32_t flat) {
  const int32_t owner = last_not_above(shared.chunks, kPlanThreads, flat);
  int32_t chunk = flat - shared.chunks[owner];
  for (int32_t row = owner * in.rows_per_thread;; ++row) {
    const int32_t chunks = row_work(in.rows, in.tokens(row)).chunks;
    if (chunk < chunks || row + 1 >= in.rows.num_rows) return {row, chunk, chunks};
    chunk -= chunks;
  }
}

__device__ void scan_rows(const LayerRows& in, int32_t* row_status, PlanShared& shared) {
  const auto t = static_cast<int32_t>(threadIdx.x);
  RowWork mine{0, 0};
  for (int32_t i = 0; i < in.rows_per_thread; ++i) {
    const int32_t row = t * in.rows_per_thread + i;
    if (row >= in.rows.num_rows) break;
    const RowTokens tokens = in.tokens(row);
    mine = AddWork{}(mine, row_work(in.rows, tokens));
    row_status[row] = static_cast<int32_t>(tokens.corrupt ? StatusCode::kCorrupt : StatusCode::kOk);
  }
  RowWork before, total;
  cub::BlockScan<RowWork, kPlanThreads>(shared.scan.work)
      .ExclusiveScan(mine, before, RowWork{0, 0}, AddWork{}, total);
  shared.cost[t] = before.cost;
  shared.chunks[t] = before.chunks;
  if (t == 0) {
    shared.cost[kPlanThreads] = total.cost;
    shared.chunks[kPlanThreads] = total.chunks;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ PlanParams params) {
  __shared__ PlanShared shared;
  const auto c = static_cast<int32_t>(threadIdx.x), layer = static_cast<int32_t>(blockIdx.x);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const LayerRows in{params.rows, layer, ceil_div(params.rows.num_rows, kPlanThreads)};
  WorkItem* items = params.items + static_cast<int64_t>(layer) * (params.max_items + 1);
  scan_rows(in, params.row_status + static_cast<int64_t>(layer) * params.rows.num_rows, shared);

  const int64_t total_cost = shared.cost[kPlanThreads];
  const int32_t total = shared.chunks[kPlanThreads], count = smaller(params.max_items, total);
  const int32_t start = c < count ? flat_chunk_at_cost(in, shared, total_cost * c / count) : 0;
  int32_t ahead;  // largest start so far, less its index: no item may be empty
  cub::BlockScan<int32_t, kPlanThreads>(shared.scan.start)
      .InclusiveScan(c < count ? start - c : 0, ahead, Largest{});
  if (c < count) shared.starts[c] = smaller(ahead, total - count) + c;
  if (c == 0) shared.starts[count] = total;
  __syncthreads();

  WorkItem item{params.rows.num_rows, 0, 0, 0, 0, {0, 0, 0}};
  if (c < count) {
    const int32_t flat = shared.starts[c];
    const RowPlace place = place_of_flat_chunk(in, shared, flat);
    const int32_t row_start = flat - place.chunk;
    item.row = place.row;
    item.chunk = place.chunk;
    item.num_chunks = shared.starts[c + 1] - flat;
    item.span_first = last_not_above(shared.starts, count, row_start);
    item.span_last = last_not_above(shared.starts, count, row_start + place.row_chunks - 1);
  }
  if (c < params.max_items) {
    items[c] = item;
    if (layer == 0) params.arrivals[c] = 0;
  }
  if (c == 0) items[params.max_items] = {params.rows.num_rows, 0, 0, 0, 0, {0, 0, 0}};
}

}  // namespace

Status launch_plan(const PlanParams& params, GpuStream stream) {
  return launch_after_previous(plan_kernel, params.num_layers, kPlanThreads, 0, stream, params);
}

}  // namespace tierkv
