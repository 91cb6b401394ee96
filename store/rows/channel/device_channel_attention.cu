// SPDX-License-Identifier: Apache-2.0
#include "store/rows/channel/device_channel_attention.h"

#include "attention/channel/channel_launch.cuh"
#include "store/rows/channel/device_channel_bodies.cuh"

namespace tierkv::store {
namespace {

bool is_aligned(const void* p) {
  return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

int64_t channel_attention_bytes(int32_t head_dim) {
  return kMostPartColumns * (head_dim * 4 + static_cast<int64_t>(sizeof(SoftmaxState)));
}

Status attend_channel_bodies(const ChannelAttend& a, const DeviceAttendBody& call,
                             GpuStream stream) {
  if (!is_aligned(call.q) || !is_aligned(call.out)) {
    return Status(StatusCode::kInvalidArgument, "q or out is null or misaligned");
  }
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  const int32_t resident = limits->sms * channel_ctas_per_sm(a.view.head_dim);
  const ChannelLaunch<ChannelBodies> p = channel_launch(a, call, resident);
  return launch_channel(p, p.num_rows * p.splits, p.splits > 1, stream);
}

}  // namespace tierkv::store
