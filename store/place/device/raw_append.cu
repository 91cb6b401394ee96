// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "gpu/launch.cuh"
#include "store/place/device/device_kernels.h"
#include "store/place/device/raw_append_kernel.cuh"

namespace tierkv::store {

Status launch_raw_append(const RawAppendCall& call, int32_t count, GpuStream stream) {
  // Sinks and ring are a few pieces.
  const int32_t most_ctas = call.looks_at_all() ? 65535 : 16;
  const int32_t pieces = (call.chunk.tokens + kAppendTokens - 1) / kAppendTokens;
  const dim3 grid(static_cast<uint32_t>(count * call.num_kv_heads),
                  static_cast<uint32_t>(std::min(pieces, most_ctas)));
  return launch_after_previous(raw_append_kernel, grid, kAppendThreads, 0, stream, call);
}

Status launch_raw_read(const RawReadCall& call, GpuStream stream) {
  const int64_t threads =
      int64_t{call.end - call.first} * call.num_kv_heads * (call.raw.head_dim / 2);
  if (threads <= 0) return Status::ok();
  const auto ctas = static_cast<uint32_t>((threads + kAppendThreads - 1) / kAppendThreads);
  return launch_after_previous(raw_read_kernel, ctas, kAppendThreads, 0, stream, call);
}

}  // namespace tierkv::store
