// The instructions the attention kernels are made of, one function each. Everything
// architecture-dependent is here.
//
// Barriers of copies count one arrival per phase on sm_90, where the copy engine reports its bytes,
// and one per lane of the warp before, where the lanes copy.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace tierkv {

inline constexpr uint32_t kFullWarp = 0xffffffffu;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TKV_BULK_COPY 1
#else
#define TKV_BULK_COPY 0
#endif

// d = a b + d: a is 16 x 16 (rows x contracted), b 16 x 8, d 16 x 8.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with 8 contracted: a is 16 x 8, b 8 x 8.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// mma_m16n8k16() of bfloat16.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of halves spread over the warp.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ float2 unpack_halves(uint32_t x) {
  return __half22float2(*reinterpret_cast<__half2*>(&x));
}

__device__ __forceinline__ uint32_t pack_bfloats(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ float2 unpack_bfloats(uint32_t x) {
  return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t x, float factor) {
  const __half2 y = __hmul2(*reinterpret_cast<__half2*>(&x), __float2half2_rn(factor));
  return *reinterpret_cast<const uint32_t*>(&y);
}

// Of shared memory into which no copy is under way; the emulator of the tests looks.
template <class T>
__device__ __forceinline__ T load_arrived(const uint8_t* from) {
  return *reinterpret_cast<const T*>(from);
}

// Two values of an output: what rounding, or a sum that left fp32, has carried past the largest
// value of the type saturates, as output_to_raw() does.
__device__ __forceinline__ uint32_t pack_outputs(float low, float high, bool is_bfloat16) {
  uint32_t y;
  if (is_bfloat16) {
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

inline constexpr uint32_t kOneHalves = 0x3c003c00u;
// Per half all ones where they are equal.
__device__ __forceinline__ uint32_t equal_halves(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
__device__ __forceinline__ uint32_t add_halves(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// a * b + c, rounded once, of both halves.
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Halves of two words: the low ones, the high ones.
__device__ __forceinline__ uint32_t low_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t high_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

// Infinities become the largest numbers.
__device__ __forceinline__ uint32_t saturate_halves(uint32_t x) {
  asm("min.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x7bff7bffu));
  asm("max.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0xfbfffbffu));
  return x;
}

// The index of the lowest set bit, -1 of 0.
__device__ __forceinline__ int32_t lowest_bit(uint32_t x) {
  return __ffs(static_cast<int32_t>(x)) - 1;
}

// The index of the highest set bit, -1 of 0.
__device__ __forceinline__ int32_t highest_bit(uint32_t x) {
  return 31 - __clz(static_cast<int32_t>(x));
}

// The bytes 1 and 3 of a word, each as the low byte of a half.
__device__ __forceinline__ uint32_t odd_bytes(uint32_t x) {
  return __byte_perm(x, 0, 0x4341);
}

// Bytes 0 and 2, or 1 and 3, of a word as the low bytes of halves whose upper ones are `upper`.
__device__ __forceinline__ uint32_t even_bytes_as(uint32_t x, uint32_t upper) {
  return __byte_perm(x, upper, 0x4240);
}
__device__ __forceinline__ uint32_t odd_bytes_as(uint32_t x, uint32_t upper) {
  return __byte_perm(x, upper, 0x4341);
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers and copies into shared memory ----
//
// A barrier ends its phase when the bytes of a chunk have arrived. Phases alternate in parity,
// beginning with 0.

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(TKV_BULK_COPY ? 1 : 32)
               : "memory");
}
// After the barriers of this thread are initialised, before the warp uses them.
__device__ __forceinline__ void publish_barriers() {
#if TKV_BULK_COPY
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}

// barrier: a shared address.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
#if TKV_BULK_COPY
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
      "@done bra ready_%=;\nbra again_%=;\nready_%=:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void wait_barrier(const uint64_t* barrier, uint32_t parity) {
  wait_barrier(shared_address(barrier), parity);
}

// Whether the phase has ended, for the whole warp alike.
__device__ __forceinline__ bool has_arrived(const uint64_t* barrier, uint32_t parity) {
  uint32_t is_done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(is_done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return __all_sync(kFullWarp, is_done != 0);
}

// One piece of a copy: bytes is a multiple of 16, 0 for none; both addresses are 16-byte aligned.
struct CopyPiece {
  uint8_t* to;
  const uint8_t* from;
  uint32_t bytes;
};
// The same, to a shared address.
struct LanePiece {
  uint32_t to;
  const uint8_t* from;
  uint32_t bytes;
};
inline constexpr int32_t kCopyPieces = 4;
struct CopyPieces {
  int32_t count;   // 0, 1 or kCopyPieces
  uint32_t total;  // bytes
  CopyPiece piece[kCopyPieces];
};

// The lane, read anew at each use: seldom used code would otherwise keep what it derives from it in
// registers that loops around it need.
__device__ __forceinline__ uint32_t fresh_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// x, kept in a register where the compiler would rather compute it anew at every use.
__device__ __forceinline__ int32_t kept(int32_t x) {
  asm("" : "+r"(x));
  return x;
}
__device__ __forceinline__ bool is_first_lane() {
  return threadIdx.x % 32 == 0;
}
#if TKV_BULK_COPY
// True in one lane of the warp, always the same one. The compiler knows that it is one, and passes
// it what copies take in uniform registers without a loop over lanes.
__device__ __forceinline__ bool is_elected() {
  uint32_t is_one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(is_one));
  return is_one != 0;
}
#endif

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
// Two pieces, in one phase of the barrier.
__device__ __forceinline__ void copy_two_of_lane(int32_t owner, uint32_t barrier,
                                                 const LanePiece& x, const LanePiece& y) {
  if (static_cast<int32_t>(threadIdx.x % 32) != owner) return;
  expect_bytes(barrier, x.bytes + y.bytes);
  const uint64_t policy = read_once_policy();
  if (x.bytes > 0) copy_bytes(barrier, x.to, x.from, x.bytes, policy);
  if (y.bytes > 0) copy_bytes(barrier, y.to, y.from, y.bytes, policy);
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
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
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
__device__ __forceinline__ void copy_piece_of_lane(int32_t owner, const LanePiece& x) {
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(x.from));
  const auto* from = reinterpret_cast<const uint8_t*>(
      static_cast<uintptr_t>(__shfl_sync(kFullWarp, address, owner)));
  copy_by_lanes(x.to, from, __shfl_sync(kFullWarp, x.bytes, owner));
}
__device__ __forceinline__ void copy_of_lane(int32_t owner, uint32_t barrier, uint32_t to,
                                             const uint8_t* from, uint32_t bytes) {
  copy_piece_of_lane(owner, {to, from, bytes});
  arrive_after_copies(barrier);
}
__device__ __forceinline__ void copy_two_of_lane(int32_t owner, uint32_t barrier,
                                                 const LanePiece& x, const LanePiece& y) {
  copy_piece_of_lane(owner, x);
  copy_piece_of_lane(owner, y);
  arrive_after_copies(barrier);
}
#endif

// ---- memory order between CTAs ----

// Everything this CTA wrote before (ordered by a barrier among its threads) is visible to whoever
// sees the new count.
__device__ __forceinline__ int32_t arrive_acq_rel(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

// ---- the beginning of a kernel ----

// Has the lines of a kernel's parameters fetched side by side, one by every warp, where their uses
// would fetch them one after the other.
template <class Params>
__device__ __forceinline__ void touch_parameters(const Params& params, int32_t warp) {
  constexpr int32_t kLineBytes = 64, kLines = (sizeof(Params) + kLineBytes - 1) / kLineBytes;
  if (warp >= kLines) return;
  const int32_t word =
      *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(&params) + warp * kLineBytes);
  asm volatile("" ::"r"(word));
}

// Until all kernels before this one in the stream have finished and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if TKV_BULK_COPY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may take the room this one leaves; it waits for its end before it reads anything.
__device__ __forceinline__ void let_next_kernel_start() {
#if TKV_BULK_COPY
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tierkv
