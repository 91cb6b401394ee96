// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/coded/coded_decode_launch.cuh"

namespace tierkv {

Status decode_coded(const CodedDecode& call, GpuStream stream) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_groups == 0) return Status::ok();
  return launch_coded_decode<CallTableReader>(call, {}, stream);
}

}  // namespace tierkv
