// SPDX-License-Identifier: Apache-2.0
#include "attention/channel/channel_plan.h"

#include "attention/channel/channel_plan_kernel.cuh"
#include "gpu/launch.cuh"

namespace tierkv {

Status plan_channel(const ChannelPlanCall& call, GpuStream stream) {
  if (Status s = validate_channel_plan(call); !s) return s;
  if (call.num_sequences == 0) return Status::ok();
  return launch_after_previous(channel_plan_kernel, 1, kChannelPlanThreads,
                               sizeof(ChannelPlanShared), stream, call);
}

}  // namespace tierkv
