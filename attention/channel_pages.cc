#include "attention/channel_pages.h"

#include <algorithm>
#include <string>

#include "attention/channel_attention.h"

namespace tierkv {

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
