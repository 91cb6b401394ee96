// SPDX-License-Identifier: Apache-2.0
// Canonical, length-limited Huffman codes over small alphabets, and the bits of a stream.
//
// Everything follows from the code lengths (docs/reference/format.md, "Codebooks"): symbols sorted
// by (length, symbol) take consecutive code words; a word is written first bit first into bit 0
// upwards of 32-bit little-endian words. Lengths always satisfy Kraft's equation exactly, so every
// bit pattern decodes to a symbol of the alphabet.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "tierkv/status.h"

namespace tierkv {

// Optimal code lengths of at most max_length bits, by package-merge (Larmore and Hirschberg 1990).
//
// A symbol of count 0 is absent and gets length 0, except that while fewer than two symbols are
// present the lowest absent one joins. Ties are decided so that any implementation finds the same
// lengths: present symbols are sorted by (count, symbol); packages join neighbours of the list one
// level below; merging takes the single symbol before a package of equal weight. The sum of the
// counts must be below 2^56. kInvalidArgument: fewer than two symbols in the alphabet, or more
// present ones than 2^max_length.
Status find_code_lengths(const std::vector<uint64_t>& counts, int32_t max_length,
                         std::vector<uint8_t>* lengths);

// True when the present symbols (length > 0) form a complete prefix code of at most max_length
// bits.
bool is_complete_code(const std::vector<uint8_t>& lengths, int32_t max_length);

// Code words of a complete code, first bit in bit 0.
std::vector<uint16_t> assign_code_words(const std::vector<uint8_t>& lengths);

// symbol_of[i]: the symbol whose word the low bits of i begin with, for all i < 2^max_length.
std::vector<uint16_t> build_lookup(const std::vector<uint8_t>& lengths,
                                   const std::vector<uint16_t>& words, int32_t max_length);

// Appends code words to 32-bit words in memory, which must have room for kBitWriterSlackBytes
// behind the last one: every put stores the word it is in and the next, so that there is no branch
// to mispredict.
inline constexpr int32_t kBitWriterSlackBytes = 8;
class BitWriter {
 public:
  explicit BitWriter(uint8_t* bytes) : bytes_(bytes) {}
  // length <= 32; bits above it are zero.
  void put(uint32_t bits, int32_t length) {
    pending_ |= static_cast<uint64_t>(bits) << (position_ & 31);
    memcpy(bytes_ + (position_ >> 5) * 4, &pending_, 8);
    const int64_t before = position_ >> 5;
    position_ += length;
    pending_ >>= 32 * ((position_ >> 5) - before);
  }
  int64_t position() const { return position_; }

 private:
  uint8_t* bytes_;
  uint64_t pending_ = 0;
  int64_t position_ = 0;
};

}  // namespace tierkv
