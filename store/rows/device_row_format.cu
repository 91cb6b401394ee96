// SPDX-License-Identifier: Apache-2.0
#include "store/rows/device_row_format.h"

#include <variant>

namespace tierkv::store {

Result<std::unique_ptr<DeviceRowFormat>> make_device_row_format(const StoreConfig& config,
                                                                RowFormat* host) {
  if (std::holds_alternative<CodedFormat>(config.format)) {
    return make_device_coded_rows(config, host);
  }
  if (std::holds_alternative<TiersFormat>(config.format)) {
    return make_device_tiers_rows(config, host);
  }
  return make_device_channel_rows(config, host);
}

}  // namespace tierkv::store
