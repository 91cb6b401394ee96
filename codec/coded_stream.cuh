// A lane's bit stream in shared memory: two table lookups a step, then at most one more word. The
// word comes into use a step after it was asked for, so that no lookup waits for it.
//
// The table lies at a multiple of its region's size in shared memory, so that one LOP3 makes the
// address of an entry out of the stream's bits: (bits & mask) | (table + copy). With copies, entry
// i is at words i * copies + copy; a lane reads copy (lane % copies), so that lanes meet in a bank
// less often. For that the bits are kept kBias positions higher than a byte offset needs.
#pragma once

#include <cstdint>

namespace tierkv {

// Of two fp16 digits times 2^-18 in an entry of kPair (device_table()).
inline constexpr uint32_t kDigitMask = 0x07c007c0u;
inline constexpr float kDigitScale = 0x1p18f;

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t address) {
  uint16_t x;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address));
  return x;
}

// 2^kCopiesLog interleaved copies of a table.
template <int kCopiesLog>
struct SharedTable {
  static constexpr int32_t kBias = 2 + kCopiesLog;
  uint32_t mask;     // of the index bits, in place
  uint32_t address;  // of entry 0 of this lane's copy

  __device__ __forceinline__ SharedTable(uint32_t table, int32_t max_length)
      : mask(((1u << max_length) - 1u) << kBias),
        address(table | (threadIdx.x & ((1u << kCopiesLog) - 1u)) * 4) {}

  // Entries never change once a kernel has begun to decode: not volatile.
  __device__ __forceinline__ uint32_t entry(uint32_t bits) const {
    uint32_t at, x;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(at) : "r"(bits), "r"(mask), "r"(address));
    asm("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
    return x;
  }
};

// Shared memory that holds a table of this many entries with copies: a power of two.
__host__ __device__ constexpr int32_t table_region_bytes(int32_t max_length, int32_t copies_log) {
  return 4 << (max_length + copies_log);
}

struct LaneStream {
  uint32_t low, high, ahead;  // 96 bits of the stream
  uint32_t position;          // of the next bit less the bias, modulo 32; bits above 5 are junk
  uint32_t next;              // address of the word after `ahead`

  // payload: shared address, begin: first bit.
  __device__ __forceinline__ void open(uint32_t payload, int32_t begin, int32_t bias) {
    position = static_cast<uint32_t>(begin - bias);
    // Before the first word lies the end of the starts: bits that are shifted out.
    const uint32_t word = payload + static_cast<uint32_t>((begin - bias) >> 5) * 4;
    low = load_shared(word);
    high = load_shared(word + 4);
    ahead = load_shared(word + 8);
    next = word + 12;
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
  template <int kCopiesLog>
  __device__ __forceinline__ void step_one(const SharedTable<kCopiesLog>& table, uint32_t* only) {
    *only = table.entry(__funnelshift_r(low, high, position));
    advance(position + *only);
  }

  // The bit of the payload after the last symbol.
  __device__ __forceinline__ int32_t end(uint32_t payload, int32_t bias) const {
    return static_cast<int32_t>(next - 12 - payload) * 8 + static_cast<int32_t>(position & 31u) +
           bias;
  }

 private:
  // By at most 31 bits.
  __device__ __forceinline__ void advance(uint32_t after) {
    asm volatile(
        "{\n.reg .pred full;\nsetp.ne.u32 full, %4, 0;\n@full mov.b32 %0, %1;\n"
        "@full mov.b32 %1, %2;\n@full ld.shared.u32 %2, [%3];\n@full add.u32 %3, %3, 4;\n}"
        : "+r"(low), "+r"(high), "+r"(ahead), "+r"(next)
        : "r"((after ^ position) & 32u));
    position = after;
  }
};

}  // namespace tierkv
