// The fused decode kernel: CTAs of kDecodeWarps attending warps and one that feeds them.
//
// Each attending warp follows its own item of the plan through its own ring (chunk_feed.cuh,
// warp_attention.cuh); no warp waits for another until its item is done. A row that lies in one
// item is written by its warp. Of other rows each warp leaves a part in shared memory, at most two,
// and the CTA joins those. Of a row that several CTAs share, each leaves one part in global memory
// and the last to arrive joins them: nobody waits for another CTA, so any number of CTAs may be
// resident.
#pragma once

#include "attention/chunk_feed.cuh"
#include "attention/warp_attention.cuh"

namespace tierkv {

inline constexpr int32_t kDecodeThreads = (kDecodeWarps + 1) * 32;

// The CTAs that share a row.
struct RowSpan {
  int32_t first, last;

  __device__ bool is_whole() const { return first == last; }
  __device__ int32_t ctas() const { return last - first + 1; }
};
// The place of a CTA's part: a CTA has at most one row that began before it and one that goes on
// behind it.
__device__ __forceinline__ int32_t part_index(RowSpan span, int32_t cta) {
  return cta == span.first ? 2 * cta + 1 : 2 * cta;
}

template <int32_t kHeadDim>
class DecodeCta {
 public:
  __device__ DecodeCta(const DecodeParams& params, uint8_t* shared_bytes)
      : p_(params), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {
    const DecodeShared at = decode_shared(kHeadDim, p_.group, p_.slot_bytes, p_.slots);
    rings_ = shared_bytes;
    full_ = reinterpret_cast<uint64_t*>(shared_bytes + at.full);
    empty_ = reinterpret_cast<uint64_t*>(shared_bytes + at.empty);
    headers_ = reinterpret_cast<ChunkHeader*>(shared_bytes + at.headers);
    states_ = reinterpret_cast<SoftmaxState*>(shared_bytes + at.states);
    part_rows_ = reinterpret_cast<int32_t*>(shared_bytes + at.part_rows);
    flags_ = reinterpret_cast<int32_t*>(shared_bytes + at.flags);
    parts_ = reinterpret_cast<float*>(shared_bytes + at.parts);
  }

  __device__ __forceinline__ void run();

 private:
  static constexpr int32_t kPairs = kHeadDim / 2;  // a thread joins pairs of dims
  static constexpr int32_t kBatch = 12;  // parts in flight when joining from global memory
  static constexpr int32_t kParts = 2 * kDecodeWarps;

  struct Joined {
    SoftmaxState state;
    float2 sum;
  };
  struct PartRange {
    int32_t first, last;  // of part_rows_
  };

  __device__ __forceinline__ void feed();
  __device__ __forceinline__ void attend();
  __device__ __forceinline__ void begin_row(int32_t row, int32_t k_bits, int32_t v_bits);
  __device__ __forceinline__ void finish_row(const WorkItem& item, const WorkItem& next,
                                             int32_t row);
  __device__ __forceinline__ void join_rows();
  __device__ __forceinline__ void join_warps(int32_t row, PartRange parts, RowSpan span);
  __device__ __forceinline__ Joined join_parts(int32_t row, PartRange parts, int32_t head,
                                               int32_t pair) const;
  __device__ __forceinline__ void join_ctas(int32_t row, RowSpan span);
  __device__ __forceinline__ Joined join_global(RowSpan span, int32_t head, int32_t pair) const;
  __device__ __forceinline__ void write(int32_t row, int32_t head, int32_t pair,
                                        Joined joined) const;

  __device__ __forceinline__ int32_t item_index() const {
    return blockIdx.x * kDecodeWarps + warp_;
  }
  __device__ __forceinline__ uint8_t* ring(int32_t warp) const {
    return rings_ + warp * p_.slots * p_.slot_bytes;
  }
  // Part 2 * warp is of the row that began before the warp's item, 2 * warp + 1 of the row that
  // goes on behind it.
  __device__ __forceinline__ float* part(int32_t i) const {
    if (i % 2 != 0) return reinterpret_cast<float*>(ring(i / 2));
    return parts_ + i / 2 * p_.group * part_stride(kHeadDim);
  }

