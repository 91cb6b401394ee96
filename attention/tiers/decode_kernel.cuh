// SPDX-License-Identifier: Apache-2.0
// The fused decode kernel.
//
// Each warp follows its own item of the plan through its own ring (chunk_feed.cuh,
// warp_attention.cuh); no warp waits for another until its item is done. A row that lies in one
// item is written by its warp. For other rows each warp leaves at most two parts in shared memory,
// and the warps of the CTA join those, a column of a row each. CTAs that share a row leave one part
// each in global memory, for the kernel of shared_rows.cuh, which follows.
#pragma once

#include <type_traits>

#include "attention/core/parts_join.cuh"
#include "attention/tiers/chunk_feed.cuh"
#include "attention/tiers/shared_rows.h"
#include "attention/tiers/warp_attention.cuh"
#include "gpu/barrier.cuh"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode, bool kFewWarps>
class DecodeCta {
 public:
  using Params = DecodeParamsOf<classes_of(kMode)>;
  using Feed = ChunkFeed<classes_of(kMode)>;

  __device__ DecodeCta(const Params& params, uint8_t* shared_bytes)
      : p_(params),
        warp_(held(static_cast<int32_t>(threadIdx.x) / 32)),
        lane_(threadIdx.x % 32),
        attention_(params.columns) {
    const DecodeShared at =
        decode_shared(kHeadDim, p_.columns.of_row, p_.slot_bytes, p_.slots, warps());
    rings_ = shared_bytes;
    uint8_t* rest = shared_bytes + held(at.full);
    full_ = reinterpret_cast<uint64_t*>(rest) + warp_ * kMaxSlots;
    headers_ = reinterpret_cast<ChunkHeader*>(rest + (at.headers - at.full)) + warp_ * kMaxSlots;
    places_ = reinterpret_cast<ChunkPlace*>(rest + (at.places - at.full)) + warp_ * kMaxSlots;
    states_ = reinterpret_cast<SoftmaxState*>(rest + (at.states - at.full));
    ends_ = reinterpret_cast<WorkItem*>(rest + (at.ends - at.full));
    part_rows_ = reinterpret_cast<int32_t*>(rest + (at.part_rows - at.full));
    parts_ = reinterpret_cast<float*>(rest + (at.parts - at.full));
  }

  __device__ __forceinline__ void run() {
    touch_parameters(p_, warp_);
    if (lane_ < p_.slots) init_barrier(&full_[lane_]);
    if (lane_ < 2) part_rows_[2 * warp_ + lane_] = -1;
    // A warp without work keeps these states, and it may lie between warps that share a row.
    if (lane_ < p_.columns.of_row) states_[2 * warp_ * p_.columns.of_row + lane_] = SoftmaxState{};
    publish_barriers();
    if (!p_.plan_is_settled) wait_for_previous_kernel();
    let_next_kernel_start();
    const int32_t index = blockIdx.x * warps() + warp_;
    const WorkItem item = p_.items[index], next = p_.items[index + 1];
    if (warp_ == 0 && lane_ == 0) ends_[0] = item;
    if (warp_ == warps() - 1 && lane_ == 0) ends_[1] = next;
    attend(item, next);
    __syncthreads();
    join_rows();
  }

 private:
  static constexpr bool kIsPlain = is_plain(kMode);
  static constexpr bool kKnowsPlaces = !kIsPlain;
  // The first chunk is made ready while the kernel before still runs; a place may need what that
  // kernel writes.
  static constexpr bool kPreparesFirst = !kKnowsPlaces;
  static constexpr bool kHasSpareSlots = most_slots(kHeadDim) > kChunksInFlight;
  static constexpr int32_t kJoinDims = 128;  // of a warp
  static constexpr int32_t kSlices = slices_of(kHeadDim, kJoinDims);
  static_assert(2 * kDecodeWarps <= 32, "a lane looks at a part");
  __device__ __forceinline__ int32_t warps() const {
    if constexpr (kFewWarps) {
      return p_.warps;
    } else {
      return kDecodeWarps;
    }
  }
  // The others have no registers for it.
  __device__ __forceinline__ static int32_t held(int32_t x) { return kIsPlain ? kept(x) : x; }

