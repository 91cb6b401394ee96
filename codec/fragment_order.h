// The order in which a block's codes belong to the 32 lanes of a warp: the A operand of
// mma.m16n8k16.
//
// A tile is 16 tokens, a dim block 16 channels. Lane l = 4 g + t owns, of every (tile, dim block),
// four pairs r = 0..3 with rh = r % 2 and ch = r / 2, so that the codes it decodes are the
// registers a0..a3 it multiplies:
//
//   keys    token = 16 tile + g + 8 rh,        channels = 16 block + 2 t + 8 ch + {0, 1}      S^T =
//   K Q^T values  channel = 16 block + g + 8 rh,     tokens   = 16 tile  + 2 t + 8 ch + {0, 1} O^T
//   = V^T P^T
//
// A lane's stream runs over tiles, then dim blocks, then r. Raw codes take the fixed-width tiles of
// unified pages.
#pragma once

#include <cstdint>

#include "tierkv/format.h"
#include "tierkv/half.h"
#include "tierkv/page.h"

namespace tierkv {

inline constexpr int32_t kBlockTokens = 64;
inline constexpr int32_t kDimBlock = 16;
inline constexpr int32_t kLanes = 32;
inline constexpr int32_t kPairsPerFragment = 4;

inline constexpr int32_t tile_count(int32_t tokens) {
  return (tokens + kTileTokens - 1) / kTileTokens;
}
inline constexpr int32_t dim_block_count(int32_t head_dim) {
  return (head_dim + kDimBlock - 1) / kDimBlock;
}

struct PairPosition {
  int32_t token,
      dim;  // of the first code; the second is one channel (keys) or one token (values) further
};

TKV_HD PairPosition pair_position(Component component, int32_t tile, int32_t block, int32_t r,
                                  int32_t lane) {
  const int32_t row = lane / 4 + 8 * (r % 2), col = 2 * (lane % 4) + 8 * (r / 2);
  if (component == Component::kKey) return {16 * tile + row, 16 * block + col};
  return {16 * tile + col, 16 * block + row};
}

// Bytes of one raw tile of `blocks` dim blocks: whole 32-bit words for every lane.
TKV_HD int32_t raw_tile_bytes(int32_t bits, int32_t blocks) {
  const int32_t words = bits == 2 ? (blocks + 1) / 2 : blocks * bits / 4;
  return words * kLanes * 4;
}

struct RawPosition {
  int32_t byte;  // of the lane's 32-bit word within the tile
  int32_t bit;   // of the code's lowest bit within the word
};

// Where the code of (token % 16, dim) lies in a raw tile of 2, 4, 8 or 16 bits.
TKV_HD RawPosition raw_position(Component component, int32_t bits, int32_t blocks, int32_t token,
                                int32_t dim) {
  const bool key = component == Component::kKey;
  const int32_t f = dim / 16, row = key ? token % 16 : dim % 16, col = key ? dim % 16 : token % 16;
  const int32_t rh = row / 8, ch = col / 8, par = col % 2;
  const int32_t lane = 4 * (row % 8) + (col % 8) / 2;
  int32_t word = 0, bit = 16 * par;
  if (bits == 16) {
    word = 4 * f + rh + 2 * ch;
  } else if (bits == 8) {
    word = 2 * f + (key ? rh : ch);
    bit += 8 * (key ? ch : rh);
  } else if (bits == 4) {
    word = f;
    bit += key ? 8 * rh + 4 * ch : 8 * ch + 4 * rh;
  } else {
    word = f / 2;
    bit += 4 * (f % 2) + (key ? 8 * rh + 2 * ch : 8 * ch + 2 * rh);
  }
  // Lanes load 16 bytes at a time, then 8 and 4 for what is left of their words.
  const int32_t words = raw_tile_bytes(bits, blocks) / (4 * kLanes), quads = words / 4 * 4;
  if (word < quads) return {word / 4 * 512 + 16 * lane + 4 * (word % 4), bit};
  int32_t byte = quads * 4 * kLanes;
  const int32_t rest = words - quads, w = word - quads;
  if (rest >= 2 && w < 2) return {byte + 8 * lane + 4 * w, bit};
  if (rest >= 2) byte += 8 * kLanes;
  return {byte + 4 * lane, bit};
}

}  // namespace tierkv
