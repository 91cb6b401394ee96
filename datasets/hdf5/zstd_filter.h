// SPDX-License-Identifier: Apache-2.0
// HDF5 filter 32015 (zstd), in process: no plugin needs to be installed to read or write such
// dumps.
#pragma once

#include <hdf5.h>

namespace tierkv::datasets {

inline constexpr H5Z_filter_t kZstdFilterId = 32015;

bool register_zstd_filter();

}  // namespace tierkv::datasets
