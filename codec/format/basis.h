// SPDX-License-Identifier: Apache-2.0
// The signs of the fixed Hadamard basis (tierkv/basis.h), which containers and stores share.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/basis.h"

namespace tierkv {

// +1 or -1 per channel: bit 63 of the i-th output of splitmix64 with the library's fixed seed; set
// means -1.
std::vector<float> hadamard_signs(int32_t head_dim);

}  // namespace tierkv
