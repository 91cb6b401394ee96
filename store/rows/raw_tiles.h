// SPDX-License-Identifier: Apache-2.0
// Raw tokens on pages: fp16, in tiles of 16 tokens in the order of fragments, as in the ring
// (store/engine/tokens.h). Formats keep the layers so that stay raw.
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/format/page_layout.h"
#include "tierkv/half.h"

namespace tierkv::store {

inline int32_t raw_tiles_bytes(int32_t tokens, int32_t head_dim) {
  return (tokens + kTileTokens - 1) / kTileTokens * TileLayout{kRawCodes, head_dim}.bytes();
}

// x: [tokens, head_dim], values of fp16. Places of the last tile behind them keep their bytes.
inline void write_raw_tiles(Component c, int32_t tokens, int32_t head_dim, const float* x,
                            uint8_t* tiles) {
  const TileLayout tile = {kRawCodes, head_dim};
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < head_dim; ++d) {
      const CodePosition at = code_position(tile, c, t % kTileTokens, d);
      const uint16_t half = float_to_half(*x++);
      std::memcpy(tiles + t / kTileTokens * tile.bytes() + at.byte + at.bit / 8, &half, 2);
    }
  }
}

inline void read_raw_tiles(Component c, int32_t tokens, int32_t head_dim, const uint8_t* tiles,
                           float* x) {
  const TileLayout tile = {kRawCodes, head_dim};
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < head_dim; ++d) {
      const CodePosition at = code_position(tile, c, t % kTileTokens, d);
      uint16_t half;
      std::memcpy(&half, tiles + t / kTileTokens * tile.bytes() + at.byte + at.bit / 8, 2);
      *x++ = half_to_float(half);
    }
  }
}

}  // namespace tierkv::store
