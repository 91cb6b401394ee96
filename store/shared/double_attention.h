// Attention of a host back end over rows that are decoded to double: the plain softmax.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "store/shared/sequence_table.h"
#include "tierkv/store.h"

namespace tierkv {

// Brings one row of the request's layer: keys and values of all its tokens, [tokens, head_dim].
using ReadDecodedRow = std::function<Status(int32_t slot, int32_t kv_head, std::vector<double>* k,
                                            std::vector<double>* v)>;

// An admitted request, q and out in its dtype. kNonFinite for queries and sinks; what `read` says.
Status attend_in_double(const KvStoreConfig& config, const AttendRequest& request,
                        const Slots& slots, const ReadDecodedRow& read);

}  // namespace tierkv
