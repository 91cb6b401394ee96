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
};

}  // namespace tierkv
