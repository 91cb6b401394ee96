// How the items of a call are dealt out to warps, and how a warp goes through its own, row by row.
#pragma once

#include "attention/coded_params.h"
#include "attention/ptx.cuh"

namespace tierkv {

// By the whole warp: the last row whose first item is at most `item`.
template <class Call>
__device__ __forceinline__ int32_t find_row(const Call& call, int32_t item) {
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

inline constexpr int32_t kCodedWarps = coded_warps(kSliceDims);

// How the items are dealt out, as evenly as can be: `longer` warps have one more than the others,
// the first ones, which are spread over all CTAs. After wait_for_previous_kernel().
struct ItemShares {
  int32_t items, least, longer;

  // Warp w has items begin(w) .. begin(w + 1) - 1.
  __device__ __forceinline__ int32_t begin(int32_t warp) const {
    return warp * least + min(warp, longer);
  }
  __device__ __forceinline__ int32_t warp_of(int32_t item) const {
    const int32_t in_longer = longer * (least + 1);
    return item < in_longer ? item / (least + 1) : longer + (item - in_longer) / least;
  }
};
__device__ __forceinline__ ItemShares item_shares(const CodedKernelParams& params,
                                                  int32_t warps_of_cta = kCodedWarps) {
  const CodedAttention& call = params.call;
  const int32_t items =
      call.item_count == nullptr ? call.num_items : min(*call.item_count, call.num_items);
  const int32_t warps = params.grid.num_ctas * warps_of_cta;
  return {items, items / warps, items % warps};
}

// The items of a warp, row by row.
template <class Call>
struct WarpItems {
  const Call& call;
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
