// The fused decode kernel.
//
// Each warp follows its own item of the plan through its own ring (chunk_feed.cuh,
// warp_attention.cuh); no warp waits for another until its item is done. A row that lies in one
// item is written by its warp. Of other rows each warp leaves a part in shared memory, at most two,
// and the warps of the CTA join those, a column of a row each. Of a row that several CTAs share,
// each leaves one part in global memory and the last to arrive joins them, column by column: nobody
// waits for another CTA, so any number of CTAs may be resident.
#pragma once

#include "attention/chunk_feed.cuh"
#include "attention/head_sum.cuh"
#include "attention/warp_row.cuh"
#include "attention/warp_softmax.cuh"

namespace tierkv {

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

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
class DecodeCta {
 public:
  __device__ DecodeCta(const DecodeParams& params, uint8_t* shared_bytes)
      : p_(params),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        attention_(params.columns, params.scores) {
    const DecodeShared at = decode_shared(kHeadDim, p_.columns.of_row, p_.slot_bytes, p_.slots);
    rings_ = shared_bytes;
    full_ = reinterpret_cast<uint64_t*>(shared_bytes + at.full) + warp_ * kMaxSlots;
    headers_ = reinterpret_cast<ChunkHeader*>(shared_bytes + at.headers) + warp_ * kMaxSlots;
    places_ = reinterpret_cast<ChunkPlace*>(shared_bytes + at.places) + warp_ * kMaxSlots;
    states_ = reinterpret_cast<SoftmaxState*>(shared_bytes + at.states);
    ends_ = reinterpret_cast<WorkItem*>(shared_bytes + at.ends);
    part_rows_ = reinterpret_cast<int32_t*>(shared_bytes + at.part_rows);
    parts_ = reinterpret_cast<float*>(shared_bytes + at.parts);
  }

  __device__ __forceinline__ void run();

 private:
  static constexpr bool kIsPlain = kMode == DecodeMode::kPlain || kMode == DecodeMode::kScored;
  static constexpr bool kKnowsPlaces = kMode != DecodeMode::kPlain;
  static constexpr int32_t kSharedBatch = 8;  // parts in flight when joining from shared memory
  static constexpr int32_t kGlobalBatch = kHeadDim > 128 ? 9 : 18;  // and from global memory
  static constexpr int32_t kParts = 2 * kDecodeWarps;
  static_assert(kParts <= 32, "a lane looks at a part");
  static constexpr int32_t kTurns = kColumnBlocks * kBlockColumns / kDecodeWarps;
  static_assert(kTurns * kDecodeWarps == kColumnBlocks * kBlockColumns,
                "a warp leaves at most kTurns columns of a row");

  __device__ __forceinline__ void attend(const WorkItem& item, const WorkItem& next);
  __device__ __forceinline__ const uint16_t* query() const {
    return static_cast<const uint16_t*>(p_.q);
  }
  __device__ __forceinline__ bool leaves_scores() const {
    return kMode == DecodeMode::kScored || (kKnowsPlaces && p_.scores.codes != nullptr);
  }
  // The rows that began before an item and that go on behind it, or -1.
  struct OpenRows {
    int32_t before, behind;
  };
  __device__ __forceinline__ void finish_row(OpenRows open, int32_t row);
  __device__ __forceinline__ void join_rows();
  __device__ __forceinline__ HeadSum<kHeadDim> join_parts(uint32_t parts, int32_t head) const;
  __device__ __forceinline__ int32_t leave_part(uint32_t parts, int32_t head, RowSpan span) const;
  __device__ __forceinline__ void join_ctas(int32_t row, RowSpan span, int32_t head);
  __device__ __forceinline__ void write(int32_t row, int32_t head,
                                        const HeadSum<kHeadDim>& sum) const;

  __device__ __forceinline__ uint8_t* ring(int32_t warp) const {
    return rings_ + warp * p_.slots * p_.slot_bytes;
  }
  // Part 2 * warp is of the row that began before the warp's item, 2 * warp + 1 of the row that
  // goes on behind it.
  __device__ __forceinline__ float* part(int32_t i) const {
    if (i % 2 != 0) return reinterpret_cast<float*>(ring(i / 2));
    return parts_ + i / 2 * p_.columns.of_row * part_stride(kHeadDim);
  }

