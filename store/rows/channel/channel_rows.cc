#include "store/rows/channel/channel_rows.h"

namespace tierkv::store {

Result<std::unique_ptr<RowFormat>> make_channel_rows(const StoreConfig&) {
  return Status(StatusCode::kUnsupported, "format: channel");
}

}  // namespace tierkv::store
