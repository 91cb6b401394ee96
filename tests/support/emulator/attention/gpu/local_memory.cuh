// SPDX-License-Identifier: Apache-2.0
// The host's stand-in for gpu/local_memory.cuh.
#pragma once

#include "tests/support/emulator/cuda.h"

namespace tierkv {

template <int kCount>
struct LocalMemory {
  uint4 words[kCount];

  void store(int i, const uint4& x) { words[i] = x; }
  uint4 load(int i) const { return words[i]; }
  uint32_t word(int i) const {
    const uint4& of = words[i / 4];
    return i % 4 == 0 ? of.x : i % 4 == 1 ? of.y : i % 4 == 2 ? of.z : of.w;
  }
};

}  // namespace tierkv
