// SPDX-License-Identifier: Apache-2.0
// Which bytes of the pages of tiers are defined.
#pragma once

#include "store/rows/tiers/tiers_rows.h"
#include "tests/engine/support/rows_twin.h"

namespace tierkv::store::test {

// Slots not in use yet are empty.
inline int64_t tiers_page_bytes(const RowFormat& format, const RowsTwin::PageAsked& page) {
  const auto& rows = static_cast<const TiersRows&>(format);
  const int32_t row_class =
      rows.class_of_head()[page.layer * rows.config().layout.num_kv_heads + page.row];
  return rows.classes()[row_class].layout[page.side].scores;
}

}  // namespace tierkv::store::test
