// The fused decode kernel: one CTA per item of the plan.
//
// Each warp streams its own chunks through its own ring (chunk_feed.cuh) and attends to them
// (warp_attention.cuh); no warp waits for another inside a row. At the end of a row the CTA joins
// the parts of its warps. A row that lies in one item is written at once; of a row that several
// items share, each leaves a part in global memory and the last to arrive joins them all: nobody
// waits for another CTA, so any number of CTAs may be resident.
//
// Two items that meet in a row finish at different times: the second one begins with it, the first
// ends with it. So when its last chunks are in flight the first item looks whether the other part
// has arrived, and if so takes it along as if it were a ninth warp's.
#pragma once

#include "attention/chunk_feed.cuh"
#include "attention/warp_attention.cuh"

namespace tierkv {

inline constexpr int32_t kDecodeThreads = kDecodeWarps * 32;

// The rows that several items share: who else has a part, and where ours goes.
struct RowSpan {
  int32_t first, last;  // items

  __device__ bool is_whole() const { return first == last; }
  __device__ int32_t items() const { return last - first + 1; }
};
// The place of an item's part: an item has at most one row that began before it and one that goes
// on behind it.
__device__ __forceinline__ int32_t part_index(RowSpan span, int32_t item) {
  return item == span.first ? 2 * item + 1 : 2 * item;
}

template <int32_t kHeadDim>
class DecodeCta {
 public:
  __device__ DecodeCta(const DecodeParams& params, uint8_t* shared_bytes)
      : p_(params), warp_(threadIdx.x / 32) {
    const DecodeShared at = decode_shared(kHeadDim, p_.group, p_.slot_bytes, p_.slots);
    ring_ = shared_bytes + warp_ * p_.slots * p_.slot_bytes;
    barriers_ = reinterpret_cast<uint64_t*>(shared_bytes + at.barriers) + warp_ * kMaxSlots;
    headers_ = reinterpret_cast<ChunkHeader*>(shared_bytes + at.headers) + warp_ * kMaxSlots;
    states_ = reinterpret_cast<SoftmaxState*>(shared_bytes + at.states);
    flags_ = reinterpret_cast<int32_t*>(shared_bytes + at.flags);
    parts_ = reinterpret_cast<float*>(shared_bytes + at.parts);
  }

  __device__ __forceinline__ void run();

 private:
  static constexpr int32_t kPairs = kHeadDim / 2;  // a thread joins pairs of dims
  static constexpr int32_t kEarly = 0;             // flag: the other part was taken along
  static constexpr int32_t kLast = 1;              // flag: this item is the last to arrive
  static constexpr int32_t kPartStride = WarpAttention<kHeadDim>::kPartStride;
  static constexpr int32_t kBatch = 8;  // parts in flight when joining from global memory

  struct Joined {
    SoftmaxState state;
    float2 sum;
  };

  __device__ __forceinline__ void prefetch_first_chunks() const;
  __device__ __forceinline__ void attend_to_row(int32_t row, ChunkFeed& feed, RowSpan tail);
  __device__ __forceinline__ void fetch_early_part(RowSpan span);
  __device__ __forceinline__ void finish_row(int32_t row, RowSpan span);
  __device__ __forceinline__ Joined join_warps(int32_t head, int32_t pair, int32_t parts) const;
  __device__ __forceinline__ Joined join_items(RowSpan span, int32_t head, int32_t pair) const;
  __device__ __forceinline__ void write(int32_t row, int32_t head, int32_t pair,
                                        Joined joined) const;