  const DecodeParams& p_;
  int32_t warp_, lane_;
  uint8_t* rings_;
  uint64_t* full_;        // of this warp, as
  ChunkHeader* headers_;  // these
  ChunkPlace* places_;
  SoftmaxState* states_;
  WorkItem* ends_;      // the first item of this CTA and of the next one
  int32_t* part_rows_;  // [kParts], -1: no part
  float* parts_;
  WarpAttention<kHeadDim, kColumnBlocks, kMode> attention_;
};

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ void DecodeCta<kHeadDim, kColumnBlocks, kMode>::run() {
  touch_parameters(p_, warp_);
  if (lane_ < p_.slots) init_barrier(&full_[lane_]);
  if (lane_ < 2) part_rows_[2 * warp_ + lane_] = -1;
  publish_barriers();
  if (!leaves_scores()) let_next_kernel_start();
  if (!p_.plan_is_settled) wait_for_previous_kernel();
  // Whoever reads the scores may read what this launch does not write before it waits for it.
  if (leaves_scores()) {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  const int32_t index = blockIdx.x * kDecodeWarps + warp_;
  const WorkItem item = p_.items[index], next = p_.items[index + 1];
  if (warp_ == 0 && lane_ == 0) ends_[0] = item;
  if (warp_ == kDecodeWarps - 1 && lane_ == 0) ends_[1] = next;
  attend(item, next);
  __syncthreads();
  join_rows();
}

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ void DecodeCta<kHeadDim, kColumnBlocks, kMode>::attend(
    const WorkItem& item, const WorkItem& next) {
  ChunkFeed feed(p_, item);
  uint8_t* slots = ring(warp_);
  if (p_.plan_is_settled) {
    if (item.tiles > p_.slots * feed.chunk_tiles()) {
      ChunkFeed ahead = feed;
      prefetch_pieces(prepare_chunk(p_, ahead.next(), slots).pieces);
    }
    wait_for_previous_kernel();
  }
  if (item.tiles == 0) return;
  const auto start_slot = [&](int32_t slot) {
    start_chunk(p_, feed,
                {slots + slot * p_.slot_bytes, &full_[slot], &headers_[slot],
                 kKnowsPlaces ? &places_[slot] : nullptr});
  };
  // Before the queries are asked for: what waits for them would hold up the copies.
#pragma unroll 1
  for (int32_t i = 0; i < p_.slots && feed.has_more(); ++i) start_slot(i);
  const OpenRows open{item.tile > 0 ? item.row : -1, next.tile > 0 ? next.row : -1};
  int32_t row = item.row, slot = 0, left = item.tiles;
  uint32_t parity = 0;
  attention_.fetch_query(query(), row);
  attention_.start_row();
  attention_.sum_query(p_.scale_log2);
  while (true) {
    ChunkHeader header{-1, 0, 0, 0};
    if (left > 0) {
      wait_barrier(&full_[slot], parity);
      header = headers_[slot];
    }
    if (header.row != row) {
      if (left > 0) attention_.fetch_query(query(), header.row);
      finish_row(open, row);
      if (left == 0) return;
      row = header.row;
      attention_.start_row();
      attention_.sum_query(p_.scale_log2);
    }
    if (header.tokens > 0) {
      attention_.use_format(key_bits(header.format), value_bits(header.format), p_.scale_log2);
      attention_.attend({slots + slot * p_.slot_bytes, header.tiles, header.tokens, row,
                         kKnowsPlaces ? &places_[slot] : nullptr});
    }
    left -= header.tiles;
    __syncwarp();
    if (feed.has_more()) start_slot(slot);
    if (++slot == p_.slots) {
      slot = 0;
      parity ^= 1;
    }
  }
}

// The warp's row is done: written where it began and ended here, otherwise left as a part.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ void DecodeCta<kHeadDim, kColumnBlocks, kMode>::finish_row(OpenRows open,
                                                                                      int32_t row) {
  const bool began_before = row == open.before, goes_on = row == open.behind;
  if (!began_before && !goes_on) {
    attention_.write_row(static_cast<uint16_t*>(p_.out), p_.lse, p_.sinks, row);
    return;
  }
  const int32_t i = 2 * warp_ + (began_before ? 0 : 1);
  attention_.store_part(states_ + i * p_.columns.of_row, part(i));
  if (lane_ == 0) part_rows_[i] = row;
}

// By all warps, when all parts are there; a lane looks at each. A warp joins one column of one row
// at a time: first of the rows that other CTAs share, so that the answer to its arrival comes while
// it joins the others.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ void DecodeCta<kHeadDim, kColumnBlocks, kMode>::join_rows() {
  const int32_t row_here = lane_ < kParts ? part_rows_[lane_] : -1;
  uint32_t left = __ballot_sync(kFullWarp, row_here >= 0);
  if (left == 0) return;
  const WorkItem first = ends_[0], next = ends_[1];
  const int32_t columns = p_.columns.of_row;
  const bool has_next = next.tile > 0 && next.row != first.row;
  const int32_t rows[2] = {first.row, has_next ? next.row : -1};
  const RowSpan spans[2] = {{first.span_first, first.span_last}, {next.span_first, next.span_last}};
  const int32_t heads[2] = {warp_, (warp_ + kTurns * kDecodeWarps - columns) % kDecodeWarps};
  int32_t before[2][kTurns];
#pragma unroll
  for (int32_t k = 0; k < 2; ++k) {
    const bool is_shared = rows[k] >= 0 && !spans[k].is_whole();
    const uint32_t parts = __ballot_sync(kFullWarp, is_shared && row_here == rows[k]);
    left &= ~parts;
#pragma unroll
    for (int32_t turn = 0; turn < kTurns; ++turn) {
      const int32_t head = heads[k] + turn * kDecodeWarps;
      before[k][turn] = is_shared && head < columns ? leave_part(parts, head, spans[k]) : -1;
    }
  }
  int32_t own = warp_;
  while (left != 0) {
    const int32_t row = __shfl_sync(kFullWarp, row_here, lowest_bit(left));
    const uint32_t parts = __ballot_sync(kFullWarp, row_here == row);
    left &= ~parts;
    for (; own < columns; own += kDecodeWarps) write(row, own, join_parts(parts, own));
    own -= columns;
  }
#pragma unroll 1
  for (int32_t i = 0; i < 2 * kTurns; ++i) {
    const bool is_next = i >= kTurns;
    const RowSpan span = is_next ? spans[1] : spans[0];
    int32_t others = before[0][0];
#pragma unroll
    for (int32_t k = 1; k < 2 * kTurns; ++k) {
      if (i == k) others = before[k / kTurns][k % kTurns];
    }
    if (__shfl_sync(kFullWarp, others, 0) != span.ctas() - 1) continue;
    const int32_t head = (is_next ? heads[1] : heads[0]) + i % kTurns * kDecodeWarps;
    if (lane_ == 0) p_.arrivals[span.first * kMaxColumns + head] = 0;
    __syncwarp();  // what lane 0 has acquired is there for all
    join_ctas(is_next ? rows[1] : rows[0], span, head);
  }
}

