// Body tokens at fixed widths by importance, in host memory.
#pragma once

#include <memory>

#include "store/rows/row_format.h"

namespace tierkv::store {

Result<std::unique_ptr<RowFormat>> make_tiers_rows(const StoreConfig& config);

}  // namespace tierkv::store
