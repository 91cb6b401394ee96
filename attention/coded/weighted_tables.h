// SPDX-License-Identifier: Apache-2.0
// What attention over coded blocks multiplies by, in the order of its registers: made once for a
// layer and its profile, on the host.
//
// A key of a block is x = fma(code * f(e), scale_d, mean_d) before RoPE
// (codec/format/weighted_step.h). Scales are those of pairs of dims that turn together, so they go
// with the queries; keys are
//   2^-9 x / scale_d = fma(code * 2^-24, f(e) * 2^15, 2^-9 mean_d / scale_d)
// in fp16. Queries are multiplied by scales over twice the largest one, so that fp16 holds a pair
// of any query turned back; 2^10 times the largest scale multiplies scores.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/rope_turn.h"
#include "codec/host/coded/weighted_rows.h"
#include "tierkv/status.h"

namespace tierkv {

// WeightedRows::key_scales and key_means of one row, and the entry of CodedComponent::steps that
// goes with them.
struct WeightedKeyChannels {
  float unit = 1;
  std::vector<float> scales;    // [head_dim], the largest being 1/2
  std::vector<uint16_t> means;  // fp16 [head_dim], in the order of the registers
};
// kInvalidArgument where the row is not valid or head_dim is not a multiple of 16; kUnsupported
// where the weights of a pair differ, or where a mean is 2^24 times its scale.
Result<WeightedKeyChannels> weighted_key_channels(const WeightedRow& row);

// WeightedRows::place_turns and block_turns.
struct WeightedTurns {
  std::vector<uint16_t> place;  // fp16; empty without RoPE
  std::vector<uint16_t> block;  // fp16 [rope.blocks, head_dim]
};
// kUnsupported, naming it, for a rotation that attention has no kernel for: halves of a part of the
// head that is no multiple of 32 dims and no multiple of 16 up to half of the head.
Result<WeightedTurns> weighted_turns(const RopeTable& rope, int32_t head_dim, int32_t sink_tokens);

}  // namespace tierkv
