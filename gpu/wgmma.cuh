// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup, 64 rows x 128 columns, of rows in registers and columns in shared
// memory: sm_90a alone. The fallback is mma.cuh.
#pragma once

#include <cstdint>

#include "gpu/features.cuh"
#include "gpu/shared_memory.cuh"
#include "tierkv/layout.h"

namespace tierkv {

inline constexpr int32_t kWgmmaSums = 64;  // of a thread

// Rows of 128 bytes, swizzled; 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ uint64_t operand(const uint8_t* first_row) {
  return (static_cast<uint64_t>(shared_address(first_row) & 0x3ffffu) >> 4) | 1ull << 16 |
         64ull << 32 | 1ull << 62;
}

#if TKV_HAS_WGMMA
// What PTX calls the elements of the operands.
template <DType kDtype>
inline constexpr char kOperandType[] = "f16";
template <>
inline constexpr char kOperandType<DType::kBFloat16>[] = "bf16";

// a: 16 rows of each warp, as mma_m16n8k16() takes them.
template <DType kDtype>
__device__ __forceinline__ void multiply_step(float (&d)[kWgmmaSums], const uint32_t (&a)[4],
                                              uint64_t b, int32_t add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.%70.%70 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0;\n}"
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
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "C"(kOperandType<kDtype>));
}
// A warpgroup's share of the registers: fewer, so that others may take more.
template <int32_t kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int32_t kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// What threads wrote to shared memory may be read by the tensor cores.
__device__ __forceinline__ void fence_shared_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending committed groups are left; d must not be used before.
template <int32_t kPending>
__device__ __forceinline__ void wait_products(float (&d)[kWgmmaSums]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int32_t i = 0; i < kWgmmaSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#endif

}  // namespace tierkv
