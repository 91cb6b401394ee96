// SPDX-License-Identifier: Apache-2.0
#include "gpu/launch.cuh"
#include "store/place/device/device_kernels.h"
#include "store/place/device/raw_attend_kernel.cuh"

namespace tierkv::store {

Status launch_raw_attend(const RawAttendCall& call, int32_t count, GpuStream stream) {
  const auto launch = [&](void (*kernel)(RawAttendCall), size_t shared_bytes) {
    return launch_after_previous(kernel, static_cast<uint32_t>(count * call.num_kv_heads),
                                 kAttendThreads, shared_bytes, stream, call);
  };
  switch (call.raw.head_dim) {
    case 64:
      return launch(raw_attend_kernel<64>, sizeof(RawAttendShared<64>));
    case 96:
      return launch(raw_attend_kernel<96>, sizeof(RawAttendShared<96>));
    case 128:
      return launch(raw_attend_kernel<128>, sizeof(RawAttendShared<128>));
    default:
      return launch(raw_attend_kernel<256>, sizeof(RawAttendShared<256>));
  }
}

}  // namespace tierkv::store
