// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/launch.cuh: the kernel has run, thread by thread, when the call
// returns. CTAs run in random order. Kernels name their dynamic shared memory as the arrays here;
// each CTA finds poison in it.
#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <random>
#include <vector>

#include "gpu/cuda_device.cuh"
#include "gpu/shared_memory.cuh"
#include "tests/support/emulator/cuda.h"
#include "tierkv/status.h"

namespace tierkv {

alignas(1024) inline uint8_t shared_bytes[emulator::kSharedBytes];

namespace store {
alignas(1024) inline uint8_t shared[emulator::kSharedBytes];
alignas(1024) inline uint8_t shared_bytes[emulator::kSharedBytes];
alignas(1024) inline uint8_t block_shared_bytes[emulator::kSharedBytes];
inline std::mutex launch_mutex;  // several threads of an import launch
inline std::mt19937 launch_order(1);
}  // namespace store

template <class... Parameters, class... Arguments>
Status launch_after_previous(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t bytes,
                             cudaStream_t, const Arguments&... arguments) {
  const std::lock_guard<std::mutex> lock(store::launch_mutex);
  if (bytes > sizeof(store::shared)) return Status(StatusCode::kUnsupported, "shared memory");
  emulated_shared() = {store::shared, static_cast<uint32_t>(bytes)};
  const auto columns = static_cast<int32_t>(grid.x), lines = static_cast<int32_t>(grid.y);
  std::vector<emulator::Index> ctas;
  for (int32_t i = 0; i < columns * lines; ++i) ctas.push_back({i % columns, i / columns});
  std::shuffle(ctas.begin(), ctas.end(), store::launch_order);
  for (const emulator::Index& cta : ctas) {
    for (uint8_t* memory :
         {shared_bytes, store::shared, store::shared_bytes, store::block_shared_bytes}) {
      std::memset(memory, 0xa5, bytes);
    }
    emulator::cta().run(
        cta, static_cast<int32_t>(block.x), [&] { kernel(arguments...); },
        emulator::Index{columns, lines});
  }
  return Status::ok();
}

}  // namespace tierkv
