// Body tokens as blocks of channel-wise keys, in host memory.
#pragma once

#include <memory>

#include "store/rows/row_format.h"

namespace tierkv::store {

Result<std::unique_ptr<RowFormat>> make_channel_rows(const StoreConfig& config);

}  // namespace tierkv::store