  __device__ __forceinline__ void attend(const WorkItem& item, const WorkItem& next) {
    Feed feed(p_, item);
    RingOrder ring(p_.slots);
    const int32_t ring_at = held(warp_ * p_.slots * p_.slot_bytes);
    const auto slot_bytes = [&](int32_t slot) { return rings_ + (ring_at + slot * p_.slot_bytes); };
    // Chunks in a row that were full pages of one tier and the last ones that were started: they
    // have one header.
    int32_t alike = 0;
    const auto start_slot = [&](int32_t slot) {
      const bool is_page = start_chunk(p_, feed,
                                       {slot_bytes(slot), &full_[slot], &headers_[slot],
                                        kKnowsPlaces ? &places_[slot] : nullptr},
                                       !kKnowsPlaces && alike >= p_.slots);
      alike = is_page ? alike + 1 : 0;
    };
    int32_t early = early_chunks(item, feed);
    if (kPreparesFirst && item.tiles > 0) {
      if (!feed.is_settled()) early = 0;
      const ReadyChunk first = prepare_chunk(p_, feed.next(), slot_bytes(ring.start()));
      if (early == 0) {
        if (p_.plan_is_settled) prefetch_pieces(first.pieces);
        wait_for_previous_kernel();
      }
      copy_pieces(&full_[0], first.pieces);
      announce_chunk(p_, first.header, first.is_stray, &headers_[0]);
    }
#pragma unroll 1
    while (ring.pending() < early && feed.has_more() && feed.is_settled()) start_slot(ring.start());
    wait_for_previous_kernel();
    if (item.tiles == 0) return;
    attention_.fetch_query(query(), item.row);
#pragma unroll 1
    while (ring.may_start() && feed.has_more()) start_slot(ring.start());
    __syncwarp();
    const OpenRows open{item.tile > 0 ? item.row : -1, next.tile > 0 ? next.row : -1};
    int32_t row = item.row, left = item.tiles;
    attention_.start_row();
    attention_.sum_query(p_.scale_log2);
    ChunkHeader header{-1, 0, 0, 0};
    while (true) {
      int32_t slot = ring.slot();
      // Otherwise this chunk has the header of the one before; kernels that know places have no
      // registers to keep it.
      if (kKnowsPlaces || alike <= p_.slots) {
        header = left > 0 ? headers_[slot] : ChunkHeader{-1, 0, 0, 0};
        if (header.row != row) {
          if (left > 0) attention_.fetch_query(query(), header.row);
          finish_row(open, row);
          if (left == 0) return;
          row = header.row;
          attention_.start_row();
          attention_.sum_query(p_.scale_log2);
        }
        if (header.tokens > 0) {
          attention_.use_format(key_type(header.format), value_type(header.format), p_.scale_log2);
        }
      }
      wait_barrier(&full_[slot], ring.parity());
      if (header.tokens > 0) {
        attention_.attend({slot_bytes(slot), header.tiles, header.tokens, row,
                           kKnowsPlaces ? &places_[slot] : nullptr});
      }
      left -= header.tiles;
      ring.pass();
      __syncwarp();
      // Into the slot that is free now; where there are spare ones, into the next one, and
      // otherwise nobody asks what is pending.
      bool starts = feed.has_more();
      if (!starts) alike = 0;
      if (starts && kHasSpareSlots && p_.slots > kChunksInFlight) {
        starts = ring.may_start() || has_arrived(&full_[ring.slot()], ring.parity());
        if (starts) slot = ring.start();
      }
      if (starts) start_slot(slot);
      __syncwarp();  // the header is there for all
    }
  }
  __device__ __forceinline__ const uint16_t* query() const {
    return static_cast<const uint16_t*>(p_.q);
  }
  // Chunks whose copies begin while the kernel before ends: as many as there is room for. They hold
  // up the joins at its end, so that items that gain less have none: those of a few chunks, but
  // more than are on their way at a time, and those whose arithmetic binds.
  __device__ __forceinline__ int32_t early_chunks(const WorkItem& item, const Feed& feed) const {
    constexpr int32_t kFewChunks = 8;
    if (!p_.plan_is_settled) return 0;
    const int32_t chunk_tiles = feed.chunk_tiles();
    const bool is_tiny = item.tiles <= kChunksInFlight * chunk_tiles;
    const bool is_long = item.tiles > kFewChunks * chunk_tiles && p_.slot_bytes >= kLargeChunkBytes;
    return is_tiny || is_long ? p_.slots : 0;
  }
  // The rows that began before an item and that go on behind it, or -1.
  struct OpenRows {
    int32_t before, behind;
  };
  // The warp's row is done: written where it began and ended here, otherwise left as a part.
  __device__ __forceinline__ void finish_row(OpenRows open, int32_t row) {
    const bool began_before = row == open.before, goes_on = row == open.behind;
    if (!began_before && !goes_on) {
      attention_.write_row(static_cast<uint16_t*>(p_.out), p_.lse, p_.sinks, row);
      return;
    }
    const int32_t i = 2 * warp_ + (began_before ? 0 : 1);
    attention_.store_part(states_ + i * p_.columns.of_row, part(i));
    if (lane_ == 0) part_rows_[i] = row;
  }
  // By all warps, when all parts are there; a lane looks at each. A warp joins one slice of a
  // column of a row at a time.
  __device__ __forceinline__ void join_rows() {
    const int32_t row_here = lane_ < 2 * warps() ? part_rows_[lane_] : -1;
    uint32_t left = __ballot_sync(kFullWarp, row_here >= 0);
    if (left == 0) return;
    const int32_t tasks = p_.columns.of_row * kSlices;
    int32_t task = warp_;
#pragma unroll 1
    while (left != 0) {
      const int32_t row = __shfl_sync(kFullWarp, row_here, lowest_bit(left));
      const uint32_t parts = __ballot_sync(kFullWarp, row_here == row);
      left &= ~parts;
#pragma unroll 1
      for (; task < tasks; task += warps()) join_slice(row, parts, task);
      task -= tasks;
    }
  }
  // Joins the parts of the CTA's warps: to the row's output, or to the CTA's part of a row that
  // several CTAs share.
  __device__ __forceinline__ void join_slice(int32_t row, uint32_t parts, int32_t task) const {
    const int32_t of_row = p_.columns.of_row, column = task / kSlices, slice = task % kSlices;
    const int32_t from = lowest_bit(parts), first_warp = from / 2,
                  last_warp = highest_bit(parts) / 2;
    const int32_t dims = column * kHeadDim + slice * kJoinDims;
    PartsJoin<kJoinDims, 4, false> join(kHeadDim - slice * kJoinDims);
    join.join({states_ + from * of_row + column, states_ + 2 * first_warp * of_row + column,
               part(from) + dims, part(2 * first_warp) + dims, 2 * of_row, of_row * kHeadDim,
               last_warp - first_warp + 1, part_swizzle(column)});
    const bool began_before = row == ends_[0].row && ends_[0].tile > 0;
    if (began_before || (row == ends_[1].row && ends_[1].tile > 0)) {
      const int64_t to =
          static_cast<int64_t>(part_index(blockIdx.x, began_before)) * of_row + column;
      join.store(slice == 0 ? p_.part_states + to : nullptr,
                 p_.parts + to * kHeadDim + slice * kJoinDims);
      return;
    }
    const int64_t place = p_.columns.place(row, column);
    if (place < 0) return;
    const bool has_sink = !kIsPlain && p_.sinks != nullptr;
    join.write({static_cast<uint16_t*>(p_.out) + place * kHeadDim + slice * kJoinDims,
                p_.lse == nullptr || slice != 0 ? nullptr : p_.lse + place,
                of_one_class(kMode) == DecodeMode::kBFloat16,
                has_sink ? p_.sinks[p_.columns.head(row, column)] : -INFINITY});
  }