  const DecodeParams& p_;
  int32_t warp_, lane_;
  uint8_t* rings_;
  uint64_t *full_, *empty_;
  ChunkHeader* headers_;
  SoftmaxState* states_;
  int32_t* part_rows_;  // [kParts], -1: no part
  int32_t* flags_;      // whether this CTA was the last one of the rows that it shares
  float* parts_;
  WarpAttention<kHeadDim> attention_;
};

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::run() {
  if (warp_ == kDecodeWarps) {
    if (lane_ < kDecodeWarps * p_.slots) {
      init_full_barrier(&full_[lane_]);
      init_empty_barrier(&empty_[lane_]);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_kernel_start();
  if (!p_.plan_is_settled) wait_for_previous_kernel();
  if (warp_ == kDecodeWarps) {
    feed();
  } else {
    attend();
  }
  __syncthreads();
  join_rows();
}

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::feed() {
  const int32_t warp = lane_ % kDecodeWarps, index = lane_ / kDecodeWarps;
  WorkItem item{};
  if (index < p_.slots) item = p_.items[blockIdx.x * kDecodeWarps + warp];
  SlotFeed::Place place;
  place.slot = ring(warp) + index * p_.slot_bytes;
  place.full = &full_[lane_];
  place.empty = &empty_[lane_];
  place.header = &headers_[lane_];
  place.index = index;
  SlotFeed slot(p_, item, place);
  if (p_.plan_is_settled) {
    slot.prefetch();
    wait_for_previous_kernel();
  }
  while (__any_sync(kFullWarp, slot.has_chunk())) {
    if (!__any_sync(kFullWarp, slot.issue_if_free())) pause_briefly();
  }
}

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::begin_row(int32_t row, int32_t k_bits,
                                                               int32_t v_bits) {
  const __half* q =
      static_cast<const __half*>(p_.q) + static_cast<int64_t>(row) * p_.group * kHeadDim;
  attention_.use_format(k_bits, v_bits, q, p_.group, p_.scale_log2);
}

template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::attend() {
  const WorkItem item = p_.items[item_index()], next = p_.items[item_index() + 1];
  if (lane_ < 2) part_rows_[2 * warp_ + lane_] = -1;
  __syncwarp();
  if (p_.plan_is_settled) wait_for_previous_kernel();
  if (item.tiles == 0) return;
  int32_t row = item.row, slot = 0;
  uint32_t phase = 0;
  attention_.start_row();
  if (const int32_t tier = tier_of_tile(item); tier < kAttentionTiers) {
    const PageLayout& layout = p_.rows.tiers[tier].layout;
    begin_row(row, layout.k_tile.bits, layout.v_tile.bits);
  }
  for (int32_t left = item.tiles; left > 0;) {
    const int32_t place = slot * kDecodeWarps + warp_;
    wait_barrier(&full_[place], phase);
    const ChunkHeader header = headers_[place];
    if (header.row != row) {
      finish_row(item, next, row);
      attention_.start_row();
      row = header.row;
    }
    if (header.tokens > 0) {
      begin_row(row, header.format >> 8, header.format & 0xff);
      attention_.attend(ring(warp_) + slot * p_.slot_bytes, header.tiles, header.tokens);
    }
    left -= header.tiles;
    __syncwarp();
    if (lane_ == 0) release_barrier(&empty_[place]);
    if (++slot == p_.slots) {
      slot = 0;
      phase ^= 1;
    }
  }
  finish_row(item, next, row);
}

// The warp's row is done: written where it began and ended here, otherwise left as a part.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::finish_row(const WorkItem& item,
                                                                const WorkItem& next, int32_t row) {
  const bool began_before = row == item.row && item.tile > 0;
  const bool goes_on = row == next.row && next.tile > 0;
  if (!began_before && !goes_on) {
    const int64_t column = static_cast<int64_t>(row) * p_.group;
    attention_.write_row(static_cast<__half*>(p_.out) + column * kHeadDim,
                         p_.lse == nullptr ? nullptr : p_.lse + column, p_.group);
    return;
  }
  const int32_t i = 2 * warp_ + (began_before ? 0 : 1);
  attention_.store_part(states_ + i * kMaxGroup, part(i), p_.group);
  if (lane_ == 0) part_rows_[i] = row;
}

// All threads, when all parts are there.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::join_rows() {
  const int32_t here = blockIdx.x;
  const WorkItem first = p_.items[here * kDecodeWarps], next = p_.items[(here + 1) * kDecodeWarps];
  if (first.row == p_.rows.num_rows) return;
  const RowSpan whole{here, here};
  const bool shares_first = first.tile > 0 || first.span_last > here;
  const RowSpan first_span = shares_first ? RowSpan{first.span_first, first.span_last} : whole;
  const bool shares_last = next.tile > 0 && next.row != first.row;
  const RowSpan last_span = shares_last ? RowSpan{next.span_first, next.span_last} : whole;
  for (int32_t i = 0; i < kParts;) {
    const int32_t row = part_rows_[i];
    PartRange parts{i, i};
    for (++i; i < kParts && (part_rows_[i] == row || part_rows_[i] < 0); ++i) parts.last = i;
    if (row < 0) continue;
    join_warps(row, parts, row == first.row ? first_span : row == next.row ? last_span : whole);
  }
  if (!shares_first && !shares_last) return;
  __syncthreads();
  if (threadIdx.x < 2) {
    const RowSpan span = threadIdx.x == 0 ? first_span : last_span;
    flags_[threadIdx.x] =
        !span.is_whole() && arrive_acq_rel(&p_.arrivals[span.first]) == span.ctas() - 1;
  }
  __syncthreads();
  if (flags_[0]) join_ctas(first.row, first_span);
  if (flags_[1]) join_ctas(next.row, last_span);
}

// Joins the parts of the warps, and writes the row or leaves a part.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::join_warps(int32_t row, PartRange parts,
                                                                RowSpan span) {
  for (int32_t i = threadIdx.x; i < p_.group * kPairs; i += kDecodeThreads) {
    const int32_t head = i / kPairs, pair = i % kPairs;
    const Joined joined = join_parts(row, parts, head, pair);
    if (span.is_whole()) {
      write(row, head, pair, joined);
      continue;
    }
    const int64_t to = static_cast<int64_t>(part_index(span, blockIdx.x)) * p_.group + head;
    reinterpret_cast<float2*>(p_.parts + to * kHeadDim)[pair] = joined.sum;
    if (pair == 0) p_.part_states[to] = joined.state;
  }
}

