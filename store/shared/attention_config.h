// The attention of a store's pages.
#pragma once

#include "store/tiers/store_shape.h"
#include "tierkv/attention.h"

namespace tierkv {

AttentionConfig attention_config(const KvStoreConfig& config, int64_t page_bytes);
// The same for q and out of `dtype`. kUnsupported where raw tiers hold another one.
Result<AttentionConfig> attention_config(AttentionConfig config, DType dtype, DType raw_dtype);
// Where the newest tokens lie; `newest` holds the newest_index() of each sequence of the batch.
AttentionTail window_tail(const KvStoreConfig& config, const int32_t* newest);

}  // namespace tierkv
