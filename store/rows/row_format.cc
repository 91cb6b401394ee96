// SPDX-License-Identifier: Apache-2.0
#include "store/rows/row_format.h"

#include "store/rows/channel/channel_rows.h"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {

Result<std::unique_ptr<RowFormat>> make_row_format(const StoreConfig& config) {
  if (std::holds_alternative<CodedFormat>(config.format)) return make_coded_rows(config);
  if (std::holds_alternative<TiersFormat>(config.format)) return make_tiers_rows(config);
  return make_channel_rows(config);
}

}  // namespace tierkv::store
