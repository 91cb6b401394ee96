// What the kernels of coded attention are launched with.
#pragma once

#include "attention/coded_attention.h"

namespace tierkv {

// What a block must say: words 0 and 1 of its header, tokens left out.
struct ExpectedHeader {
  uint32_t first, second;
};
struct CodedHeaders {
  ExpectedHeader keys, values;
};
inline ExpectedHeader expected_header(const DeviceCodebook& c, int32_t head_dim) {
  return {kCodedBlockVersion | static_cast<uint32_t>(c.mode) << 8 |
              static_cast<uint32_t>(c.streams_per_lane) << 12 | uint32_t{c.table_id} << 16 |
              static_cast<uint32_t>(c.component) << 24,
          static_cast<uint32_t>(head_dim) << 8 | static_cast<uint32_t>(c.base) << 16};
}

// One pass over the cache, for at most kCodedColumns columns.
struct CodedKernelParams {
  CodedAttention call;  // columns: of this pass, which begin at q, out and lse
  CodedAttentionGrid grid;
  CodedHeaders headers;
  uint32_t key_mask, value_mask;  // of the tables in shared memory
  int32_t row_columns;            // of a row of q, out and lse
};

}  // namespace tierkv
