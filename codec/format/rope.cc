// SPDX-License-Identifier: Apache-2.0
#include "tierkv/rope.h"

#include <cmath>
#include <string>

#include "codec/format/errors.h"

namespace tierkv {

Rope Rope::plain(double theta, int32_t head_dim) {
  Rope rope;
  rope.pairing = RopePairing::kHalves;
  rope.rotary_dims = head_dim;
  rope.inv_freq.resize(static_cast<size_t>(head_dim / 2));
  for (int32_t i = 0; i < head_dim / 2; ++i) {
    rope.inv_freq[i] = static_cast<float>(std::pow(theta, -2.0 * i / head_dim));
  }
  return rope;
}

Status Rope::validate(int32_t head_dim) const {
  if (pairing != RopePairing::kNone && pairing != RopePairing::kHalves &&
      pairing != RopePairing::kNeighbours) {
    return invalid("rope: unknown pairing");
  }
  if (pairing == RopePairing::kNone && rotary_dims != 0) {
    return invalid("rope: rotary_dims without a pairing");
  }
  if (rotary_dims < 0 || rotary_dims % 2 != 0 || rotary_dims > head_dim) {
    return invalid("rope: rotary_dims " + std::to_string(rotary_dims) +
                   " must be even and at most head_dim " + std::to_string(head_dim));
  }
  if (inv_freq.size() != static_cast<size_t>(rotary_dims / 2)) {
    return invalid("rope: " + std::to_string(inv_freq.size()) + " frequencies for " +
                   std::to_string(rotary_dims) + " rotary dims");
  }
  for (const float f : inv_freq) {
    if (!std::isfinite(f) || f < 0) {
      return invalid("rope: a frequency is negative or not finite");
    }
  }
  return {};
}

}  // namespace tierkv
