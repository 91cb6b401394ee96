// plan_channel() as plain loops, with all pointers in host memory: the plans that the kernel must
// make.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/channel/channel_plan.h"

namespace tierkv::testing {

inline Status plan_channel_host(const ChannelPlanCall& call) {
  if (Status s = validate_channel_plan(call); !s) return s;
  std::vector<ChannelSequence> sequences(call.sequences, call.sequences + call.num_sequences);
  int32_t share = 1;
  for (ChannelSequence& s : sequences) {
    if (!is_sound(call, s)) {
      if (*call.status == StatusCode::kOk) *call.status = StatusCode::kCorrupt;
      s = {};
    }
  }
  const auto items_of = [&](const ChannelSequence& s) {
    return call.num_kv_heads * channel_splits(s.units(), call.team, share);
  };
  for (;; ++share) {
    int64_t items = 0;
    for (const ChannelSequence& s : sequences) items += items_of(s);
    if (items <= call.plan.num_items) break;
  }
  int32_t next = 0, part = 0;
  for (int32_t size = 0; size < kItemSizes; ++size) {
    for (int32_t i = 0; i < call.num_sequences; ++i) {
      const ChannelSequence& s = sequences[i];
      const int32_t splits = channel_splits(s.units(), call.team, share);
      if (channel_item_size(s.units(), splits, call.team, share) != size) continue;
      for (int32_t head = 0; head < call.num_kv_heads; ++head) {
        const int32_t row = i * call.num_kv_heads + head;
        call.plan.parts[row] = {splits == 1 ? 0 : part, splits};
        for (int32_t split = 0; split < splits; ++split) {
          ChannelItem& item = call.plan.items[next++];
          item = {};
          item.row = row;
          item.table_row = s.table_row < 0 ? -1 : s.table_row + head;
          item.first = channel_unit(s.units(), splits, split);
          item.end = channel_unit(s.units(), splits, split + 1);
          item.raw_tokens = s.raw_tokens;
          item.part = splits == 1 ? -1 : part++;
        }
      }
    }
  }
  std::fill(call.plan.items + next, call.plan.items + call.plan.num_items, ChannelItem{});
  return Status::ok();
}

}  // namespace tierkv::testing