// The parts of the CTA's warps.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ HeadSum<kHeadDim> DecodeCta<kHeadDim, kColumnBlocks, kMode>::join_parts(
    uint32_t parts, int32_t head) const {
  HeadSum<kHeadDim> sum;
  sum.template add_set<kSharedBatch, false>(parts, [&](int32_t i) {
    return typename HeadSum<kHeadDim>::Part{states_ + i * p_.columns.of_row + head,
                                            part(i) + head * part_stride(kHeadDim)};
  });
  return sum;
}

// The CTA's part of a head, in global memory; in lane 0, how many other CTAs had left theirs.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ int32_t DecodeCta<kHeadDim, kColumnBlocks, kMode>::leave_part(
    uint32_t parts, int32_t head, RowSpan span) const {
  const int64_t to = static_cast<int64_t>(part_index(span, blockIdx.x)) * p_.columns.of_row + head;
  join_parts(parts, head).store(p_.part_states + to, p_.parts + to * kHeadDim);
  __syncwarp();
  return lane_ == 0 ? arrive_acq_rel(&p_.arrivals[span.first * kMaxColumns + head]) : -1;
}

// The parts of all CTAs that share the row.
template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ void DecodeCta<kHeadDim, kColumnBlocks, kMode>::join_ctas(int32_t row,
                                                                                     RowSpan span,
                                                                                     int32_t head) {
  HeadSum<kHeadDim> sum;
#pragma unroll 1
  for (int32_t first = span.first; first <= span.last; first += 32) {
    const int32_t count = smaller(32, span.last - first + 1);
    sum.template add_set<kGlobalBatch, true>(kFullWarp >> (32 - count), [&](int32_t i) {
      const int64_t from =
          static_cast<int64_t>(part_index(span, first + i)) * p_.columns.of_row + head;
      return typename HeadSum<kHeadDim>::Part{p_.part_states + from, p_.parts + from * kHeadDim};
    });
  }
  write(row, head, sum);
}

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__device__ __forceinline__ void DecodeCta<kHeadDim, kColumnBlocks, kMode>::write(
    int32_t row, int32_t head, const HeadSum<kHeadDim>& sum) const {
  const int64_t place = p_.columns.place(row, head);
  if (place < 0) return;
  const bool has_sink = !kIsPlain && p_.sinks != nullptr;
  sum.write(static_cast<__half*>(p_.out) + place * kHeadDim,
            p_.lse == nullptr ? nullptr : p_.lse + place, kMode == DecodeMode::kBFloat16,
            has_sink ? p_.sinks[p_.columns.head(row, head)] : -INFINITY);
}

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  DecodeCta<kHeadDim, kColumnBlocks, kMode> cta(params, shared_bytes);
  cta.run();
}

// As decode_kernel_of().
template <int32_t kHeadDim>
DecodeKernel decode_kernel_for(int32_t blocks, DecodeMode mode) {
  if (mode == DecodeMode::kPlain) {
    return blocks == 1 ? decode_kernel<kHeadDim, 1, DecodeMode::kPlain> : nullptr;
  }
  if (mode == DecodeMode::kScored) {
    return blocks == 1 ? decode_kernel<kHeadDim, 1, DecodeMode::kScored> : nullptr;
  }
  const bool is_full = mode == DecodeMode::kFull;
  if constexpr (most_columns(kHeadDim) > kBlockColumns) {
    if (blocks == 2) {
      return is_full ? decode_kernel<kHeadDim, 2, DecodeMode::kFull>
                     : decode_kernel<kHeadDim, 2, DecodeMode::kBFloat16>;
    }
  }
  if (blocks != 1) return nullptr;
  return is_full ? decode_kernel<kHeadDim, 1, DecodeMode::kFull>
                 : decode_kernel<kHeadDim, 1, DecodeMode::kBFloat16>;
}

}  // namespace tierkv
