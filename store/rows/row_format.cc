// SPDX-License-Identifier: Apache-2.0
#include "store/rows/row_format.h"

#include "store/rows/channel/channel_rows.h"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {
namespace {

template <class Rows>
Result<std::unique_ptr<RowFormat>> make(const StoreConfig& config) {
  auto rows = std::make_unique<Rows>(config);
  if (Status s = rows->prepare(); !s) return s;
  return std::unique_ptr<RowFormat>(std::move(rows));
}

}  // namespace

Result<std::unique_ptr<RowFormat>> make_row_format(const StoreConfig& config) {
  if (std::holds_alternative<CodedFormat>(config.format)) return make<CodedRows>(config);
  if (std::holds_alternative<TiersFormat>(config.format)) return make<TiersRows>(config);
  return make<ChannelRows>(config);
}

}  // namespace tierkv::store
