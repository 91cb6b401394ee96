// SPDX-License-Identifier: Apache-2.0
// Symbols through an array tree without branches: KVComp section 3.3.1.
//
// Each bit is one step, whatever it means: the bit selects a child, what the child says is written,
// the place to write moves on by one where the child is a leaf, and the node becomes the root again
// there. The only loop runs over the bits of the stream, whose number the block says.
#pragma once

#include "codec/format/coded_block_format.h"
#include "codec/format/huffman.h"
#include "gpu/warp.cuh"

namespace tierkv {

// Symbols of a warp, [kArrayRows][kWarpLanes]: of one stream a lane, or of two, half of the rows
// each. A stream has a row beside its symbols: the last step still writes.
inline constexpr int32_t kArrayRows = 2 * (kBlockTokens * kSliceDims / kWarpLanes / 2 + 1);
inline constexpr int32_t kArraySymbolsBytes = kArrayRows * kWarpLanes * 2;

struct ArrayTree {
  const uint16_t* nodes;  // as Codebook::tree
  uint32_t last;          // entry

  // Bits [begin, end) of the payload; how many symbols they hold, at most `most` + 1, which also
  // says that the last one is not whole. symbols: this lane's, a row of kWarpLanes apart, most + 1
  // of them; each has kLeaf added.
  __device__ __forceinline__ uint32_t decode(const uint32_t* payload, int32_t begin, int32_t end,
                                             uint16_t* symbols, uint32_t most) const {
    const uint32_t* word = payload + begin / 32;
    uint32_t bits = 0, node = 0, at = 0, extra = 0;
#pragma unroll 1
    for (int32_t i = 0; i < end - begin; ++i) {
      if (i % 32 == 0) {  // the same step in all lanes
        bits = __funnelshift_r(word[0], word[1], static_cast<uint32_t>(begin));
        ++word;
      }
      node = nodes[min(2 * node + (bits & 1u), last)];
      bits >>= 1;
      symbols[at * kWarpLanes] = static_cast<uint16_t>(node);
      const uint32_t is_symbol = node / kLeaf, fits = at < most;
      at += is_symbol & fits;
      extra |= is_symbol & ~fits;
      node &= ~(0u - is_symbol);
    }
    return extra != 0 || node != 0 ? most + 1 : at;
  }
};

}  // namespace tierkv
