// What a truncation does to the pages of a row.
//
// Tokens of the high and low tier that are forgotten leave holes. They are closed with the last
// tokens of the side, in place; where that would write to a shared page, or leave one partly
// filled, the side keeps its pages up to the first one with a hole and the tokens behind it move to
// new pages instead. The window is laid out anew, on its own pages.
#pragma once

#include <cstdint>
#include <vector>

#include "store/tiers/row_pages.h"

namespace tierkv {

// A token that is lifted off its page and put down again once the sides have their new pages.
struct LiftedToken {
  int32_t side;
  int32_t from, to;  // indices
};
// A token that moves into a hole of its side.
struct HoleFill {
  int32_t side;
  int32_t from, to;
};

struct RowCut {
  SideCounts before;
  SideCounts kept;    // tokens after the side's last pages were dropped
  SideCounts target;  // tokens in the end; kept tokens and the lifted ones behind them
  std::vector<HoleFill> fills;
  std::vector<LiftedToken> lifted;
};

// A row of a sequence past its prompt; the pages may lie in host memory only.
RowCut plan_row_cut(const StoreView& s, int32_t row, const SequenceInfo& before,
                    const SequenceInfo& after);

}  // namespace tierkv
