// SPDX-License-Identifier: Apache-2.0
// gpu/arrivals.cuh for emulated CTAs, which run one after another.
#pragma once

#include <cstdint>

namespace tierkv {

inline int32_t arrive_acq_rel(int32_t* counter) {
  return (*counter)++;
}

}  // namespace tierkv
