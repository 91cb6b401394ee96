// SPDX-License-Identifier: Apache-2.0
// Body tokens as blocks of channel-wise keys, in device memory: the bytes of ChannelRows
// (channel_rows.h).
#pragma once

#include <memory>

#include "store/rows/device_row_format.h"

namespace tierkv::store {

// `host` is what make_channel_rows() made of the config; it outlives the result. kUnsupported for
// more than 16 q heads a kv_head.
Result<std::unique_ptr<DeviceRowFormat>> make_device_channel_rows(const StoreConfig& config,
                                                                  RowFormat* host);

}  // namespace tierkv::store
