// The attention of a store's pages.
#pragma once

#include "store/store_shape.h"
#include "tierkv/attention.h"

namespace tierkv {

AttentionConfig attention_config(const KvStoreConfig& config, int64_t page_bytes);

}  // namespace tierkv
