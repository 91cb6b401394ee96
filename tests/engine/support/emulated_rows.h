// SPDX-License-Identifier: Apache-2.0
// Row formats in device memory whose kernels are run on the host
// (tests/engine/emulated_*_format.cc).
#pragma once

#include <memory>
#include <random>

#include "store/rows/channel/channel_rows.h"
#include "store/rows/device_row_format.h"
#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store::test {

// CTAs run in random order. The host's rows must outlive the result.
std::unique_ptr<DeviceRowFormat> emulated_tiers_rows(const TiersRows& rows, std::mt19937* rng);
std::unique_ptr<DeviceRowFormat> emulated_channel_rows(const StoreConfig& config,
                                                       const ChannelRows& rows, std::mt19937* rng);

}  // namespace tierkv::store::test
