// SPDX-License-Identifier: Apache-2.0
#include "attention/channel/channel_pages.h"

#include <string>

#include "attention/core/online_softmax.h"

namespace tierkv {

Status ChannelPages::validate() const {
  const auto invalid = [](const char* why) { return Status(StatusCode::kInvalidArgument, why); };
  if (num_pages < 0 || num_table_rows < 0) return invalid("a count is negative");
  if (block_shift != 0 && block_shift != 1) return invalid("block_shift must be 0 or 1");
  if (page_bytes % kBlockUnit != 0 || page_bytes < int64_t{layout.bytes} << block_shift) {
    return invalid("page_bytes does not hold the blocks, or is not a multiple of 128");
  }
  if (num_pages > INT32_MAX / (page_bytes / kBlockUnit)) return invalid("the pool is too large");
  if (raw_page_tokens < kTileTokens || raw_page_tokens % kTileTokens != 0 ||
      int64_t{raw_page_tokens} * 4 * layout.head_dim() > page_bytes) {
    return invalid("page_bytes does not hold raw_page_tokens");
  }
  if (block_slots < 0 || raw_slots < 0 || int64_t{block_slots} + raw_slots > row_stride) {
    return invalid("slots of a line exceed row_stride");
  }
  if (base == nullptr || reinterpret_cast<uintptr_t>(base) % kBlockUnit != 0) {
    return invalid("base is null or misaligned");
  }
  return slots == nullptr ? invalid("slots is null") : Status::ok();
}

Status validate_channel_group(int32_t group) {
  if (group < 1) return Status(StatusCode::kInvalidArgument, "group must be positive");
  if (group <= kMaxChannelGroup) return Status::ok();
  return Status(
      StatusCode::kUnsupported,
      "groups of more than " + std::to_string(kMaxChannelGroup) + " q heads over channel blocks");
}

size_t channel_pages_workspace_bytes(const ChannelCtas& ctas, int32_t head_dim, int32_t num_rows) {
  // Parts are items beyond one a row, and the first ones of as many rows at most.
  const auto parts = static_cast<size_t>(2 * (ctas.most_items(num_rows) - num_rows));
  return parts * ctas.all_columns() * (sizeof(SoftmaxState) + static_cast<size_t>(head_dim) * 4);
}

ChannelPlanCall channel_plan_call(const ChannelPages& pages, const ChannelCtas& ctas) {
  ChannelPlanCall call;
  call.num_kv_heads = ctas.columns.num_kv_heads;
  call.team = ctas.team;
  call.most_blocks = pages.block_slots << pages.block_shift;
  call.most_raw_tokens = pages.raw_slots * pages.raw_page_tokens;
  call.num_table_rows = pages.num_table_rows;
  call.least_raw_tokens = ctas.columns.q_len - 1;
  return call;
}

}  // namespace tierkv
