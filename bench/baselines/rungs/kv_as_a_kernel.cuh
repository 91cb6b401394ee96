// SPDX-License-Identifier: Apache-2.0
// Rung 3: keys and values as operand A (kv_warp.cuh) over a fixed split, with the product's other
// steps as switches: how bytes arrive, how the warps of a CTA share them, who merges. The product
// has bulk copies, warps on their own, the merge by the last to arrive, and in place of the fixed
// split a plan made on the device.
#pragma once

#include "bench/baselines/rungs/kv_warp.cuh"
#include "bench/baselines/rungs/row_chunks.cuh"
#include "bench/baselines/rungs/row_parts.cuh"
#include "gpu/barrier.cuh"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"
#include "gpu/pdl.cuh"

namespace tierkv {

enum class Loads { kThroughRegisters, kBulkCopies };
enum class Sharing {
  kWarpItems,  // a warp takes consecutive chunks and waits for no other
  kCtaRounds,  // the warps take one chunk each, then meet
};
enum class Merge { kSecondKernel, kLastToArrive };

inline constexpr int32_t kKvWarps = 8;
inline constexpr int32_t kKvThreads = kKvWarps * 32;

TKV_HD constexpr int32_t kv_slots(Loads loads) {
  return loads == Loads::kBulkCopies ? 2 : 1;
}

// From one slot of a ring to the next. Behind a slot that lanes fill there is room for what is read
// there: another warp may be storing its own slot meanwhile.
TKV_HD constexpr int32_t kv_slot_stride(Loads loads, int32_t slot_bytes) {
  return slot_bytes + (loads == Loads::kThroughRegisters ? kKvReadBehind : 0);
}

// What lies in a slot of a warp's ring.
struct alignas(16) SlotHeader {
  int32_t format;  // pair_format()
  int32_t tiles;
  int32_t tokens;  // 0: nothing
};

// Offsets into the dynamic shared memory of a CTA; the rings are before them.
struct KvShared {
  int32_t full;     // uint64_t [kKvWarps][slots]
  int32_t headers;  // SlotHeader [kKvWarps][slots]
  int32_t states;   // SoftmaxState [kKvWarps][kRungMaxGroup]
  int32_t bytes;    // parts, float [kKvWarps][group][kKvPartStride], lie in the rings at the end
};
TKV_HD constexpr KvShared kv_shared(Loads loads, int32_t group, int32_t slot_bytes) {
  KvShared s{};
  const int32_t slots = kKvWarps * kv_slots(loads);
  const int32_t rings = slots * kv_slot_stride(loads, slot_bytes);
  const int32_t parts = kKvWarps * group * kKvPartStride * 4;
  s.full = rings > parts ? rings : parts;
  s.headers = s.full + slots * 8;
  s.states = s.headers + slots * static_cast<int32_t>(sizeof(SlotHeader));
  s.bytes = s.states + kKvWarps * kRungMaxGroup * 8;
  return s;
}

template <Loads kLoads, Sharing kSharing, Merge kMerge>
class KvRowCta {
 public:
  __device__ __forceinline__ KvRowCta(const RungParams& p, uint8_t* shared)
      : p_(p), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {
    const KvShared at = kv_shared(kLoads, p.group, p.slot_bytes);
    ring_ = shared + warp_ * kSlots * kv_slot_stride(kLoads, p.slot_bytes);
    parts_ = reinterpret_cast<float*>(shared);
    full_ = reinterpret_cast<uint64_t*>(shared + at.full) + warp_ * kSlots;
    headers_ = reinterpret_cast<SlotHeader*>(shared + at.headers) + warp_ * kSlots;
    states_ = reinterpret_cast<SoftmaxState*>(shared + at.states);
  }

  __device__ __forceinline__ void run() {
    if (kLoads == Loads::kBulkCopies && lane_ < kSlots) init_barrier(&full_[lane_]);
    publish_barriers();
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int32_t row = blockIdx.x / p_.splits, split = blockIdx.x - row * p_.splits;
    const RowChunks chunks(p_, row);
    const int64_t first_head = static_cast<int64_t>(row) * p_.group;
    attention_.start(static_cast<const __half*>(p_.q) + first_head * kRungHeadDim, p_.group,
                     p_.scale_log2);
    attend(chunks, split);
    leave(row, split);
  }

 private:
  static constexpr int32_t kSlots = kv_slots(kLoads);

  // The warp's chunks: `steps` of them, `stride` apart; those at `end` and behind are none.
  struct Walk {
    int32_t first, stride, steps, end;
  };
  __device__ __forceinline__ Walk walk(const RowChunks& chunks, int32_t split) const {
    const int32_t begin = chunks.part_begin(split, p_.splits);
    const int32_t end = chunks.part_begin(split + 1, p_.splits);
    if (kSharing == Sharing::kCtaRounds) {
      return {begin + warp_, kKvWarps, ceil_div(end - begin, kKvWarps), end};
    }
    const int32_t first = begin + (end - begin) * warp_ / kKvWarps;
    const int32_t last = begin + (end - begin) * (warp_ + 1) / kKvWarps;
    return {first, 1, last - first, last};
  }

