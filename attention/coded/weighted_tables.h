// SPDX-License-Identifier: Apache-2.0
// What attention over coded blocks needs of a layer and its profile, on the host: the rotation in
// the order of the kernel's registers, and whether the keys fit its fp16.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/rope_turn.h"
#include "codec/host/coded/weighted_rows.h"
#include "tierkv/status.h"

namespace tierkv {

// kInvalidArgument where the row is not valid; kUnsupported for a head_dim without kernels, where
// the weights of dims that turn together differ, and where a mean is beyond 2^24 of its scale.
Status check_weighted_keys(const WeightedRow& row);

// WeightedRows::place_turns and block_turns.
struct WeightedTurns {
  std::vector<uint16_t> place;  // fp16; empty without RoPE
  std::vector<uint16_t> block;  // fp16 [rope.blocks, head_dim]
};
// kUnsupported, naming it, for a rotation that attention has no kernel for: halves of a part of the
// head that is no multiple of 32 dims and no multiple of 16 up to half of the head.
Result<WeightedTurns> weighted_turns(const RopeTable& rope, int32_t head_dim, int32_t sink_tokens);

}  // namespace tierkv
