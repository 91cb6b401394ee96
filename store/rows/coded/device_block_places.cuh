// SPDX-License-Identifier: Apache-2.0
// place_block() of many blocks, by a CTA. Sums of units say for every block which one would begin
// the page behind a page that begins with it; a thread then steps from page to page.
#pragma once

#include "gpu/lanes.cuh"
#include "gpu/warp_sums.cuh"
#include "tierkv/status.h"

namespace tierkv::store {

// In shared memory.
class BlockPlaces {
 public:
  static constexpr int32_t kThreads = 256, kShare = 4;
  static constexpr int32_t kChunk = kThreads * kShare;  // blocks that are placed at once

  // Places `blocks` blocks behind `used` units; none is larger than a page. units_of(i) says how
  // large block i is, write(i, at, units) takes its place. Returns the units used then.
  template <class UnitsOf, class Write>
  __device__ int32_t place(int32_t used, int32_t blocks, int32_t page_units,
                           const UnitsOf& units_of, const Write& write) {
    Room room{used, page_units - used % page_units};
    for (int32_t from = 0; from < blocks; from += kChunk) {
      const int32_t count = blocks - from < kChunk ? blocks - from : kChunk;
      add_up(count, [&](int32_t i) { return units_of(from + i); });
      find_pages(count, room.left, page_units);
      for (auto i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
        write(from + i, room_before(room, i, page_units).used, before_[i + 1] - before_[i]);
      }
      room = room_before(room, count, page_units);
      __syncthreads();
    }
    return room.used;
  }

 private:
  // Units before the next block, and behind it on its page.
  struct Room {
    int32_t used, left;
  };

  template <class UnitsOf>
  __device__ void add_up(int32_t count, const UnitsOf& units_of) {
    const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / kWarpLanes;
    for (int32_t i = thread; i < kChunk; i += kThreads) next_[i] = i < count ? units_of(i) : 0;
    __syncthreads();
    int32_t units[kShare], mine = 0, of_warp;
    for (int32_t i = 0; i < kShare; ++i) mine += units[i] = next_[thread * kShare + i];
    int32_t sum = sum_before(mine, &of_warp);
    if (lane_index() == 0) sums_[warp] = of_warp;
    __syncthreads();
    for (int32_t w = 0; w < warp; ++w) sum += sums_[w];
    for (int32_t i = 0; i < kShare; ++i) {
      before_[thread * kShare + i] = sum;
      sum += units[i];
    }
    if (thread == kThreads - 1) before_[kChunk] = sum;
    __syncthreads();
  }
  // The least i of begin .. end for which is_beyond(i); end: there is none. Once true it stays so.
  template <class IsBeyond>
  __device__ static int32_t first_where(int32_t begin, int32_t end, const IsBeyond& is_beyond) {
    while (begin < end) {
      const int32_t middle = (begin + end) / 2;
      if (is_beyond(middle)) {
        end = middle;
      } else {
        begin = middle + 1;
      }
    }
    return begin;
  }
  // The first block from `begin` on that `units` units before its end do not reach to.
  __device__ int32_t first_beyond(int32_t begin, int32_t units, int32_t count) const {
    return first_where(begin, count,
                       [&](int32_t i) { return before_[i + 1] - before_[begin] > units; });
  }
  // left: units behind the first block on its page.
  __device__ void find_pages(int32_t count, int32_t left, int32_t page_units) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      const int32_t next = first_beyond(i, page_units, count);
      next_[i] = next > i ? next : i + 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      pages_ = 0;
      for (int32_t b = first_beyond(0, left, count); b < count; b = next_[b]) {
        begins_[pages_++] = b;
      }
    }
    __syncthreads();
  }
  // What `room`, of the chunk's beginning, has become before its block i.
  __device__ Room room_before(const Room& room, int32_t i, int32_t page_units) const {
    const int32_t begun = first_where(0, pages_, [&](int32_t p) { return begins_[p] > i; });
    if (begun == 0) return {room.used + before_[i], room.left - before_[i]};
    const int32_t on_page = before_[i] - before_[begins_[begun - 1]];
    return {room.used + room.left + (begun - 1) * page_units + on_page, page_units - on_page};
  }

  int32_t before_[kChunk + 1];  // units of the chunk's blocks before each
  int32_t next_[kChunk];        // the first block that a page which begins with this one has not
  int32_t begins_[kChunk];      // the blocks that begin a page,
  int32_t pages_;               // so many
  int32_t sums_[kThreads / kWarpLanes];
};

}  // namespace tierkv::store