  const DecodeParams& p_;
  int32_t warp_;
  uint8_t* ring_;  // of this warp
  uint64_t* barriers_;
  ChunkHeader* headers_;
  SoftmaxState* states_;  // of all warps
  int32_t* flags_;        // [kEarly], [kLast]
  float* parts_;
  WarpAttention<kHeadDim> attention_;
  int32_t in_flight_ = 0, slot_ = 0, phase_ = 0;
};

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::prefetch_first_chunks() const {
  ChunkFeed feed(p_, p_.items[blockIdx.x], warp_);
  for (int32_t i = 0; i < p_.slots && feed.remaining() > 0; ++i) feed.prefetch();
}

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::run() {
  if (threadIdx.x % 32 == 0) {
    for (int32_t i = 0; i < p_.slots; ++i) init_barrier(&barriers_[i]);
  }
  publish_barriers();
  let_next_kernel_start();
  if (p_.plan_is_settled) prefetch_first_chunks();
  wait_for_previous_kernel();

  const WorkItem item = p_.items[blockIdx.x], next = p_.items[blockIdx.x + 1];
  if (item.num_chunks == 0) return;
  ChunkFeed feed(p_, item, warp_);
  for (; in_flight_ < p_.slots && feed.remaining() > 0; ++in_flight_) {
    feed.issue(ring_ + in_flight_ * p_.slot_bytes, &barriers_[in_flight_], &headers_[in_flight_]);
  }
  const int32_t here = blockIdx.x, last_row = next.chunk > 0 ? next.row : next.row - 1;
  for (int32_t row = item.row; row <= last_row; ++row) {
    RowSpan span{here, here};
    if (row == item.row) {
      span = {item.span_first, item.span_last};
    } else if (row == last_row && next.chunk > 0) {
      span = {next.span_first, next.span_last};
    }
    const bool early = row == last_row && span.first == here && span.last == here + 1;
    __syncthreads();  // the parts and flags of the row before have been read
    if (threadIdx.x == 0) flags_[kEarly] = 0;
    attention_.start_row();
    attend_to_row(row, feed, early ? span : RowSpan{here, here});
    finish_row(row, span);
  }
}

// The chunks of `row` in this warp's ring. `tail` is shared with one other item when this row is
// the item's last.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::attend_to_row(int32_t row, ChunkFeed& feed,
                                                                   RowSpan tail) {
  const __half* q =
      static_cast<const __half*>(p_.q) + static_cast<int64_t>(row) * p_.group * kHeadDim;
  while (in_flight_ > 0) {
    const ChunkHeader header = headers_[slot_];
    if (header.row != row) return;
    const PageLayout& page = p_.rows.tiers[header.tier].layout;
    const bool last_chunk = in_flight_ == 1 && feed.remaining() == 0;
    if (warp_ == 0 && last_chunk && !tail.is_whole()) fetch_early_part(tail);
    if (header.tokens > 0) {
      attention_.use_format(page.k_tile.bits, page.v_tile.bits, q, p_.group, p_.scale_log2);
    }
    wait_barrier(&barriers_[slot_], phase_);
    const ChunkSegments s(page, header.tiles);
    ChunkBytes chunk;
    chunk.k_codes = ring_ + slot_ * p_.slot_bytes;
    chunk.k_metadata = chunk.k_codes + s.k_bytes;
    chunk.v_codes = chunk.k_metadata + s.k_metadata_bytes;
    chunk.v_metadata = chunk.v_codes + s.v_bytes;
    for (int32_t tile = 0; tile < header.tiles; tile += kStepTiles) {
      attention_.attend(chunk, tile, header.tokens - tile * kTileTokens);
    }
    __syncwarp();
    --in_flight_;
    if (feed.remaining() > 0) {
      feed.issue(ring_ + slot_ * p_.slot_bytes, &barriers_[slot_], &headers_[slot_]);
      ++in_flight_;
    }
    if (++slot_ == p_.slots) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }
}

// Warp 0: the part of the one other item of a row, if it is there.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::fetch_early_part(RowSpan span) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t arrived = lane == 0 ? load_acquire(&p_.arrivals[span.first]) : 0;
  if (__shfl_sync(kFullWarp, arrived, 0) != span.items() - 1) return;
  __syncwarp();
  const int64_t from = static_cast<int64_t>(part_index(span, span.last)) * p_.group;
  float* to = parts_ + kDecodeWarps * p_.group * kPartStride;
  for (int32_t i = lane; i < p_.group * kHeadDim / 4; i += 32) {
    const int32_t head = i / (kHeadDim / 4), dim = i % (kHeadDim / 4) * 4;
    const auto* source = reinterpret_cast<const float4*>(p_.parts + (from + head) * kHeadDim + dim);
    *reinterpret_cast<float4*>(to + head * kPartStride + dim) = __ldcg(source);
  }
  if (lane < p_.group) {
    const auto* source = reinterpret_cast<const float2*>(p_.part_states + from + lane);
    const float2 state = __ldcg(source);
    states_[kDecodeWarps * kMaxGroup + lane] = {state.x, state.y};
  }
  if (lane == 0) flags_[kEarly] = 1;
}

