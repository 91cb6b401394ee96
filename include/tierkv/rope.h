// SPDX-License-Identifier: Apache-2.0
// How a model rotates queries and keys by position (rotary embeddings, RoPE).
//
// Scaled variants (linear, NTK, YaRN, Llama 3) are just other frequencies. A constant factor on
// sines and cosines, as YaRN has, stays in the keys: it does not turn them.
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/status.h"

namespace tierkv {

enum class RopePairing : int32_t {
  kNone = 0,        // keys are not rotated
  kHalves = 1,      // dim i turns with dim i + rotary_dims / 2 (Llama, Qwen, Mistral)
  kNeighbours = 2,  // dim 2 i turns with dim 2 i + 1 (GPT-J)
};

// The rotation of one layer. Dims from rotary_dims on are not turned.
struct TKV_API Rope {
  RopePairing pairing = RopePairing::kNone;
  int32_t rotary_dims = 0;      // even, at most head_dim; 0 with kNone
  std::vector<float> inv_freq;  // [rotary_dims / 2] radians a position, by pair

  // Plain RoPE over the whole head in halves: inv_freq[i] = theta^(-2 i / head_dim).
  static Rope plain(double theta, int32_t head_dim);
  // kInvalidArgument naming the field: rotary_dims odd, negative or above head_dim, a number of
  // frequencies that is not rotary_dims / 2, one that is negative or not finite.
  Status validate(int32_t head_dim) const;

  friend bool operator==(const Rope& a, const Rope& b) {
    return a.pairing == b.pairing && a.rotary_dims == b.rotary_dims && a.inv_freq == b.inv_freq;
  }
  friend bool operator!=(const Rope& a, const Rope& b) { return !(a == b); }
};

}  // namespace tierkv
