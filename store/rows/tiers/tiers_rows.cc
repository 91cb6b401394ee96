#include "store/rows/tiers/tiers_rows.h"

namespace tierkv::store {

Result<std::unique_ptr<RowFormat>> make_tiers_rows(const StoreConfig&) {
  return Status(StatusCode::kUnsupported, "format: tiers");
}

}  // namespace tierkv::store
