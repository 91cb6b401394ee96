// The C form of a store's configuration.
#pragma once

#include "tierkv/store.h"
#include "tierkv/tierkv_store_c.h"

namespace tierkv::capi {

// Checked: what it reads through pointers has the sizes that the rest of the config says.
Status read_store_config(const tkv_store_config* in, KvStoreConfig* out);

}  // namespace tierkv::capi
