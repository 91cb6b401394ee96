// SPDX-License-Identifier: Apache-2.0
// Counts of quantisation codes: what a codebook is built from (KVComp section 3.1.2).
//
// One histogram serves one codebook: add the codes of every row that shares it, in any order, then
// build. Besides the single codes it counts the pairs that one table lookup decodes
// (codec/format/fragment_order.h): for keys two neighbouring channels of a token, for values one
// channel of two neighbouring tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/format.h"

namespace tierkv {

// a * b / total without overflow, for counts below 2^56; exact enough to rank symbols and the same
// on every machine.
inline uint64_t expected_count(uint64_t a, uint64_t b, uint64_t total) {
  int32_t shift = 0;
  while (total >> shift >= uint64_t{1} << 31) ++shift;
  return total >> shift == 0 ? 0 : ((a >> shift) * (b >> shift) / (total >> shift)) << shift;
}

class CodeHistogram {
 public:
  // Pairs are counted exactly where both codes lie in [kPairMin, kPairMax], which holds all signed
  // and all unsigned 8-bit codes. Codes are taken modulo 256 there, so a histogram with a wider
  // range has ambiguous pairs.
  static constexpr int32_t kPairMin = -128;
  static constexpr int32_t kPairMax = 255;

  CodeHistogram(Component component, int32_t head_dim)
      : component_(component), head_dim_(head_dim), singles_(65536), pairs_(65536) {}
  // From counts of single codes [65536] and of pairs [65536], as below, without padding or quads.
  CodeHistogram(Component component, int32_t head_dim, std::vector<uint64_t> singles,
                std::vector<uint64_t> pairs);

  // codes: [tokens, head_dim]. The first token starts a block of 64 (kBlockTokens); any number of
  // tokens may follow.
  void add(const int16_t* codes, int64_t tokens);
  // Both histograms count the same component and head_dim.
  void merge(const CodeHistogram& other);

  Component component() const { return component_; }
  int32_t head_dim() const { return head_dim_; }
  bool empty() const { return total_ == 0; }
  int64_t total() const { return total_; }
  // Smallest and largest code seen; 0 and -1 while empty.
  int32_t min_code() const { return min_; }
  int32_t max_code() const { return max_; }
  // Occurrences of any 16-bit code.
  uint64_t count(int32_t code) const { return singles_[static_cast<uint16_t>(code)]; }
  // Where a pair is counted.
  static size_t pair_index(int32_t first, int32_t second) {
    return static_cast<size_t>(static_cast<uint8_t>(first)) << 8 | static_cast<uint8_t>(second);
  }
  // Occurrences of `first` and `second` as the two codes of a pair, both in [kPairMin, kPairMax].
  uint64_t pair_count(int32_t first, int32_t second) const {
    return pairs_[pair_index(first, second)];
  }
  // Pairs whose second code is padding (an odd last channel or token), and pairs of padding alone,
  // which fill a tile.
  uint64_t lone_count(int32_t first) const { return lone_[static_cast<uint8_t>(first)]; }
  uint64_t padding_pairs() const { return padding_pairs_; }
  bool pairs_are_exact() const { return min_ >= kPairMin && max_ <= kPairMax && max_ - min_ < 256; }

  // Two pairs that one lookup of four 2-bit codes decodes: `first` and the pair 8 tokens (keys) or
  // 8 channels (values) further. Counted while the codes span at most 4 values.
  bool quads_are_exact() const { return max_ - min_ < 4 && has_quads_; }
  // codes: first pair's two, then second pair's two, each in [min_code(), min_code() + 4).
  uint64_t quad_count(const int32_t codes[4]) const {
    return quads_[quad_index(codes[0], codes[1], codes[2], codes[3])];
  }

 private:
  static size_t quad_index(int32_t a, int32_t b, int32_t c, int32_t d) {
    return static_cast<size_t>((a & 3) | (b & 3) << 2 | (c & 3) << 4 | (d & 3) << 6);
  }
  void add_block(const int16_t* codes, int32_t tokens);
  void add_quads(const int16_t* codes, int32_t tokens);

  Component component_;
  int32_t head_dim_;
  int64_t total_ = 0;
  int32_t min_ = 0, max_ = -1;
  bool has_quads_ = true;
  std::vector<uint64_t> singles_;  // [65536], by code modulo 2^16
  std::vector<uint64_t> pairs_;    // [256][256], by codes modulo 256
  std::vector<uint64_t> lone_ = std::vector<uint64_t>(256);
  std::vector<uint64_t> quads_ = std::vector<uint64_t>(256);  // [4][4][4][4], by codes modulo 4
  uint64_t padding_pairs_ = 0;
};

}  // namespace tierkv
