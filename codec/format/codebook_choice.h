// SPDX-License-Identifier: Apache-2.0
// What build_codebook() tries and how it judges, for host and device alike.
#pragma once

#include <cstdint>

#include "tierkv/half.h"

namespace tierkv {

// Alphabets that are tried: the widest, some narrower ones, and one of as many codes as there are.
inline constexpr int32_t kAlphabetChoices = 11;

// Levels of choice i, 0 where it is not to be tried. `enough` holds all codes.
TKV_HD int32_t alphabet_levels(int32_t i, int32_t narrowest, int32_t widest, int32_t enough) {
  constexpr int32_t kLevels[kAlphabetChoices] = {0, 128, 96, 64, 48, 40, 28, 24, 20, 16, 0};
  const int32_t levels = i == 0 ? widest : i == kAlphabetChoices - 1 ? enough : kLevels[i];
  return levels < narrowest || levels > widest || levels > enough ? 0 : levels;
}

// Symbols that are rarer than one in a share of the decode table become exceptions.
inline constexpr int32_t kRarityChoices = 4;
TKV_HD uint64_t rarest_kept(int32_t i, uint64_t total, int32_t max_length) {
  const uint64_t share = i == 0 ? 8 : i == 1 ? 24 : i == 2 ? 72 : uint64_t{1} << 30;
  const uint64_t least = total / (share << max_length);
  return least > 1 ? least : 1;
}

// a * b / total without overflow, for counts below 2^56; exact enough to rank symbols and the same
// on every machine.
TKV_HD uint64_t expected_count(uint64_t a, uint64_t b, uint64_t total) {
  int32_t shift = 0;
  while (total >> shift >= uint64_t{1} << 31) ++shift;
  return total >> shift == 0 ? 0 : ((a >> shift) * (b >> shift) / (total >> shift)) << shift;
}

// What a code for some symbols costs.
struct CodeCost {
  uint64_t payload = 0;   // bits of the kept symbols
  uint64_t total = 0;     // symbols
  uint64_t dropped = 0;   // of them without a code word
  uint64_t outside = 0;   // codes outside the alphabet
  uint64_t low_bits = 0;  // kSplit: of the low nibbles
  int64_t book_bytes = 0;
};

// An exception also costs the decoder some work, so a symbol stays in the alphabet although its
// code words, which shorten everybody else's, cost up to twice the bits
// (docs/notes/2026-11-21-entropy-choices.md).
inline constexpr double kExceptionPrice = 64;

// In bits, rounded alike everywhere. A symbol that replaces a dropped one is taken to have the mean
// length.
TKV_HD double price_of(const CodeCost& c) {
  auto bits = static_cast<double>(c.payload);
  if (c.total > c.dropped) {
    bits *= static_cast<double>(c.total) / static_cast<double>(c.total - c.dropped);
  }
  const double exceptions = kExceptionPrice * static_cast<double>(c.outside + c.dropped);
  const double fixed = static_cast<double>(c.low_bits) + 8.0 * static_cast<double>(c.book_bytes);
#if defined(__CUDA_ARCH__)
  return __dadd_rn(__dadd_rn(bits, fixed), exceptions);
#else
  return bits + fixed + exceptions;
#endif
}

}  // namespace tierkv
