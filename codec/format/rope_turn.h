// SPDX-License-Identifier: Apache-2.0
// Keys before RoPE: sines and cosines of positions, and the rotations by them, shared by host and
// device to the bit.
//
// A position is 64 times its block plus its place. The turn by a position is made of the entries of
// two small tables, one of 64 places and one of blocks: attention turns a query back by the block
// once and a decoded key by its place, and an encoder turns a key back by both.
//
// Accuracy: an entry is within 2^-24 of the true cosine or sine for angles up to 2^32 (position
// times frequency); composing adds rounding and keeps it within 2^-22. A key that is undone and
// redone comes back within 2^-21 of the norm of its pair.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/fragment_order.h"
#include "codec/format/weighted_step.h"
#include "tierkv/rope.h"

namespace tierkv {

// The turn of one pair by an angle.
struct alignas(8) Turn {
  float cos = 1, sin = 0;
};

// By the sum of two angles.
TKV_HD Turn compose_turns(Turn a, Turn b) {
  return {fma_rn(a.cos, b.cos, -mul_rn(a.sin, b.sin)), fma_rn(a.sin, b.cos, mul_rn(a.cos, b.sin))};
}

// A pair (x, y) turned by the angle, as RoPE does, and back.
TKV_HD void turn_pair(Turn by, float* x, float* y) {
  const float a = *x, b = *y;
  *x = fma_rn(a, by.cos, -mul_rn(b, by.sin));
  *y = fma_rn(b, by.cos, mul_rn(a, by.sin));
}
TKV_HD void unturn_pair(Turn by, float* x, float* y) {
  const float a = *x, b = *y;
  *x = fma_rn(a, by.cos, mul_rn(b, by.sin));
  *y = fma_rn(b, by.cos, -mul_rn(a, by.sin));
}

// Dims of pair i.
TKV_HD int32_t pair_first(RopePairing pairing, int32_t i) {
  return pairing == RopePairing::kHalves ? i : 2 * i;
}
TKV_HD int32_t pair_second(RopePairing pairing, int32_t pairs, int32_t i) {
  return pairing == RopePairing::kHalves ? i + pairs : 2 * i + 1;
}

// The tables of one layer's rotation for positions below 64 * blocks, in host memory. A kernel
// takes copies of both arrays.
struct RopeTable {
  RopePairing pairing = RopePairing::kNone;
  int32_t pairs = 0;        // rotary_dims / 2
  int32_t blocks = 0;       // of 64 positions
  std::vector<Turn> place;  // [64][pairs]: by place
  std::vector<Turn> block;  // [blocks][pairs]: by 64 times the block

  int64_t positions() const { return int64_t{kBlockTokens} * blocks; }
  Turn at(int64_t position, int32_t pair) const {
    return compose_turns(block[static_cast<size_t>(position / kBlockTokens * pairs + pair)],
                         place[static_cast<size_t>(position % kBlockTokens * pairs + pair)]);
  }
};

// The cosine and sine of position * frequency, from additions and multiplications of doubles that
// every platform rounds the same. 0 <= position < 2^31, 0 <= position * frequency <= 2^32.
Turn rope_turn(int64_t position, float frequency);

// Tables that reach `positions` positions, 1 to 2^31. Fails as Rope::validate() does; kOutOfRange
// where an angle of a table exceeds 2^32.
Result<RopeTable> make_rope_table(const Rope& rope, int32_t head_dim, int64_t positions);

}  // namespace tierkv
