// SPDX-License-Identifier: Apache-2.0
// The order in which a block's codes belong to the 32 lanes of a warp (docs/reference/format.md,
// "Order of codes"): the codes that a lane decodes are the registers a0..a3 of mma.m16n8k16 that it
// multiplies.
//
//   keys     S^T = K Q^T    token 16 tile + g + 8 rh, channels 16 block + 2 t + 8 ch + {0, 1}
//   values   O^T = V^T P^T  channel 16 block + g + 8 rh, tokens 16 tile + 2 t + 8 ch + {0, 1}
//
// Lane l = 4 g + t has four pairs r = rh + 2 ch of every (tile, dim block).
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "tierkv/format.h"
#include "tierkv/half.h"
#include "tierkv/page.h"

namespace tierkv {

inline constexpr int32_t kBlockTokens = 64;
inline constexpr int32_t kPairsPerFragment = 4;

inline constexpr int32_t dim_block_count(int32_t head_dim) {
  return (head_dim + kDimBlock - 1) / kDimBlock;
}

// The dim block of a tile that a stream passes as number i. Keys: 0, h, 1, h + 1, ... with h half
// the number of blocks, rounded up, so that those whose channels RoPE turns together in halves
// follow each other. Values: ascending.
TKV_HD constexpr int32_t dim_block_at(Component component, int32_t blocks, int32_t i) {
  return component == Component::kValue ? i : i / 2 + i % 2 * ((blocks + 1) / 2);
}

struct PairPosition {
  int32_t token, dim;  // of the first code; the second is one channel (keys) or token (values) on
};

TKV_HD PairPosition pair_position(Component component, int32_t tile, int32_t block, int32_t r,
                                  int32_t lane) {
  const int32_t row = lane / 4 + 8 * (r % 2), col = 2 * (lane % 4) + 8 * (r / 2);
  if (component == Component::kKey) return {16 * tile + row, 16 * block + col};
  return {16 * tile + col, 16 * block + row};
}

// Raw codes lie in the tiles of unified pages; 2-bit codes need whole words, so an odd last dim
// block gets a partner there.
TKV_HD constexpr TileLayout raw_tile(int32_t bits, int32_t blocks) {
  return {CodeType::uniform(bits), kDimBlock * (bits == 2 ? (blocks + 1) / 2 * 2 : blocks)};
}

}  // namespace tierkv
