// SPDX-License-Identifier: Apache-2.0
// How decode attention over rows of channel blocks (codec/format/channel_block.h) is cut into CTAs.
//
//   units  of a row: its raw tiles, then its blocks
//   pass   kBlockColumns query columns of a row (attention/core/columns.h)
//   team   the warps of a CTA that share a pass: they take the units in turn
//   item   consecutive units of a row, for one CTA for every group of passes; all rows have as many
//
// With k = scale_d code + zero_point_d, q . k = (q * scale) . code + q . zero_point: a block costs
// one scaling of the query and one product with the zero points, its tokens nothing. Values as in
// pages.
//
// Sources: BitDecoding section 4 (channel-wise keys on tensor cores).
#pragma once

#include <cstdint>

#include "attention/core/columns.h"
#include "codec/format/channel_block.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kChannelWarps = 4;  // of a CTA, at most
TKV_HD constexpr int32_t channel_ctas_per_sm(int32_t head_dim) {
  return head_dim > 128 ? 2 : 3;
}
inline constexpr int32_t kMostChannelSplits = 64;  // of a row, that a join takes little time for

// What the CTAs of a launch are made of.
struct ChannelCtas {
  QueryColumns columns;  // in passes of kBlockColumns
  int32_t passes = 1;    // of a CTA
  int32_t groups = 1;    // of passes: CTAs of an item
  int32_t warps = kChannelWarps;
  int32_t team = kChannelWarps;  // warps / passes

  TKV_HD constexpr int32_t all_columns() const { return columns.passes * columns.of_row; }
};
ChannelCtas channel_ctas(int32_t group, int32_t q_len, int32_t num_kv_heads, int32_t head_dim);

struct alignas(16) ChannelItem {
  int32_t row = 0;             // of the launch
  int32_t first = 0, end = 0;  // units
  int32_t raw_tokens = 0;      // of the row
  int32_t part = -1;           // where it is left to be joined; -1: the row has no other item
};

TKV_HD constexpr int32_t channel_unit(int32_t units, int32_t splits, int32_t split) {
  return static_cast<int32_t>(static_cast<int64_t>(units) * split / splits);
}

// Splits of rows of one length, so many that all CTAs take the least time together.
struct ChannelRows {
  int32_t num_rows = 0;
  int32_t units = 0;  // of a row
  int32_t most_splits = 1;
};
int32_t choose_channel_splits(const ChannelCtas& ctas, const ChannelRows& rows,
                              int32_t resident_ctas);

inline constexpr int32_t kMaxChannelGroup = 16;
// kInvalidArgument, and kUnsupported for more than kMaxChannelGroup q heads a kv_head.
Status validate_channel_group(int32_t group);

}  // namespace tierkv
