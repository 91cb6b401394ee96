// SPDX-License-Identifier: Apache-2.0
// The machine of a device format (store/rows/coded/device_coded_format.cuh) in host memory, its
// kernels run thread by thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gpu/shared_memory.cuh"
#include "tests/engine/support/emulated_attention.h"
#include "tests/support/emulator/cuda.h"
#include "tierkv/status.h"

namespace tierkv {

struct EmulatedMachine {
  static constexpr int32_t kSharedBytes = 227 << 10;

  void set_stream(void*) const {}
  int64_t attention_workspace(const CodedAttention& call, const CodedAttentionGrid&) const {
    const int64_t partials = EmulatedAttention::kCtas * 2 + call.num_rows;
    return partials * kCodedColumns * (call.head_dim + 2) * static_cast<int64_t>(sizeof(float));
  }
  Status attend(const CodedAttention& call) const { return EmulatedAttention{call}.run(); }
  int32_t sms() const { return 1; }
  int32_t shared_bytes() const { return kSharedBytes; }
  Status allocate(int64_t bytes, const char*, void** memory) const {
    *memory = std::aligned_alloc(256, static_cast<size_t>((bytes + 255) / 256 * 256));
    std::memset(*memory, 0xa5, static_cast<size_t>(bytes));
    return Status::ok();
  }
  void free(void* memory) const { std::free(memory); }
  Status upload(void* to, const void* from, int64_t bytes) const {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return Status::ok();
  }
  Status download(void* to, const void* from, int64_t bytes) const {
    return upload(to, from, bytes);
  }
  Status clear(void* memory, int64_t bytes) const {
    std::memset(memory, 0, static_cast<size_t>(bytes));
    return Status::ok();
  }
  template <class Body, class Grid>
  Status launch(const Body& body, Grid grid, int32_t bytes, int32_t threads) const {
    alignas(1024) static uint8_t shared[kSharedBytes];
    if (bytes > kSharedBytes) return Status(StatusCode::kUnsupported, "shared memory");
    emulated_shared() = {shared, static_cast<uint32_t>(bytes)};
    for (int32_t y = 0; y < grid.y; ++y) {
      for (int32_t x = 0; x < grid.x; ++x) {
        std::memset(shared, 0xa5, static_cast<size_t>(bytes));
        emulator::cta().run(
            emulator::Index{x, y}, threads, [&] { body(shared); }, emulator::Index{grid.x, grid.y});
      }
    }
    return Status::ok();
  }
};

}  // namespace tierkv
