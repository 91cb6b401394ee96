// SPDX-License-Identifier: Apache-2.0
// What an encoder codes in place of a symbol that its codebook lacks.
#pragma once

#include "codec/gpu/coded/coded_batch.h"
#include "gpu/warp.cuh"

namespace tierkv {

inline constexpr int32_t kBitsOfException = 8 * kExceptionBytes;
// Digits that are no digits, as in coded_block.cc.
inline constexpr int32_t kOutsideAlphabet = -1;
inline constexpr int32_t kPaddingCode = -2;

// The pair or the single code that a symbol stands for.
struct Place {
  int32_t token[2], dim[2], digit[2];
};

// Code word and length of the symbol that stands for `places` digits, and the digits it has.
struct ChosenSymbol {
  uint32_t word;
  int32_t symbol;
};

// The digits of a symbol of kPair, less than 1024 with at most 32 levels: the quotient is exact.
__device__ __forceinline__ int2 symbol_digits(const DeviceCodebook& book, int32_t symbol,
                                              int32_t places) {
  if (places == 1) return {symbol, 0};
  const int32_t inverse = (0x10000 + book.levels - 1) / book.levels;
  const int32_t second = symbol * inverse >> 16;
  return {symbol - second * book.levels, second};
}

__device__ __forceinline__ int32_t cost_of_symbol(const DeviceCodebook& book, const uint32_t* words,
                                                  int32_t symbol, const Place& at, int32_t places) {
  const int2 d = symbol_digits(book, symbol, places);
  auto bits = static_cast<int32_t>(words[symbol] >> 16);
  if (at.digit[0] != kPaddingCode && at.digit[0] != d.x) bits += kBitsOfException;
  if (places == 2 && at.digit[1] != kPaddingCode && at.digit[1] != d.y) bits += kBitsOfException;
  return bits;
}

// Of a symbol that is absent: the present one of least cost, ties to the lowest.
__device__ __noinline__ inline ChosenSymbol choose_substitute(const DeviceCodebook& book,
                                                              const uint32_t* words, Place at,
                                                              int32_t places) {
  int32_t best = 0, best_cost = INT32_MAX;
#pragma unroll 1
  for (int32_t i = -1; i < places; ++i) {  // little code: it is seldom in the instruction cache
    const int32_t digit = i < 0 ? 0 : at.digit[0 < i ? 1 : 0];
    if (digit < 0) continue;
    const int32_t kept = book.cheapest[i < 0 ? 0 : 1 + i * book.levels + digit];
    if (kept == Codebook::kNoSymbol) continue;
    const int32_t cost = cost_of_symbol(book, words, kept, at, places);
    if (cost < best_cost || (cost == best_cost && kept < best)) best = kept, best_cost = cost;
  }
  return {words[best], best};
}

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
  __device__ __forceinline__ int32_t exceptions() const {
    return (delta[0] != 0) + (delta[1] != 0);
  }
  __device__ __forceinline__ bool fits() const {
    return static_cast<int16_t>(delta[0]) == delta[0] && static_cast<int16_t>(delta[1]) == delta[1];
  }
};
// What has a call in it gets copies: registers whose address is known elsewhere are no registers.
__device__ __noinline__ inline Substitute find_substitute(LaneBook from, int32_t first,
                                                          int32_t second) {
  DeviceCodebook book;
  book.levels = from.levels;
  book.cheapest = from.cheapest;
  const int32_t code[2] = {first, second};
  Place p{};
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t above = code[i] - from.base;
    const bool inside = above >= 0 && above < from.levels;
    p.digit[i] = code[i] >= kPaddingCodes ? kPaddingCode : inside ? above : kOutsideAlphabet;
  }
  const ChosenSymbol chosen = choose_substitute(book, from.words, p, 2);
  const int2 digits = symbol_digits(book, chosen.symbol, 2);
  Substitute other{chosen.word, {0, 0}};
  for (int32_t i = 0; i < 2; ++i) {
    if (p.digit[i] == kPaddingCode) continue;
    other.delta[i] = code[i] - from.base - (i == 0 ? digits.x : digits.y);
  }
  return other;
}

}  // namespace tierkv
