// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory: by a warp into a slot whose barrier they end, by the copy
// engine where there is one and otherwise by the lanes; and by single threads.
#pragma once

#include <cstdint>

#include "gpu/barrier.cuh"
#include "gpu/features.cuh"
#include "gpu/lanes.cuh"

namespace tierkv {

// One piece of a copy: bytes is a multiple of 16, 0 for none; both addresses are 16-byte aligned.
struct CopyPiece {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};
inline constexpr int32_t kCopyPieces = 4;
struct CopyPieces {
  int32_t count;   // 0, 1 or kCopyPieces
  uint32_t total;  // bytes
  CopyPiece piece[kCopyPieces];
};

// All are called by the whole warp with the same pieces in every lane. prefetch_pieces() asks for
// them to be brought into L2. copy_pieces(), or copy_page() for a single one, bring them into
// shared memory; the phase of the barrier ends when they are there.
#if TKV_BULK_COPY
// By any lane: asks for bytes, a multiple of 16, to be brought into L2.
__device__ __forceinline__ void prefetch_bytes(const uint8_t* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void prefetch_piece(const CopyPiece& piece) {
  if (piece.bytes > 0) prefetch_bytes(piece.from, piece.bytes);
}
__device__ __forceinline__ void copy_bytes(uint32_t barrier, uint32_t to, const uint8_t* from,
                                           uint32_t bytes, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_piece(uint32_t barrier, const CopyPiece& piece,
                                           uint64_t policy) {
  copy_bytes(barrier, shared_address(piece.to), piece.from, piece.bytes, policy);
}
__device__ __forceinline__ void prefetch_pieces(const CopyPieces& pieces) {
  if (!is_first_lane() || pieces.count == 0) return;
  prefetch_piece(pieces.piece[0]);
  if (pieces.count == 1) return;
#pragma unroll
  for (int32_t i = 1; i < kCopyPieces; ++i) prefetch_piece(pieces.piece[i]);
}
__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Pages are read once: they should not drive tables, q and code out of L2.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_page(uint64_t* barrier, const CopyPiece& piece) {
  if (!is_elected()) return;
  const uint32_t address = shared_address(barrier);
  expect_bytes(address, piece.bytes);
  copy_piece(address, piece, read_once_policy());
}
// `bytes`, a multiple of 16, of lane `owner`'s `from`; 0 for none. barrier and to: shared
// addresses.
__device__ __forceinline__ void copy_of_lane(int32_t owner, uint32_t barrier, uint32_t to,
                                             const uint8_t* from, uint32_t bytes) {
  if (static_cast<int32_t>(threadIdx.x % 32) != owner) return;
  expect_bytes(barrier, bytes);
  if (bytes > 0) copy_bytes(barrier, to, from, bytes, read_once_policy());
}

__device__ __forceinline__ void copy_pieces(uint64_t* barrier, const CopyPieces& pieces) {
  if (!is_elected()) return;
  const uint32_t address = shared_address(barrier);
  const uint64_t policy = read_once_policy();
  expect_bytes(address, pieces.total);
#pragma unroll
  for (int32_t i = 0; i < kCopyPieces; ++i) {
    const CopyPiece& piece = pieces.piece[i];
    if (i < pieces.count && piece.bytes > 0) copy_piece(address, piece, policy);
  }
}
#else
__device__ __forceinline__ void prefetch_bytes(const uint8_t*, uint32_t) {}
__device__ __forceinline__ void prefetch_pieces(const CopyPieces&) {}
__device__ __forceinline__ void copy_by_lanes(uint32_t to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t at = threadIdx.x % 32 * 16; at < bytes; at += 512) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at)
                 : "memory");
  }
}
__device__ __forceinline__ void copy_pieces(uint64_t* barrier, const CopyPieces& pieces) {
#pragma unroll
  for (int32_t i = 0; i < kCopyPieces; ++i) {
    if (i >= pieces.count) break;
    const CopyPiece& piece = pieces.piece[i];
    copy_by_lanes(shared_address(piece.to), piece.from, piece.bytes);
  }
  arrive_after_copies(shared_address(barrier));
}
__device__ __forceinline__ void copy_page(uint64_t* barrier, const CopyPiece& piece) {
  copy_pieces(barrier, {1, piece.bytes, {piece}});
}
__device__ __forceinline__ void copy_of_lane(int32_t owner, uint32_t barrier, uint32_t to,
                                             const uint8_t* from, uint32_t bytes) {
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(from));
  copy_by_lanes(to,
                reinterpret_cast<const uint8_t*>(
                    static_cast<uintptr_t>(__shfl_sync(kFullWarp, address, owner))),
                __shfl_sync(kFullWarp, bytes, owner));
  arrive_after_copies(barrier);
}
#endif

// ---- copies of a thread ----

// 16 bytes of global memory, with the hint that L2 take all 128 bytes around them. Such loads stay
// in their order; others, and stores, may pass them. So the thread must not have written there.
__device__ __forceinline__ uint4 load_of_line(const void* from) {
  uint4 x;
  asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

// 16 bytes from global to shared memory, asynchronously; zeros where `present` is false (then
// nothing is read).
__device__ __forceinline__ void copy_async_16(void* to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}
// The same of 4 bytes.
__device__ __forceinline__ void copy_async_4(void* to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(present ? 4 : 0)
               : "memory");
}

// Until the copies of this thread have arrived.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// A thread's copies in groups: wait_copies<n>() returns when all but the newest n groups of this
// thread have arrived.
__device__ __forceinline__ void close_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int32_t kLeft>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace tierkv
