#include "attention/channel_pages.h"

#include "attention/channel_kernel.cuh"

namespace tierkv {

Status attend_channel_pages(const ChannelPages& pages, const ChannelPagesCall& call,
                            void* workspace, GpuStream stream) {
  if (Status s = validate_channel_pages(pages.layout, call.group); !s) return s;
  if (Status s = pages.validate(); !s) return s;
  const auto is_aligned = [](const void* p) {
    return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  };
  if (!is_aligned(call.q) || !is_aligned(call.out) || !is_aligned(workspace)) {
    return Status(StatusCode::kInvalidArgument, "q, out or workspace is null or misaligned");
  }
  if (call.status == nullptr) return Status(StatusCode::kInvalidArgument, "status is null");
  if (pages.num_rows > 65535) return Status(StatusCode::kUnsupported, "more than 65535 rows");
  if (pages.num_rows == 0) return Status::ok();
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const int32_t most =
      std::min(std::max(kMaxChannelSplits, kFewRowSplits / pages.num_rows), kMaxFewRowSplits);
  ChannelLaunch<ChannelPages> p{};
  p.cache = pages;
  p.num_rows = pages.num_rows;
  p.group = call.group;
  p.q = call.q;
  p.out = call.out;
  p.lse = call.lse;
  p.status = call.status;
  p.status_stride = 0;
  p.scale_log2 = call.sm_scale * 1.4426950408889634f;
  p.splits = choose_channel_splits(call.units, p.num_rows, most, limits->sms);
  const int64_t parts = static_cast<int64_t>(p.num_rows) * call.group * p.splits;
  p.parts = static_cast<float*>(workspace);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts + parts * pages.layout.head_dim());
  return launch_channel(p, stream);
}

}  // namespace tierkv
