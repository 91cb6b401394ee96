// SPDX-License-Identifier: Apache-2.0
// How attention over channel blocks is cut into CTAs: whole splits of every row, as many as its
// length asks for, made on the device from the lengths that rows have then.
//
//   units  of a row: its raw tiles, then its blocks
//   pass   kBlockColumns query columns of a row (attention/core/columns.h); the warps of a CTA
//   share its
//          passes, and those of a pass, a team, take the units in turn
//   item   consecutive units of a row, for one CTA for every group of passes
//
// The host chooses how many items there are, which a captured graph then keeps; the device cuts the
// rows into as many, of one size as near as can be, whatever the lengths are by then. Large items
// come first.
#pragma once

#include <cstdint>

#include "attention/core/columns.h"
#include "codec/format/channel_block.h"

namespace tierkv {

inline constexpr int32_t kChannelWarps = 4;  // of a CTA, at most
TKV_HD constexpr int32_t channel_ctas_per_sm(int32_t head_dim) {
  return head_dim > 128 ? 2 : 3;
}
// Items beyond one a row, of one pass; for each of them two parts of all query columns are kept.
inline constexpr int32_t kMostExtraItems = 2048;
inline constexpr int32_t kMostChannelSplits = 64;  // on average, that a join takes little time for

// What the CTAs of a launch are made of.
struct ChannelCtas {
  QueryColumns columns;  // in passes of kBlockColumns
  int32_t passes = 1;    // of a CTA
  int32_t groups = 1;    // of passes: CTAs of an item
  int32_t warps = kChannelWarps;
  int32_t team = kChannelWarps;  // warps / passes

  TKV_HD constexpr int32_t all_columns() const { return columns.passes * columns.of_row; }
  constexpr int32_t most_items(int32_t num_rows) const {
    const int64_t extra = kMostExtraItems / (passes == 1 ? 1 : 2) / groups;
    const int64_t each = int64_t{num_rows} * (kMostChannelSplits - 1);
    return num_rows + static_cast<int32_t>(extra < each ? extra : each);
  }
};
ChannelCtas channel_ctas(int32_t group, int32_t q_len, int32_t num_kv_heads, int32_t head_dim);

// What the rows of a sequence, one of every kv_head, hold now. table_row: that of kv_head 0, behind
// which the others lie; -1: nothing.
struct ChannelSequence {
  int32_t table_row = -1;
  int32_t blocks = 0;
  int32_t raw_tokens = 0;

  TKV_HD constexpr int32_t units() const {
    return (raw_tokens + kTileTokens - 1) / kTileTokens + blocks;
  }
};

struct alignas(16) ChannelItem {
  int32_t row = -1;            // of the batch; -1: nothing to do
  int32_t table_row = -1;      // -1: nothing
  int32_t first = 0, end = 0;  // units
  int32_t raw_tokens = 0;      // of the row
  int32_t part = -1;           // where it is left to be joined; -1: the row has no other item
  int32_t unused[2] = {};
};
static_assert(sizeof(ChannelItem) == 32, "two 16-byte accesses per item");

// The parts of a row, where it has several items.
struct ChannelParts {
  int32_t first = 0;
  int32_t count = 1;
};

// All pointers in one memory, host or device.
struct ChannelPlan {
  int32_t num_items = 0;          // at least one for each row
  ChannelItem* items = nullptr;   // [num_items], 16-byte aligned
  ChannelParts* parts = nullptr;  // [rows]
};

// What is planned. Written: all of the plan.
struct ChannelPlanCall {
  const ChannelSequence* sequences = nullptr;  // [num_sequences], as the plan
  int32_t num_sequences = 0;
  int32_t num_kv_heads = 1;
  int32_t team = 1;
  // What a sequence may hold; one that passes them is kCorrupt, and planned as one with nothing.
  int32_t most_blocks = 0, most_raw_tokens = 0, num_table_rows = 0;
  int32_t least_raw_tokens = 0;  // that are not seen by all queries
  ChannelPlan plan;
  StatusCode* status = nullptr;  // kCorrupt where it was kOk
};
TKV_HD constexpr bool is_sound(const ChannelPlanCall& call, const ChannelSequence& s) {
  if (s.table_row < 0) return s.table_row == -1;
  return call.num_kv_heads <= call.num_table_rows - s.table_row && s.blocks >= 0 &&
         s.blocks <= call.most_blocks && s.raw_tokens >= call.least_raw_tokens &&
         s.raw_tokens <= call.most_raw_tokens;
}

// Items of a row whose items have at most `share` units for each warp of a team.
TKV_HD constexpr int32_t channel_splits(int32_t units, int32_t team, int32_t share) {
  const int32_t most = team * share;
  return units <= most ? 1 : (units + most - 1) / most;
}
// 0 for the largest items.
inline constexpr int32_t kItemSizes = 4;
TKV_HD constexpr int32_t channel_item_size(int32_t units, int32_t splits, int32_t team,
                                           int32_t share) {
  const int64_t quarters = int64_t{kItemSizes} * ((units + splits - 1) / splits);
  const auto size = static_cast<int32_t>((quarters + team * share - 1) / (int64_t{team} * share));
  return kItemSizes - (size < 1 ? 1 : size);
}
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

// The lengths that the host knows of.
struct ChannelLengths {
  int64_t units = 0;  // of all sequences
  int32_t most = 0;   // of one
};
// Items for sequences of these lengths, likewise; at least num_rows, at most
// ctas.most_items().
int32_t choose_channel_items(const ChannelCtas& ctas, const ChannelLengths& lengths,
                             int32_t num_rows, int32_t resident_ctas);

// kInvalidArgument.
Status validate_channel_plan(const ChannelPlanCall& call);
Status plan_channel(const ChannelPlanCall& call, GpuStream stream);

}  // namespace tierkv
