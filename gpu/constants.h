// Constants of kernels and of what they are compared with.
#pragma once

namespace tierkv {

inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

}  // namespace tierkv
