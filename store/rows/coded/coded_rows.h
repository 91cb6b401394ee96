// Body tokens as coded blocks of weighted steps, in host memory.
#pragma once

#include <memory>

#include "store/rows/row_format.h"

namespace tierkv::store {

Result<std::unique_ptr<RowFormat>> make_coded_rows(const StoreConfig& config);

}  // namespace tierkv::store
