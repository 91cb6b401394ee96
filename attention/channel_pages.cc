#include "attention/channel_pages.h"

#include <algorithm>
#include <string>

#include "attention/channel_attention.h"

namespace tierkv {

Status ChannelPages::validate() const {
  const auto invalid = [](const char* why) { return Status(StatusCode::kInvalidArgument, why); };
  if (num_pages < 0 || num_rows < 0 || num_table_rows < 0) return invalid("a count is negative");
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
  if (num_rows == 0) return Status::ok();
  if (base == nullptr || reinterpret_cast<uintptr_t>(base) % kBlockUnit != 0) {
    return invalid("base is null or misaligned");
  }
  return slots == nullptr || rows == nullptr ? invalid("slots or rows is null") : Status::ok();
}

Status validate_channel_pages(const ChannelLayout& layout, int32_t group) {
  if (layout.head_dim() > 128) {
    return Status(StatusCode::kUnsupported, "head_dim " + std::to_string(layout.head_dim()) +
                                                " over channel blocks on a device: 64, 96 or 128");
  }
  if (group < 1) return Status(StatusCode::kInvalidArgument, "group must be positive");
  if (group <= kMaxChannelGroup) return Status::ok();
  return Status(StatusCode::kUnsupported, "groups of more than 8 q heads over channel blocks");
}

size_t channel_pages_workspace_bytes(const ChannelLayout& layout, int32_t num_rows, int32_t group) {
  const auto row_splits =
      std::max(static_cast<size_t>(num_rows) * kMaxChannelSplits, size_t{kFewRowSplits});
  return row_splits * group * (8 + static_cast<size_t>(layout.head_dim()) * 4);
}

}  // namespace tierkv
