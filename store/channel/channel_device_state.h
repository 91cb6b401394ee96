// The state of the device back end of a store of channel blocks as its kernels see it, and their
// launches. Batches, failures and what they mean are those of store/tiers/device_state.h.
#pragma once

#include <cstdint>

#include "attention/channel/channel_pages.h"
#include "store/channel/channel_shape.h"
#include "store/tiers/device_state.h"

namespace tierkv {

// All pointers in device memory.
struct ChannelDeviceState {
  ChannelView s;
  DeviceState common;  // batch, failure, reports, counts, infos and appended tokens
};

// A layer has its rows in the tables as far behind those of layer 0 as its tables begin behind
// theirs, so that one plan is that of all layers.
inline ChannelPages channel_pages(const ChannelView& s, int32_t layer) {
  const PageTableShape& table = s.allocator.shape.table;
  const int32_t rows_before = layer * s.num_kv_heads;
  ChannelPages pages;
  pages.layout = s.layout;
  pages.base = s.pages.base;
  pages.page_bytes = s.pages.page_bytes;
  pages.num_pages = s.pages.num_pages;
  pages.block_shift = s.blocks_per_page - 1;
  pages.raw_page_tokens = s.raw_page_tokens;
  pages.slots = s.allocator.slots + int64_t{rows_before} * table.row_stride();
  pages.num_table_rows = table.num_rows() - rows_before;
  pages.row_stride = table.row_stride();
  pages.block_slots = table.table_slots[0];
  pages.raw_slots = table.table_slots[1];
  return pages;
}
TKV_HD ChannelSequence attended_sequence(const ChannelView& s, int32_t sequence,
                                         const SequenceInfo& info) {
  return {s.row_of(sequence, 0, 0), s.blocks_of(info), ChannelView::raw_tokens(info)};
}

// A begin of `count` sequences, in this order. Prompts: plan, reserve (entry_counts), keep
// (row_counts), finish. Steps: plan, append (row_counts), finish, which makes the blocks that are
// due from raw tokens.
struct ChannelBegin {
  DeviceCall call = DeviceCall::kNone;  // kBeginPrompt or kBeginStep
  int32_t count = 0;
  int32_t tokens = 0;
};
Status plan_channel_begin(const ChannelDeviceState& d, const ChannelBegin& begin, GpuStream stream);
Status finish_channel_begin(const ChannelDeviceState& d, const ChannelBegin& begin,
                            GpuStream stream);
Status end_channel_prompts(const ChannelDeviceState& d, int32_t count, GpuStream stream);

// Tokens of one layer, of prompts or of a step. most_blocks: that a row of the batch makes of them,
// 0 for a step.
struct ChannelAppendCall {
  DeviceTokens tokens;
  bool prompt = false;
  int32_t most_blocks = 0;
};
Status append_channel_tokens(const ChannelDeviceState& d, const ChannelAppendCall& call,
                             GpuStream stream);

// The sequences of the batch, [count], as attend_channel_pages() takes them, at layer 0: other
// layers have their rows as far behind as their tables lie.
Status find_channel_sequences(const ChannelDeviceState& d, ChannelSequence* sequences,
                              int32_t count, GpuStream stream);

}  // namespace tierkv
