// SPDX-License-Identifier: Apache-2.0
// The kernel of plan_channel(): one CTA.
#pragma once

#include "attention/channel/channel_plan.h"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

inline constexpr int32_t kChannelPlanThreads = 256;

// Sums over the threads of the CTA; scratch: [warps], in shared memory.
class CtaSums {
 public:
  __device__ explicit CtaSums(int64_t* scratch) : scratch_(scratch) {}

  struct Scanned {
    int64_t before;  // of the threads before this one
    int64_t total;
  };
  __device__ Scanned scan(int64_t x) {
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t sum = x;
#pragma unroll
    for (int32_t by = 1; by < 32; by *= 2) {
      const int64_t other = __shfl_up_sync(kFullWarp, sum, by);
      if (lane >= by) sum += other;
    }
    __syncthreads();  // what was in scratch has been read
    if (lane == 31) scratch_[warp] = sum;
    __syncthreads();
    Scanned s{sum - x, 0};
    for (int32_t w = 0; w < kChannelPlanThreads / 32; ++w) {
      if (w < warp) s.before += scratch_[w];
      s.total += scratch_[w];
    }
    return s;
  }
  __device__ int32_t largest(int32_t x) {
#pragma unroll
    for (int32_t by = 1; by < 32; by *= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, by));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch_[threadIdx.x / 32] = x;
    __syncthreads();
    for (int32_t w = 0; w < kChannelPlanThreads / 32; ++w) {
      x = max(x, static_cast<int32_t>(scratch_[w]));
    }
    return x;
  }

 private:
  int64_t* scratch_;
};

// A sequence that is dealt out.
struct DealtSequence {
  ChannelSequence sequence;
  int32_t splits;  // 0: none here
  int32_t item;    // its first
  int32_t part;    // likewise
};
struct ChannelPlanShared {
  int64_t sums[kChannelPlanThreads / 32];
  DealtSequence dealt[kChannelPlanThreads];
};

class ChannelPlanner {
 public:
  __device__ ChannelPlanner(const ChannelPlanCall& call, ChannelPlanShared* shared)
      : call_(call), shared_(*shared), sums_(shared->sums) {}

  __device__ void run() {
    find_share();
    int32_t item = 0, part = 0;
    for (int32_t size = 0; size < kItemSizes; ++size) {
      for (int32_t first = 0; first < call_.num_sequences; first += kChannelPlanThreads) {
        place(first, size, &item, &part);
        deal(first);
      }
    }
    for (int32_t i = item + static_cast<int32_t>(threadIdx.x); i < call_.plan.num_items;
         i += kChannelPlanThreads) {
      call_.plan.items[i] = ChannelItem{};
    }
  }

 private:
  // As far as it can be.
  __device__ ChannelSequence sequence(int32_t index) const {
    const ChannelSequence s = call_.sequences[index];
    return is_sound(call_, s) ? s : ChannelSequence{};
  }
  __device__ int32_t splits_of(const ChannelSequence& s, int32_t share) const {
    return channel_splits(s.units(), call_.team, share);
  }

  // The least share with which there are enough items.
  __device__ void find_share() {
    int32_t most = 1;
    for (int32_t i = threadIdx.x; i < call_.num_sequences; i += kChannelPlanThreads) {
      const ChannelSequence s = call_.sequences[i];
      if (!is_sound(call_, s)) report();
      most = max(most, sequence(i).units());
    }
    int32_t too_small = 0;
    share_ = (sums_.largest(most) + call_.team - 1) / call_.team;
    while (share_ - too_small > 1) {
      const int32_t middle = too_small + (share_ - too_small) / 2;
      int64_t items = 0;
      for (int32_t i = threadIdx.x; i < call_.num_sequences; i += kChannelPlanThreads) {
        items += int64_t{call_.num_kv_heads} * splits_of(sequence(i), middle);
      }
      (sums_.scan(items).total <= call_.plan.num_items ? share_ : too_small) = middle;
    }
  }

  // Of a sequence for each thread from `first` on, where the items that have the size begin.
  __device__ void place(int32_t first, int32_t size, int32_t* item, int32_t* part) {
    const int32_t index = first + static_cast<int32_t>(threadIdx.x);
    DealtSequence d{};
    if (index < call_.num_sequences) {
      d.sequence = sequence(index);
      d.splits = splits_of(d.sequence, share_);
      const int32_t units = d.sequence.units();
      if (channel_item_size(units, d.splits, call_.team, share_) != size) d.splits = 0;
    }
    // Items, and parts above them.
    const int64_t items = int64_t{call_.num_kv_heads} * d.splits;
    const auto sums = sums_.scan(items | (d.splits > 1 ? items << 32 : 0));
    d.item = *item + static_cast<int32_t>(sums.before);
    d.part = *part + static_cast<int32_t>(sums.before >> 32);
    *item += static_cast<int32_t>(sums.total);
    *part += static_cast<int32_t>(sums.total >> 32);
    __syncthreads();  // those before have been dealt out
    shared_.dealt[threadIdx.x] = d;
    __syncthreads();
  }

  // A warp for a sequence.
  __device__ void deal(int32_t first) const {
    const int32_t lane = threadIdx.x % 32;
    const int32_t end = min(kChannelPlanThreads, call_.num_sequences - first);
    for (int32_t j = threadIdx.x / 32; j < end; j += kChannelPlanThreads / 32) {
      const DealtSequence& d = shared_.dealt[j];
      if (d.splits == 0) continue;
      const int32_t row = (first + j) * call_.num_kv_heads, units = d.sequence.units();
      const bool is_whole = d.splits == 1;
      for (int32_t i = lane; i < call_.num_kv_heads * d.splits; i += 32) {
        const int32_t head = i / d.splits, split = i - head * d.splits;
        ChannelItem item;
        item.row = row + head;
        item.table_row = d.sequence.table_row < 0 ? -1 : d.sequence.table_row + head;
        item.first = channel_unit(units, d.splits, split);
        item.end = channel_unit(units, d.splits, split + 1);
        item.raw_tokens = d.sequence.raw_tokens;
        item.part = is_whole ? -1 : d.part + i;
        call_.plan.items[d.item + i] = item;
        if (split == 0) call_.plan.parts[row + head] = {is_whole ? 0 : d.part + i, d.splits};
      }
    }
  }

  __device__ void report() const {
    atomicCAS(reinterpret_cast<int32_t*>(call_.status), static_cast<int32_t>(StatusCode::kOk),
              static_cast<int32_t>(StatusCode::kCorrupt));
  }

  const ChannelPlanCall& call_;
  ChannelPlanShared& shared_;
  CtaSums sums_;
  int32_t share_ = 1;
};

__global__ void __launch_bounds__(kChannelPlanThreads)
    channel_plan_kernel(const __grid_constant__ ChannelPlanCall call) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  ChannelPlanner(call, reinterpret_cast<ChannelPlanShared*>(shared_bytes)).run();
}

}  // namespace tierkv
