// SPDX-License-Identifier: Apache-2.0
// What the plain and the fast page codec share: argument checks and the clearing of slots. Internal
// to codec/.
#pragma once

#include "codec/format/errors.h"
#include "codec/host/page_codec.h"

namespace tierkv {

// Page, slots and arguments.
Status check_batch(const HostPage& page, int32_t used, const TokenBatch& batch);
Status check_output(const HostPage& page, int32_t first_slot, const TokenOutput& out);

inline int64_t batch_row(const int32_t* rows, int32_t i) {
  return rows == nullptr ? i : rows[i];
}
inline int64_t row_stride_of(int64_t row_stride, int32_t head_dim) {
  return row_stride == 0 ? head_dim : row_stride;
}

namespace reference {
// The first `count` tokens of a checked batch; a checked output. A failed append clears the slots
// it wrote.
Status append_range(const HostPage& page, int32_t used, const TokenBatch& batch, int32_t count);
void decode_range(const HostPage& page, int32_t first_slot, const TokenOutput& out);
}  // namespace reference

// Trusted slots and tiles.
void clear_tile(const HostPage& page, int32_t tile_index);
void clear_slot(const HostPage& page, int32_t slot);

}  // namespace tierkv
