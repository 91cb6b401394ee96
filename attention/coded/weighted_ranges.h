// SPDX-License-Identifier: Apache-2.0
// The rows of weighted blocks that attention reads, as decode_weighted() takes them: what a prefill
// kernel needs of a compressed prefix.
#pragma once

#include "attention/coded/coded_attention.h"
#include "codec/gpu/coded/weighted_batch.h"

namespace tierkv {

// Memory for positions from `first` on of one row: [last - first][head_dim], head_dim elements of
// every token side by side. Device memory; multiples of 16 bytes are the fastest.
struct RowTokens {
  uint16_t* out = nullptr;
  int64_t token_stride = 0;  // in elements
};

// The coded ones of a row's positions [first, last), to their places in `to`; raw sinks and the
// window are left out. The row's steps must be row CodedRow::step of DeviceWeightedRows.
TKV_HD WeightedRange decoded_range(const CodedRow& row, int32_t first, int32_t last,
                                   const RowTokens& to) {
  WeightedRange r;
  r.body_first = row.sink_tokens;
  r.body_last = row.sink_tokens + row.coded_tokens;
  r.first = first < r.body_first ? r.body_first : first;
  r.last = last > r.body_last ? r.body_last : last;
  if (r.last < r.first) r.first = r.last = r.body_first;
  r.row = row.step;
  r.first_block = row.first_block;
  r.out = r.first == r.last ? to.out : to.out + (r.first - first) * to.token_stride;
  r.token_stride = to.token_stride;
  return r;
}
// Blocks that a range meets: WeightedDecode::most_blocks is the most of all ranges.
TKV_HD int32_t range_blocks(const WeightedRange& r) {
  return r.last == r.first ? 0 : (r.last - 1) / kBlockTokens - r.first / kBlockTokens + 1;
}

// A component's directory of blocks.
static_assert(sizeof(CodedBlockRef) == sizeof(WeightedPlace));
inline const WeightedPlace* weighted_places(const CodedComponent& component) {
  return reinterpret_cast<const WeightedPlace*>(component.blocks);
}

}  // namespace tierkv
