// SPDX-License-Identifier: Apache-2.0
// A RowState with its arrays, for the tiering tests.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/policy/tiering.h"

namespace tierkv {

class Row {
 public:
  explicit Row(int32_t capacity) {
    for (TokenSet* set : {&state.window, &state.sinks, &state.high, &state.low}) {
      floats_.emplace_back(capacity, -99.0f);
      ints_.emplace_back(capacity, -99);
      ints_.emplace_back(capacity, -99);
      flags_.emplace_back(capacity, uint8_t{0xee});
      set->scores = floats_.back().data();
      set->counts = ints_[ints_.size() - 2].data();
      set->positions = ints_.back().data();
      set->frozen = flags_.back().data();
      set->capacity = capacity;
    }
  }

  // To the end of a set; the window of a row built by hand starts at index 0.
  void add(TokenSet* set, float score, int32_t position) {
    set->scores[set->size] = score;
    set->counts[set->size] = 1;
    set->positions[set->size] = position;
    set->frozen[set->size++] = 0;
  }

  std::vector<int32_t> positions(const TokenSet& set) const {
    std::vector<int32_t> out;
    for (int32_t n = 0; n < set.size; ++n) {
      const bool ring = set.positions == state.window.positions;
      out.push_back(set.positions[ring ? (state.window_head + n) % set.capacity : n]);
    }
    return out;
  }

  RowState state;

 private:
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<int32_t>> ints_;
  std::vector<std::vector<uint8_t>> flags_;
};

}  // namespace tierkv
