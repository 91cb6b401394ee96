// SPDX-License-Identifier: Apache-2.0
// Finite state entropy: tANS as zstd codes it (RFC 8878, section 4.1), one state, one table for
// many blocks.
//
// A table has 2^12 states, spread over the codes in proportion to how often they occur. Codes
// outside of the alphabet, or that never occurred, are escaped: a symbol of its own, and the code
// raw.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/host/coded/histogram.h"
#include "tools/analysis/baselines/block_coder.h"

namespace tierkv::analysis {

class FseCoder : public BlockCoder {
 public:
  static constexpr int32_t kMaxLevels = 1024;  // of the alphabet, the escape not counted

  // The alphabet is the range of kMaxLevels codes, or fewer, that holds most of the histogram,
  // which is not empty.
  explicit FseCoder(const CodeHistogram& histogram);

  StatusCode encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    std::vector<uint8_t>* out) const override;
  StatusCode decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    int16_t* codes) const override;
  // Base, number of levels, and two bytes a symbol.
  int64_t table_bytes() const override { return 4 + 2 * static_cast<int64_t>(counts_.size()); }

 private:
  void choose_alphabet(const CodeHistogram& histogram);
  void normalize(const std::vector<uint64_t>& occurrences);
  void build_states();
  int32_t escape() const { return static_cast<int32_t>(counts_.size()) - 1; }
  int32_t symbol_of(int16_t code) const {
    const int32_t s = code - base_;
    return s >= 0 && s < escape() && counts_[s] > 0 ? s : escape();
  }

  static constexpr int32_t kLog = 12;  // zstd's largest

  int32_t base_ = 0;
  std::vector<uint32_t> counts_;  // [symbols] states of each, 2^12 together; the last is the escape
  // Encoder: from a state in [2^12, 2^13).
  struct Step {
    uint32_t bits_minus = 0;  // (state + this) >> 16 is the number of bits that leave
    int32_t next_base = 0;    // next state: next_[(state >> bits) + this]
  };
  std::vector<Step> steps_;
  std::vector<uint16_t> next_;  // [2^12]
  // Decoder: from a state in [0, 2^12).
  struct State {
    uint16_t symbol = 0;
    uint8_t bits = 0;
    uint16_t base = 0;  // the next state is this plus the next `bits` bits
  };
  std::vector<State> states_;
};

}  // namespace tierkv::analysis
