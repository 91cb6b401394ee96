// Coded rows in device memory.
#pragma once

#include <memory>

#include "store/rows/device_row_format.h"

namespace tierkv::store {

// host: coded rows, bound to no pages; outlives the result.
Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat* host);

}  // namespace tierkv::store
