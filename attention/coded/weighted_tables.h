// What attention over weighted blocks multiplies by, in the order of its registers: made once for a
// layer and its profile, on the host.
//
// A key of a block is x = fma(code * f(e), scale_d, mean_d) before RoPE
// (codec/format/weighted_step.h). Kernels hold codes as fp16 numbers code * 2^-24 and compute x /
// unit, in fp16:
//   fma(code * 2^-24 * (2^24 scale_d / unit), f(e), mean_d / unit)
// The unit is a power of two that keeps both parts inside fp16 and multiplies scores instead.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/rope_turn.h"
#include "codec/host/weighted_rows.h"
#include "tierkv/status.h"

namespace tierkv {

// WeightedRows::key_channels of one row, and the entry of CodedComponent::steps that goes with
// them.
struct WeightedKeyChannels {
  float unit = 1;
  std::vector<uint16_t> halves;  // fp16 [2 * head_dim]
};
// kInvalidArgument where the row is not valid or head_dim is not a multiple of 16.
Result<WeightedKeyChannels> weighted_key_channels(const WeightedRow& row);

// WeightedRows::place_turns and block_turns.
struct WeightedTurns {
  std::vector<uint16_t> place;  // fp16; empty without RoPE
  std::vector<float> block;     // [rope.blocks, pairs, 2]
};
// kUnsupported, naming it, for a rotation that attention has no kernel for: halves of a part of the
// head.
Result<WeightedTurns> weighted_turns(const RopeTable& rope, int32_t head_dim, int32_t sink_tokens);

}  // namespace tierkv
