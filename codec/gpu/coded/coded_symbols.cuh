// SPDX-License-Identifier: Apache-2.0
// What an encoder codes in place of a symbol that its codebook lacks.
#pragma once

#include "codec/gpu/coded/coded_batch.h"
#include "gpu/warp.cuh"

namespace tierkv {

// Numbers from here on stand for no token; their low half is that of some code of the block.
inline constexpr int32_t kPaddingCodes = 0x100000;

// A codebook as the loops of a lane take it.
struct LaneBook {
  const uint32_t* words;     // in shared memory
  const uint16_t* cheapest;  // global memory
  int32_t base, levels;

  // 0 where the symbol is absent.
  __device__ __forceinline__ uint32_t word_of(const int32_t (&pair)[2]) const {
    const auto x = static_cast<uint32_t>(pair[0] - base), y = static_cast<uint32_t>(pair[1] - base);
    const auto all = static_cast<uint32_t>(levels);
    return x < all && y < all ? words[x + all * y] : 0u;
  }
};

// In place of a pair whose symbol is absent.
struct Substitute {
  uint32_t word;
  int32_t delta[2];  // 0: right
  __device__ __forceinline__ bool fits() const {
    return static_cast<int16_t>(delta[0]) == delta[0] && static_cast<int16_t>(delta[1]) == delta[1];
  }
};
// The present symbol of least cost for a pair whose symbol is absent, ties to the lowest. The book
// is passed by value: a variable whose address a call takes cannot stay in a register.
__device__ __noinline__ inline Substitute find_substitute(LaneBook book, int32_t first,
                                                          int32_t second) {
  const int32_t code[2] = {first, second};
  // Quotients of numbers below 1024, what symbols are, are exact.
  const int32_t inverse = (0x10000 + book.levels - 1) / book.levels;
  const auto digits_of = [&](int32_t symbol) -> int2 {
    const int32_t quotient = symbol * inverse >> 16;
    return {symbol - quotient * book.levels, quotient};
  };
  const auto is_wrong = [&](int32_t i, int32_t digit) {
    return code[i] < kPaddingCodes && code[i] - book.base != digit;
  };
  int32_t best = 0, best_cost = INT32_MAX;
#pragma unroll 1
  for (int32_t i = -1; i < 2; ++i) {  // little code: it is seldom in the instruction cache
    const int32_t digit = i < 0 ? 0 : code[i] - book.base;
    if (digit < 0 || (i >= 0 && digit >= book.levels)) continue;
    const int32_t kept = book.cheapest[i < 0 ? 0 : 1 + i * book.levels + digit];
    if (kept == Codebook::kNoSymbol) continue;
    const int2 digits = digits_of(kept);
    const int32_t cost = static_cast<int32_t>(book.words[kept] >> 16) +
                         kExceptionBits * (is_wrong(0, digits.x) + is_wrong(1, digits.y));
    if (cost < best_cost || (cost == best_cost && kept < best)) best = kept, best_cost = cost;
  }
  const int2 digits = digits_of(best);
  Substitute other{book.words[best], {0, 0}};
  if (is_wrong(0, digits.x)) other.delta[0] = code[0] - book.base - digits.x;
  if (is_wrong(1, digits.y)) other.delta[1] = code[1] - book.base - digits.y;
  return other;
}

}  // namespace tierkv
