// SPDX-License-Identifier: Apache-2.0
// How a device runs a config: the warps of a CTA and their slots, by its shared memory.
#pragma once

#include <cstdint>

#include "tierkv/attention.h"

namespace tierkv {

inline constexpr int32_t kSlotAlignment = 128;

// A ring slot holds a tile of every tier, and the whole ring a part. The formats were validated.
int32_t least_slot_bytes(const AttentionConfig& config);

// For a device of so many multiprocessors, a CTA of which may have shared_bytes: as many warps as
// they hold slots for, a power of two. Tests name less than the device has. kUnsupported when not
// even one warp fits.
Result<AttentionGrid> choose_grid(const AttentionConfig& config, int32_t sms, int32_t shared_bytes);

}  // namespace tierkv
