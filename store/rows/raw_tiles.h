// SPDX-License-Identifier: Apache-2.0
// Raw tokens on pages: fp16, in tiles of 16 tokens in the order of the tensor cores' fragments.
// Formats keep the layers so that stay raw.
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/format/page_layout.h"
#include "tierkv/half.h"

namespace tierkv::store {

// Byte of an element of token t in tiles.
TKV_HD constexpr int32_t raw_tile_byte(int32_t head_dim, Component c, int32_t t, int32_t dim) {
  const TileLayout tile = {kRawCodes, head_dim};
  const CodePosition at = code_position(tile, c, t % kTileTokens, dim);
  return t / kTileTokens * tile.bytes() + at.byte + at.bit / 8;
}

// x: [tokens, head_dim], values of fp16. Places of the last tile behind them keep their bytes.
inline void write_raw_tiles(Component c, int32_t tokens, int32_t head_dim, const float* x,
                            uint8_t* tiles) {
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < head_dim; ++d) {
      const uint16_t half = float_to_half(*x++);
      std::memcpy(tiles + raw_tile_byte(head_dim, c, t, d), &half, sizeof(half));
    }
  }
}

inline void read_raw_tiles(Component c, int32_t tokens, int32_t head_dim, const uint8_t* tiles,
                           float* x) {
  for (int32_t t = 0; t < tokens; ++t) {
    for (int32_t d = 0; d < head_dim; ++d) {
      uint16_t half;
      std::memcpy(&half, tiles + raw_tile_byte(head_dim, c, t, d), sizeof(half));
      *x++ = half_to_float(half);
    }
  }
}

}  // namespace tierkv::store
