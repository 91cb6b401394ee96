// SPDX-License-Identifier: Apache-2.0
// Symbols bit by bit through a tree, a loop for each symbol: to compare with.
#pragma once

#include "codec/format/huffman.h"
#include "codec/gpu/coded/coded_stream.cuh"
#include "gpu/shared_memory.cuh"

namespace tierkv {

// The array tree of KVComp section 3.3.1 in shared memory.
struct TreeWalk {
  using Stream = LaneStream<true>;
  static constexpr int32_t kBias = SharedTable<0>::kBias;
  uint32_t tree;  // shared address
  uint32_t last;  // entry
  int32_t most;   // bits of a code word

  __device__ __forceinline__ int32_t symbol(Stream& stream) const {
    uint32_t bits = __funnelshift_r(stream.low, stream.high, stream.position);
    bits >>= kBias;
    uint32_t entry = 0, length = 0;
    do {
      // A leaf is kLeaf + symbol; node 0 is the root.
      entry = load_shared_u16(tree + 2 * min(2 * entry + (bits & 1u), last));
      bits >>= 1;
      ++length;
    } while (entry < kLeaf && length < static_cast<uint32_t>(most));
    stream.advance(stream.position + length);
    return static_cast<int32_t>(entry % kLeaf);
  }
};

}  // namespace tierkv
