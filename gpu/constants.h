// SPDX-License-Identifier: Apache-2.0
// Constants of kernels and of what they are compared with.
#pragma once

#include <cstdint>

namespace tierkv {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;
inline constexpr uint32_t kFullWarp = 0xffffffffu;  // the mask of all lanes

}  // namespace tierkv
