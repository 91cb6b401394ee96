#include "store/rows/coded/coded_rows.h"

namespace tierkv::store {
Result<std::unique_ptr<RowFormat>> make_coded_rows(const StoreConfig&) {
  return Status(StatusCode::kUnsupported, "format: coded");
}
}  // namespace tierkv::store