  // A chunk is looked up a step before it is copied, so that nobody waits for a page id.
  __device__ __forceinline__ void attend(const RowChunks& chunks, int32_t split) {
    const Walk w = walk(chunks, split);
    const auto look_up = [&](int32_t step) {
      const int32_t i = w.first + step * w.stride;
      return step < w.steps && i < w.end ? chunks.at(i) : kNoChunk;
    };
    RowChunk ahead = look_up(0);
    int32_t slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int32_t step = -kSlots; step < w.steps; ++step) {
      if (step >= 0) {
        if (kLoads == Loads::kBulkCopies) wait_barrier(&full_[slot], parity);
        const SlotHeader header = headers_[slot];
        if (header.tokens > 0) {
          attention_.attend(ring_ + slot * kv_slot_stride(kLoads, p_.slot_bytes), header.format,
                            header.tiles, header.tokens);
        }
        meet();
      }
      if (step + kSlots < w.steps) {
        start_chunk(ahead, slot);
        ahead = look_up(step + kSlots + 1);
      }
      if (++slot == kSlots) {
        slot = 0;
        if (step >= 0) parity ^= 1;
      }
    }
  }

  __device__ __forceinline__ static void meet() {
    if constexpr (kSharing == Sharing::kCtaRounds) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  __device__ __forceinline__ void start_chunk(const RowChunk& chunk, int32_t slot) {
    const TierSource& tier = p_.rows.tiers[chunk.tier];
    const uint8_t* page = page_of(p_, chunk);
    const int32_t tokens = page == nullptr ? 0 : chunk.tokens;
    if (is_first_lane()) headers_[slot] = {tier.format, chunk.tiles, tokens};
    CopyPieces pieces{};
    if (tokens > 0) {
      const bool is_page = chunk.tiles == tier.page_tiles;
      uint8_t* to = ring_ + slot * kv_slot_stride(kLoads, p_.slot_bytes);
      pieces.count = is_page ? 1 : kCopyPieces;
#pragma unroll
      for (int32_t s = 0; s < kCopyPieces; ++s) {
        const int32_t bytes = chunk.tiles * tier.segment_tile[s];
        pieces.piece[s] = {to, page + tier.segment[s] + chunk.tile * tier.segment_tile[s],
                           static_cast<uint32_t>(bytes)};
        to += bytes;
        pieces.total += bytes;
      }
      if (is_page) pieces.piece[0].bytes = pieces.total;
    }
    if constexpr (kLoads == Loads::kBulkCopies) {
      copy_pieces(&full_[slot], pieces);
    } else {
#pragma unroll
      for (int32_t s = 0; s < kCopyPieces; ++s) {
        if (s < pieces.count) copy_through_registers(pieces.piece[s]);
      }
    }
    __syncwarp();
  }

  // By the warp, eight accesses of 512 bytes in flight.
  __device__ __forceinline__ void copy_through_registers(const CopyPiece& piece) const {
    constexpr int32_t kInFlight = 8;
    for (uint32_t first = 16 * lane_; first < piece.bytes; first += 512 * kInFlight) {
      uint4 x[kInFlight];
#pragma unroll
      for (int32_t i = 0; i < kInFlight; ++i) {
        const uint32_t at = first + 512 * i;
        if (at < piece.bytes) x[i] = *reinterpret_cast<const uint4*>(piece.from + at);
      }
#pragma unroll
      for (int32_t i = 0; i < kInFlight; ++i) {
        const uint32_t at = first + 512 * i;
        if (at < piece.bytes) *reinterpret_cast<uint4*>(piece.to + at) = x[i];
      }
    }
  }

  // The rings are no longer in use when all warps are here.
  __device__ __forceinline__ void leave(int32_t row, int32_t split) {
    constexpr int32_t kStride = kKvPartStride;
    __syncthreads();
    attention_.store_part(states_ + warp_ * kRungMaxGroup, parts_ + warp_ * p_.group * kStride,
                          p_.group);
    __syncthreads();
    for (int32_t head = warp_; head < p_.group; head += kKvWarps) {
      leave_head(p_, row, split, head,
                 even_parts(states_ + head, parts_ + head * kStride, kRungMaxGroup,
                            p_.group * kStride, kKvWarps));
      if constexpr (kMerge == Merge::kLastToArrive) merge_last(p_, row, head);
    }
  }

  const RungParams& p_;
  int32_t warp_, lane_;
  uint8_t* ring_;
  float* parts_;
  uint64_t* full_;       // of this warp, as
  SlotHeader* headers_;  // these
  SoftmaxState* states_;
  KvWarp attention_;
};

template <Loads kLoads, Sharing kSharing, Merge kMerge>
__global__ void __launch_bounds__(kKvThreads, 1)
    kv_as_a_kernel(const __grid_constant__ RungParams p) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  KvRowCta<kLoads, kSharing, kMerge> cta(p, shared_bytes);
  cta.run();
}

}  // namespace tierkv
