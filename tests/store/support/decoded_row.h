// What the pages of a row decode to, with positions.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "store/tiers/row_pages.h"

namespace tierkv::testing {

struct Decoded {
  std::vector<float> k, v;  // [tokens, head_dim]
  std::vector<int32_t> positions;
};

inline Decoded decode_row(const StoreView& s, int32_t row) {
  Decoded d;
  const int32_t dim = s.layouts[0].head_dim();
  std::vector<float> k(dim), v(dim);
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (int32_t i = 0; i < s.allocator.tokens[row].of[side]; ++i) {
      const HostSlot at = row_slot(s, row, side, i);
      TokenOutput out;
      out.k = k.data();
      out.v = v.data();
      out.count = 1;
      EXPECT_TRUE(decode_tokens(at.page, at.slot, out));
      d.k.insert(d.k.end(), k.begin(), k.end());
      d.v.insert(d.v.end(), v.begin(), v.end());
      d.positions.push_back(page_position(at.page, at.slot));
    }
  }
  return d;
}

}  // namespace tierkv::testing
