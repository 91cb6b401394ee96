// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/shared_memory.cuh.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/emulator/cuda.h"

namespace tierkv {

// Shared memory where kernels know it by addresses: they begin behind what the system keeps.
struct EmulatedShared {
  static constexpr uint32_t kStart = 1024;
  uint8_t* base = nullptr;
  uint32_t bytes = 0;

  // Aborts outside of it.
  uint8_t* at(uint32_t address, uint32_t count) const {
    const bool inside = address >= kStart && address - kStart + count <= bytes;
    if (inside && address % count == 0) return base + (address - kStart);
    std::fprintf(stderr, "emulator: %u bytes at shared address %u\n", count, address);
    std::abort();
  }
};
inline EmulatedShared& emulated_shared() {
  static EmulatedShared shared;
  return shared;
}
inline uint32_t shared_address(const void* p) {
  const auto* byte = static_cast<const uint8_t*>(p);
  return EmulatedShared::kStart + static_cast<uint32_t>(byte - emulated_shared().base);
}

template <class T>
T load_emulated(uint32_t address) {
  T x;
  std::memcpy(&x, emulated_shared().at(address, sizeof(T)), sizeof(T));
  return x;
}
inline uint32_t load_shared(uint32_t address) {
  return load_emulated<uint32_t>(address);
}
inline uint4 load_shared_16(uint32_t address) {
  return load_emulated<uint4>(address);
}
inline void store_shared(uint32_t address, uint32_t x) {
  std::memcpy(emulated_shared().at(address, sizeof(x)), &x, sizeof(x));
}
inline void store_shared_16(uint32_t address, const uint4& x) {
  std::memcpy(emulated_shared().at(address, sizeof(x)), &x, sizeof(x));
}

}  // namespace tierkv
