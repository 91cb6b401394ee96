// SPDX-License-Identifier: Apache-2.0
// Body tokens at fixed widths by importance, in device memory: the bytes of TiersRows
// (tiers_rows.h). A token's tier may differ only where an importance that queries counted is so
// near a threshold that the last bit of a logarithm decides.
#pragma once

#include <memory>

#include "store/rows/device_row_format.h"

namespace tierkv::store {

// `host` is what make_tiers_rows() made of the config; it outlives the result. kUnsupported: what
// attention over pages does not take.
Result<std::unique_ptr<DeviceRowFormat>> make_device_tiers_rows(const StoreConfig& config,
                                                                RowFormat* host);

}  // namespace tierkv::store
