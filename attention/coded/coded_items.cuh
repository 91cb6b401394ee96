// SPDX-License-Identifier: Apache-2.0
// How the items of a call are dealt out to warps, and how a warp goes through its own, row by row.
#pragma once

#include "attention/coded/coded_params.h"
#include "gpu/lanes.cuh"

namespace tierkv {

// By the whole warp: the last row whose first item is at most `item`.
__device__ __forceinline__ int32_t find_row(const CodedAttention& call, int32_t item) {
  int32_t low = 0, count = call.num_rows;
  while (count > 1) {
    const int32_t stride = (count + 31) / 32, i = static_cast<int32_t>(threadIdx.x % 32) * stride;
    const bool before = i < count && call.rows[low + i].first_item <= item;
    const int32_t found = max(1, __popc(__ballot_sync(kFullWarp, before)));
    low += (found - 1) * stride;
    count = min(stride, count - (found - 1) * stride);
  }
  return low;
}

// Items in turn dealt out as evenly as can be: `longer` shares have one more than the others, the
// first ones.
struct EvenShares {
  int32_t least, longer;

  __device__ __forceinline__ EvenShares(int32_t items, int32_t shares)
      : least(items / shares), longer(items % shares) {}
  // Share i has items begin(i) .. begin(i + 1) - 1.
  __device__ __forceinline__ int32_t begin(int32_t i) const { return i * least + min(i, longer); }
  // The share that an item is in.
  __device__ __forceinline__ int32_t of(int32_t item) const {
    const int32_t in_longer = longer * (least + 1);
    return item < in_longer ? item / (least + 1) : longer + (item - in_longer) / least;
  }
};

// How the items are dealt out: to CTAs, then to the warps of each. So the warps of a CTA, and of a
// scheduler of it, have neighbouring rows, of different heads, some of which take longer. After
// wait_for_previous_kernel().
struct ItemShares {
  int32_t items, warps_of_cta;
  EvenShares ctas;

  __device__ __forceinline__ EvenShares warps(int32_t cta) const {
    return {ctas.begin(cta + 1) - ctas.begin(cta), warps_of_cta};
  }
  // A warp of a CTA has the items from begin(cta, warp) to begin(cta, warp + 1) - 1.
  __device__ __forceinline__ int32_t begin(int32_t cta, int32_t warp) const {
    return ctas.begin(cta) + warps(cta).begin(warp);
  }
  // Warps are numbered in the order of their items, those without items left out: these are there
  // only where no warp has more than one.
  __device__ __forceinline__ bool are_single() const { return ctas.least < warps_of_cta; }
  __device__ __forceinline__ int32_t number(int32_t cta, int32_t warp) const {
    return are_single() ? begin(cta, warp) : cta * warps_of_cta + warp;
  }
  __device__ __forceinline__ int32_t warp_of(int32_t item) const {
    if (are_single()) return item;
    const int32_t cta = ctas.of(item);
    return number(cta, warps(cta).of(item - ctas.begin(cta)));
  }
};
__device__ __forceinline__ ItemShares item_shares(const CodedKernelParams& params) {
  const CodedAttention& call = params.call;
  const int32_t items =
      call.item_count == nullptr ? call.num_items : min(*call.item_count, call.num_items);
  return {items, params.grid.warps, EvenShares(items, params.grid.num_ctas)};
}

// The items of a warp, row by row.
struct WarpItems {
  const CodedAttention& call;
  int32_t row, first, end;  // the items of a row in turn
  int32_t last;             // of the warp

  // Items begin .. end - 1; false where there are none.
  __device__ __forceinline__ bool begin(int32_t begin, int32_t end) {
    last = end;
    if (begin >= last) return false;
    first = begin;
    row = find_row(call, first);
    find_end();
    return true;
  }
  __device__ __forceinline__ bool next_row() {
    if (end >= last) return false;
    first = end;
    ++row;
    find_end();
    return true;
  }

 private:
  // Rows without items are passed over.
  __device__ __forceinline__ void find_end() {
    end = last;
    int32_t next = row + 1;
    while (next < call.num_rows && call.rows[next].first_item <= first) row = next++;
    if (next < call.num_rows) end = min(last, call.rows[next].first_item);
  }
};

}  // namespace tierkv
