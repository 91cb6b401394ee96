// SPDX-License-Identifier: Apache-2.0
// A lane's bit stream in shared memory: two table lookups a step, then at most one more word.
//
// The table lies at a multiple of its region's size in shared memory, so that one LOP3 makes the
// address of an entry out of the stream's bits: (bits & mask) | (table + copy). With copies, entry
// i is at words i * copies + copy; a lane reads copy (lane % copies), so that lanes meet in a bank
// less often. For that the bits are kept kBias positions higher than a byte offset needs.
#pragma once

#include <cstdint>

#include "gpu/shared_memory.cuh"

namespace tierkv {

// 2^kCopiesLog interleaved copies of a table.
template <int kCopiesLog>
struct SharedTable {
  static constexpr int32_t kBias = 2 + kCopiesLog;
  uint32_t mask;     // of the index bits, in place
  uint32_t address;  // of entry 0 of this lane's copy

  __device__ __forceinline__ SharedTable(uint32_t table, uint32_t mask) : mask(mask) {
    // Not to be computed again in loops that are short of registers.
    asm volatile("or.b32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(table), "r"((threadIdx.x & ((1u << kCopiesLog) - 1u)) * 4));
  }

  // Entries never change once a kernel has begun to decode: not volatile.
  __device__ __forceinline__ uint32_t entry(uint32_t bits) const {
    uint32_t at, x;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(at) : "r"(bits), "r"(mask), "r"(address));
    asm("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
  }
};

// The mask of a SharedTable.
__host__ __device__ constexpr uint32_t table_mask(int32_t max_length, int32_t copies_log) {
  return ((1u << max_length) - 1u) << (2 + copies_log);
}
// Shared memory that holds a table of this many entries with copies: a power of two.
__host__ __device__ constexpr int32_t table_region_bytes(int32_t max_length, int32_t copies_log) {
  return 4 << (max_length + copies_log);
}

// kAhead: a word comes into use a step after it was asked for, so that no lookup waits for it,
// which pays where a lane has one stream only.
template <bool kAhead>
struct LaneStream {
  uint32_t low, high;  // 64 bits of the stream
  uint32_t ahead;      // kAhead: the word after them
  uint32_t position;   // of the next bit less the bias, modulo 32; bits above 5 are junk
  uint32_t next;       // address of the next word to read
  static constexpr int32_t kWords = kAhead ? 3 : 2;

  // payload: shared address, begin: first bit.
  __device__ __forceinline__ void open(uint32_t payload, int32_t begin, int32_t bias) {
    position = static_cast<uint32_t>(begin - bias);
    // Before the first word lies another part of the block: bits that are shifted out.
    const uint32_t word = payload + static_cast<uint32_t>((begin - bias) >> 5) * 4;
    low = load_shared(word);
    high = load_shared(word + 4);
    if constexpr (kAhead) ahead = load_shared(word + 8);
    next = word + 4 * kWords;
  }

  // Two symbols: 2 * kMaxCodeLength bits and the bias of one copy fit in 32, and so do those of
  // shorter codes with more copies.
  template <int kCopiesLog>
  __device__ __forceinline__ void step(const SharedTable<kCopiesLog>& table, uint32_t* first,
                                       uint32_t* second) {
    uint32_t bits = __funnelshift_r(low, high, position);
    *first = table.entry(bits);
    bits = __funnelshift_r(bits, 0u, *first);
    *second = table.entry(bits);
    advance(position + *first + *second);
  }

  // The bit of the payload after the last symbol.
  __device__ __forceinline__ int32_t end(uint32_t payload, int32_t bias) const {
    return static_cast<int32_t>(next - 4 * kWords - payload) * 8 +
           static_cast<int32_t>(position & 31u) + bias;
  }

  // By at most 31 bits.
  __device__ __forceinline__ void advance(uint32_t after) {
    const uint32_t crossed = (after ^ position) & 32u;
    if constexpr (kAhead) {
      asm volatile(
          "{\n.reg .pred full;\nsetp.ne.u32 full, %4, 0;\n@full mov.b32 %0, %1;\n"
          "@full mov.b32 %1, %2;\n@full ld.shared.u32 %2, [%3];\n@full add.u32 %3, %3, 4;\n}"
          : "+r"(low), "+r"(high), "+r"(ahead), "+r"(next)
          : "r"(crossed));
    } else {
      asm volatile(
          "{\n.reg .pred full;\nsetp.ne.u32 full, %3, 0;\n@full mov.b32 %0, %1;\n"
          "@full ld.shared.u32 %1, [%2];\n@full add.u32 %2, %2, 4;\n}"
          : "+r"(low), "+r"(high), "+r"(next)
          : "r"(crossed));
    }
    position = after;
  }
};

// A step of two streams side by side: each instruction of one stands beside that of the other, so
// that they wait for their loads together.
template <bool kAhead, int kCopiesLog>
__device__ __forceinline__ void step_both(LaneStream<kAhead>& x, LaneStream<kAhead>& y,
                                          const SharedTable<kCopiesLog>& table,
                                          uint32_t (&first)[2], uint32_t (&second)[2]) {
  asm volatile(
      "{\n.reg .b32 v, w, a, b;\n"
      "shf.r.wrap.b32 v, %4, %5, %6;\n"
      "shf.r.wrap.b32 w, %7, %8, %9;\n"
      "lop3.b32 a, v, %10, %11, 0xEA;\n"
      "lop3.b32 b, w, %10, %11, 0xEA;\n"
      "ld.shared.u32 %0, [a];\n"
      "ld.shared.u32 %1, [b];\n"
      "shf.r.wrap.b32 v, v, 0, %0;\n"
      "shf.r.wrap.b32 w, w, 0, %1;\n"
      "lop3.b32 a, v, %10, %11, 0xEA;\n"
      "lop3.b32 b, w, %10, %11, 0xEA;\n"
      "ld.shared.u32 %2, [a];\n"
      "ld.shared.u32 %3, [b];\n}"
      : "=&r"(first[0]), "=&r"(first[1]), "=&r"(second[0]), "=&r"(second[1])
      : "r"(x.low), "r"(x.high), "r"(x.position), "r"(y.low), "r"(y.high), "r"(y.position),
        "r"(table.mask), "r"(table.address));
  x.advance(x.position + first[0] + second[0]);
  y.advance(y.position + first[1] + second[1]);
}

}  // namespace tierkv