// All threads. Joins the parts of the warps and writes the row, or leaves a part and writes it if
// it is the last one.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::finish_row(int32_t row, RowSpan span) {
  attention_.store_part(states_ + warp_ * kMaxGroup, parts_ + warp_ * p_.group * kPartStride,
                        p_.group);
  __syncthreads();
  const bool early = flags_[kEarly] != 0, complete = early || span.is_whole();
  const int32_t parts = kDecodeWarps + (early ? 1 : 0), pairs = p_.group * kPairs;
  for (int32_t i = threadIdx.x; i < pairs; i += kDecodeThreads) {
    const int32_t head = i / kPairs, pair = i % kPairs;
    const Joined joined = join_warps(head, pair, parts);
    if (complete) {
      write(row, head, pair, joined);
    } else {
      const int64_t to = static_cast<int64_t>(part_index(span, blockIdx.x)) * p_.group + head;
      reinterpret_cast<float2*>(p_.parts + to * kHeadDim)[pair] = joined.sum;
      if (pair == 0) p_.part_states[to] = joined.state;
    }
  }
  if (complete) {
    if (early && threadIdx.x == 0) p_.arrivals[span.first] = 0;
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    flags_[kLast] = arrive_acq_rel(&p_.arrivals[span.first]) == span.items() - 1;
  }
  __syncthreads();
  if (flags_[kLast] == 0) return;
  for (int32_t i = threadIdx.x; i < pairs; i += kDecodeThreads) {
    const int32_t head = i / kPairs, pair = i % kPairs;
    write(row, head, pair, join_items(span, head, pair));
  }
  if (threadIdx.x == 0) p_.arrivals[span.first] = 0;
}

// From shared memory.
template <int32_t kHeadDim>
__device__ __forceinline__ typename DecodeCta<kHeadDim>::Joined DecodeCta<kHeadDim>::join_warps(
    int32_t head, int32_t pair, int32_t parts) const {
  Joined joined{{}, {0.0f, 0.0f}};
  for (int32_t w = 0; w < parts; ++w) {
    joined.state.reference = fmaxf(joined.state.reference, states_[w * kMaxGroup + head].reference);
  }
  for (int32_t w = 0; w < parts; ++w) {
    const SoftmaxState state = states_[w * kMaxGroup + head];
    if (state.is_empty()) continue;  // its part was not written
    const float* part = parts_ + (w * p_.group + head) * kPartStride;
    const float2 x = reinterpret_cast<const float2*>(part)[pair];
    const float factor = share(state, joined.state);
    joined.state.sum = fmaf(factor, state.sum, joined.state.sum);
    joined.sum.x = fmaf(factor, x.x, joined.sum.x);
    joined.sum.y = fmaf(factor, x.y, joined.sum.y);
  }
  return joined;
}

// From global memory, kBatch parts at a time.
template <int32_t kHeadDim>
__device__ __forceinline__ typename DecodeCta<kHeadDim>::Joined DecodeCta<kHeadDim>::join_items(
    RowSpan span, int32_t head, int32_t pair) const {
  Joined joined{{}, {0.0f, 0.0f}};
  for (int32_t first = span.first; first <= span.last; first += kBatch) {
    SoftmaxState states[kBatch];
    float2 x[kBatch];
#pragma unroll
    for (int32_t j = 0; j < kBatch; ++j) {
      states[j] = {};
      x[j] = {0.0f, 0.0f};
      if (first + j > span.last) continue;
      const int64_t from = static_cast<int64_t>(part_index(span, first + j)) * p_.group + head;
      const float2 state = __ldcg(reinterpret_cast<const float2*>(p_.part_states + from));
      states[j] = {state.x, state.y};
      x[j] = __ldcg(reinterpret_cast<const float2*>(p_.parts + from * kHeadDim) + pair);
    }
    SoftmaxState whole = joined.state;
#pragma unroll
    for (int32_t j = 0; j < kBatch; ++j) {
      whole.reference = fmaxf(whole.reference, states[j].reference);
    }
    const float kept = share(joined.state, whole);
    joined = {{whole.reference, kept * joined.state.sum},
              {kept * joined.sum.x, kept * joined.sum.y}};
#pragma unroll
    for (int32_t j = 0; j < kBatch; ++j) {
      if (states[j].is_empty()) continue;
      const float factor = share(states[j], whole);
      joined.state.sum = fmaf(factor, states[j].sum, joined.state.sum);
      joined.sum.x = fmaf(factor, x[j].x, joined.sum.x);
      joined.sum.y = fmaf(factor, x[j].y, joined.sum.y);
    }
  }
  return joined;
}

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::write(int32_t row, int32_t head, int32_t pair,
                                                           Joined joined) const {
  const int64_t place = static_cast<int64_t>(row) * p_.group + head;
  const float scale = output_scale(joined.state);
  static_cast<__half2*>(p_.out)[place * kPairs + pair] =
      __floats2half2_rn(joined.sum.x * scale, joined.sum.y * scale);
  if (pair == 0 && p_.lse != nullptr) p_.lse[place] = natural_lse(joined.state);
}

template <int32_t kHeadDim>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  DecodeCta<kHeadDim> cta(params, shared_bytes);
  cta.run();
}

}  // namespace tierkv
