// SPDX-License-Identifier: Apache-2.0
// The formats and shapes that tests run twin stores with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/gpu/store/twin_choices.cuh"

namespace tierkv::testing {

struct TwinCase {
  const char* name;
  TwinChoice choice;
  int32_t longest;  // tokens of a sequence
};

inline TiersFormat pruning() {
  TiersFormat format;
  format.classes[0].alpha_low = 0.3;
  return format;
}
inline TwinChoice of_bfloats(TwinChoice c) {
  c.dtype = DType::kBFloat16;
  return c;
}

inline TwinChoice turned(TwinChoice c, RopePairing pairing, int32_t rotary_dims) {
  c.pairing = pairing;
  c.rotary_dims = rotary_dims;
  return c;
}

inline std::vector<TwinCase> all_cases() {
  const auto neighbours = RopePairing::kNeighbours;
  return {{"Short64", without_bodies(64, 1), 160},
          {"Short96", without_bodies(96, 3), 160},
          {"Short128", without_bodies(128, 16), 160},
          {"Short256", of_bfloats(without_bodies(256, 8)), 160},
          {"Tiers64", with(TiersFormat{}, 64, 3, 3), 600},
          {"Tiers128", with(pruning(), 128, 2, 8), 600},
          {"Tiers256", of_bfloats(with(TiersFormat{}, 256, 1, 16)), 500},
          {"Coded64Neighbours", turned(with(coded(64), 64, 3, 3), neighbours, 0), 600},
          {"Coded64NoRope", turned(with(coded(64), 64, 3, 3), RopePairing::kNone, 0), 600},
          {"Coded96", with(coded(64), 96, 2, 5), 600},
          {"Coded96Units16", with(coded(16), 96, 2, 5), 600},
          {"Coded128", with(coded(16), 128, 2, 8), 600},
          {"Coded128Neighbours", turned(with(coded(16), 128, 2, 8), neighbours, 64), 600},
          {"Coded128PartHalves", turned(with(coded(16), 128, 2, 8), RopePairing::kHalves, 96), 600},
          {"Coded256", of_bfloats(with(coded(32), 256, 1, 16)), 500},
          {"Coded256PartHalves", turned(with(coded(32), 256, 1, 4), RopePairing::kHalves, 64), 500},
          {"Channel64", with(ChannelFormat{4, 2, 128}, 64, 3, 3), 600},
          {"Channel128", of_bfloats(with(ChannelFormat{}, 128, 2, 8)), 600}};
}

}  // namespace tierkv::testing
