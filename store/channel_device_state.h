// The state of the device back end of a store of channel blocks as its kernels see it, and their
// launches. Batches, failures and what they mean are those of store/device_state.h.
#pragma once

#include <cstdint>

#include "attention/channel_pages.h"
#include "store/channel_shape.h"
#include "store/device_state.h"

namespace tierkv {

// All pointers in device memory.
struct ChannelDeviceState {
  ChannelView s;
  DeviceState common;  // batch, failure, reports, counts, infos and appended tokens
};

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

// The rows of the batch, [count * num_kv_heads], as attend_channel_pages() takes them: those of
// layer 0, where other layers have theirs as far behind as their tables lie.
Status plan_channel_rows(const ChannelDeviceState& d, ChannelRow* rows, int32_t count,
                         GpuStream stream);

}  // namespace tierkv
