// SPDX-License-Identifier: Apache-2.0
// Coded rows in device memory: the bytes of CodedRows (coded_rows.h), made, read and attended to by
// kernels.
//
// Steps of sequences whose layers are fixed run without the host. A call that fixes a layer waits
// for the device where the host has to work out something from tokens: codebooks, once for a layer
// of the store, and without a profile's means and query energies means and steps of each sequence.
// It also allocates for a moment as much as the raw blocks of the layers that it fixes take.
//
// Where the newest block is continued on a page that a fork shares, a captured step puts the block
// behind all others and leaves the old one as it is; the host's table is shorter then.
#pragma once

#include <memory>

#include "store/rows/device_row_format.h"

namespace tierkv::store {

// `host`: a CodedRows. kUnsupported: key_books beyond 1; means or weights that attention has no
// numbers for.
Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat* host);

}  // namespace tierkv::store