  __device__ __forceinline__ uint8_t* ring(int32_t warp) const {
    return rings_ + warp * p_.slots * p_.slot_bytes;
  }
  // Part 2 * warp is of the row that began before the warp's item, 2 * warp + 1 of the row that
  // goes on behind it.
  __device__ __forceinline__ float* part(int32_t i) const {
    if (i % 2 != 0) return reinterpret_cast<float*>(ring(i / 2));
    return parts_ + i / 2 * p_.columns.of_row * kHeadDim;
  }

  const Params& p_;
  int32_t warp_, lane_;
  uint8_t* rings_;
  uint64_t* full_;        // of this warp, as
  ChunkHeader* headers_;  // these
  ChunkPlace* places_;
  SoftmaxState* states_;
  WorkItem* ends_;      // the first item of this CTA and of the next one
  int32_t* part_rows_;  // [2 * warps()], -1: no part
  float* parts_;
  WarpAttention<kHeadDim, kColumnBlocks, kMode> attention_;
};

template <int32_t kHeadDim, int32_t kColumnBlocks, DecodeMode kMode, bool kFewWarps>
__global__ void __launch_bounds__(kDecodeThreads, 1)
    decode_kernel(const __grid_constant__ DecodeParamsOf<classes_of(kMode)> params) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  DecodeCta<kHeadDim, kColumnBlocks, kMode, kFewWarps> cta(params, shared_bytes);
  cta.run();
}

template <int32_t kHeadDim, int32_t kClasses>
DecodeKernelOf<kClasses> decode_kernel_of(const DecodeChoice& choice) {
  using enum DecodeMode;
  const auto of_blocks = [&](auto blocks) -> DecodeKernelOf<kClasses> {
    constexpr int32_t kBlocks = decltype(blocks)::value;
    const DecodeMode mode = of_one_class(choice.mode);
    constexpr DecodeMode kOfFull = of_classes<kClasses>(kFull),
                         kOfBFloat16 = of_classes<kClasses>(kBFloat16);
    if constexpr (kClasses == 1) {
      if (!choice.few_warps) {
        if (mode == kFull) return decode_kernel<kHeadDim, kBlocks, kOfFull, false>;
        if (mode == kBFloat16) return decode_kernel<kHeadDim, kBlocks, kOfBFloat16, false>;
      }
    }
    if (mode == kFull) return decode_kernel<kHeadDim, kBlocks, kOfFull, true>;
    if (mode == kBFloat16) return decode_kernel<kHeadDim, kBlocks, kOfBFloat16, true>;
    if constexpr (kBlocks == 1) {
      return mode == kPlain ? decode_kernel<kHeadDim, 1, of_classes<kClasses>(kPlain), false>
                            : decode_kernel<kHeadDim, 1, of_classes<kClasses>(kNarrow), false>;
    }
    return nullptr;
  };
  if constexpr (most_columns(kHeadDim) > kBlockColumns) {
    if (choice.blocks == 2) return of_blocks(std::integral_constant<int32_t, 2>());
  }
  if (choice.blocks != 1) return nullptr;
  return of_blocks(std::integral_constant<int32_t, 1>());
}

}  // namespace tierkv
