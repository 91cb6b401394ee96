// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace tierkv {

// What XXH3 of 64 bits mixes with runs of more than kXxh3ShortBytes; shorter ones it hashes in
// other ways.
inline constexpr int64_t kXxh3ShortBytes = 240;
struct Xxh3Keys {
  uint64_t stripes[24];  // lane i of stripe s of a block: [s + i]; of scrambling: [16 + i]
  uint64_t last[8];      // of the last stripe
  uint64_t merge[8];
};

}  // namespace tierkv