// From shared memory.
template <int32_t kHeadDim>
__device__ __forceinline__ typename DecodeCta<kHeadDim>::Joined DecodeCta<kHeadDim>::join_parts(
    int32_t row, PartRange parts, int32_t head, int32_t pair) const {
  Joined joined{{}, {0.0f, 0.0f}};
  for (int32_t i = parts.first; i <= parts.last; ++i) {
    if (part_rows_[i] != row) continue;
    joined.state.reference = fmaxf(joined.state.reference, states_[i * kMaxGroup + head].reference);
  }
  for (int32_t i = parts.first; i <= parts.last; ++i) {
    if (part_rows_[i] != row) continue;
    const SoftmaxState state = states_[i * kMaxGroup + head];
    if (state.is_empty()) continue;  // its part was not written
    const float2 x = reinterpret_cast<const float2*>(part(i) + head * part_stride(kHeadDim))[pair];
    const float factor = share(state, joined.state);
    joined.state.sum = fmaf(factor, state.sum, joined.state.sum);
    joined.sum.x = fmaf(factor, x.x, joined.sum.x);
    joined.sum.y = fmaf(factor, x.y, joined.sum.y);
  }
  return joined;
}

// By the last of the CTAs that share a row.
template <int32_t kHeadDim>
__device__ __forceinline__ void DecodeCta<kHeadDim>::join_ctas(int32_t row, RowSpan span) {
  for (int32_t i = threadIdx.x; i < p_.group * kPairs; i += kDecodeThreads) {
    const int32_t head = i / kPairs, pair = i % kPairs;
    write(row, head, pair, join_global(span, head, pair));
  }
  if (threadIdx.x == 0) p_.arrivals[span.first] = 0;
}

// kBatch parts at a time.
template <int32_t kHeadDim>
__device__ __forceinline__ typename DecodeCta<kHeadDim>::Joined DecodeCta<kHeadDim>::join_global(
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
