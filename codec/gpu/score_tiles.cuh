// Tiles of q . k^T on the tensor cores of sm_90: a stationary tile of rows against a stream of
// tiles of other rows. What significance and the log-sum-exp of a prompt have in common.
//
// A CTA holds two warpgroups that multiply, each with its rows of the stationary tile, and one that
// copies rows of the stream to shared memory. Both operands lie there as wgmma wants them: rows of
// 128 bytes (64 dims), 16-byte pieces swizzled by row % 8, a panel for every 64 dims.
//
// A streamed tile has 128 columns. For a group of query heads they are eight tokens of every head
// in turn, so that the scores of a token by all heads of the group lie in one thread:
//   column n: head n / 8 % heads, token 8 (n / (8 heads)) + n % 8.
#pragma once

#include <cstdint>

#include "gpu/warp.cuh"
#include "tierkv/layout.h"

namespace tierkv {

inline constexpr int32_t kColumns = 128;         // of a streamed tile
inline constexpr int32_t kScoresPerThread = 64;  // of 64 rows x 128 columns
inline constexpr int32_t kMathThreads = 256, kCopyThreads = 128;
inline constexpr int32_t kScoreThreads = kMathThreads + kCopyThreads;

// Shared memory of a CTA, from a base aligned to 1024 bytes.
template <int32_t kHeadDim>
struct ScoreShape {
  static constexpr int32_t kPanels = (kHeadDim + 63) / 64;
  static constexpr int32_t kSubTiles = kHeadDim > 128 ? 1 : 2;  // of 64 rows, for each warpgroup
  static constexpr int32_t kRows = 128 * kSubTiles;
  static constexpr int32_t kStages = kHeadDim > 128 ? 2 : 4;
  static constexpr int32_t kStationaryBytes = kRows * kPanels * 128;
  static constexpr int32_t kStageBytes = kColumns * kPanels * 128;
  static constexpr int32_t kScalarBytes = kColumns * 4;  // one float a column
  static constexpr int32_t kBarriers = kStationaryBytes + kStages * (kStageBytes + kScalarBytes);
  static constexpr int32_t kSharedBytes = kBarriers + 8 * (2 * kStages + 1) + 1024;
};

// Rows of a 16-bit type in global memory; those from num_tokens on read as zeros.
struct RowSource {
  const uint8_t* base;  // token 0 of head 0, 16-byte aligned
  int64_t token_bytes, head_bytes;
  int32_t num_tokens;
};
// The stream: tokens begin <= t < end of heads first_head .. first_head + heads - 1, padded to a
// power of two, 2^log_heads, by repeating the last.
struct StreamShape {
  int32_t begin, end;
  int32_t first_head, heads, log_heads;

  __device__ int32_t tokens_per_tile() const { return kColumns >> log_heads; }
  __device__ int32_t tiles() const {
    return end <= begin ? 0 : (end - begin - 1) / tokens_per_tile() + 1;
  }
  __device__ int32_t token_of(int32_t tile, int32_t column) const {
    return begin + tile * tokens_per_tile() + (column >> (3 + log_heads)) * 8 + column % 8;
  }
  __device__ int32_t head_of(int32_t column) const {
    return first_head + min(column / 8 & ((1 << log_heads) - 1), heads - 1);
  }
};

// Known to the compiler to be the same in all lanes: products may not run across divergent
// branches.
__device__ __forceinline__ int32_t warpgroup_index() {
  return __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x) / 128, 0);
}

// ---- barriers ----

__device__ __forceinline__ void init_barrier(uint64_t* barrier, int32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_byte_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready_%=;\nbra again_%=;\nready_%=:\n}" ::"r"(shared_byte_address(barrier)),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_byte_address(barrier))
               : "memory");
}
// This thread's copies so far will arrive once they are done.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile(
      "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_byte_address(barrier))
      : "memory");
}

// ---- copies ----

// A tile of kRows rows: find(row) names token and head.
template <int32_t kHeadDim, int32_t kRows, class Find>
__device__ __forceinline__ void copy_rows(const RowSource& from, uint8_t* to, Find&& find) {
  constexpr int32_t kPieces = kHeadDim / 8;
  const int32_t thread = static_cast<int32_t>(threadIdx.x) % kCopyThreads;
#pragma unroll 8
  for (int32_t n = 0; n < kRows * kPieces / kCopyThreads; ++n) {
    const int32_t i = n * kCopyThreads + thread, row = i / kPieces, piece = i % kPieces;
    const int2 at = find(row);
    const bool present = at.x < from.num_tokens;
    const int64_t offset = at.x * from.token_bytes + at.y * from.head_bytes + 16 * piece;
    copy_async_16(to + piece / 8 * kRows * 128 + row * 128 + (piece % 8 ^ row % 8) * 16,
                  from.base + (present ? offset : 0), present);
  }
}
__device__ __forceinline__ void copy_async_4(void* to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_byte_address(to)),
               "l"(from), "r"(present ? 4 : 0)
               : "memory");
}

// ---- products ----

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TKV_HAS_WGMMA 1
#else
#define TKV_HAS_WGMMA 0
#endif

// Rows of 128 bytes, swizzled; 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ uint64_t operand(const uint8_t* first_row) {
  return (static_cast<uint64_t>(shared_byte_address(first_row) & 0x3ffffu) >> 4) | 1ull << 16 |
         64ull << 32 | 1ull << 62;
}

#if TKV_HAS_WGMMA
// What PTX calls the elements of the operands.
template <DType kDtype>
inline constexpr char kOperandType[] = "f16";
template <>
inline constexpr char kOperandType<DType::kBFloat16>[] = "bf16";

template <DType kDtype>
__device__ __forceinline__ void multiply_step(float (&d)[kScoresPerThread], uint64_t a, uint64_t b,
                                              int32_t add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.%67.%67 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(a), "l"(b), "r"(add), "C"(kOperandType<kDtype>));
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending committed groups are left; d must not be used before.
template <int32_t kPending>
__device__ __forceinline__ void wait_products(float (&d)[kScoresPerThread]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int32_t i = 0; i < kScoresPerThread; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = 64 rows x 128 columns of products over all dims.
template <int32_t kHeadDim, DType kDtype>
__device__ __forceinline__ void start_products(const uint8_t* rows, int32_t row_panel_bytes,
                                               const uint8_t* columns,
                                               float (&d)[kScoresPerThread]) {
  begin_products();
#pragma unroll
  for (int32_t step = 0; step < kHeadDim / 16; ++step) {
    const int32_t panel = step / 4, byte = step % 4 * 32;
    multiply_step<kDtype>(d, operand(rows + panel * row_panel_bytes + byte),
                          operand(columns + panel * kColumns * 128 + byte), step > 0);
  }
  commit_products();
}
#endif

}  // namespace tierkv
