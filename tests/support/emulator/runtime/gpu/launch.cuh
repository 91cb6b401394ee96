// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/launch.cuh: the kernel has run, thread by thread, when the call
// returns. Dynamic shared memory is the array `shared` of tierkv::store, poisoned for each CTA.
#pragma once

#include <cstring>
#include <mutex>

#include "gpu/cuda_device.cuh"
#include "gpu/shared_memory.cuh"
#include "tests/support/emulator/cuda.h"
#include "tierkv/status.h"

namespace tierkv {

namespace store {
alignas(1024) inline uint8_t shared[emulator::kSharedBytes];
inline std::mutex launch_mutex;  // several threads of an import launch
}  // namespace store

template <class... Parameters, class... Arguments>
Status launch_after_previous(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                             size_t shared_bytes, cudaStream_t, const Arguments&... arguments) {
  const std::lock_guard<std::mutex> lock(store::launch_mutex);
  if (shared_bytes > sizeof(store::shared)) {
    return Status(StatusCode::kUnsupported, "shared memory");
  }
  emulated_shared() = {store::shared, static_cast<uint32_t>(shared_bytes)};
  const auto columns = static_cast<int32_t>(grid.x), lines = static_cast<int32_t>(grid.y);
  for (int32_t y = 0; y < lines; ++y) {
    for (int32_t x = 0; x < columns; ++x) {
      std::memset(store::shared, 0xa5, shared_bytes);
      emulator::cta().run(
          emulator::Index{x, y}, static_cast<int32_t>(block.x), [&] { kernel(arguments...); },
          emulator::Index{columns, lines});
    }
  }
  return Status::ok();
}

}  // namespace tierkv
