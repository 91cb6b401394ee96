// SPDX-License-Identifier: Apache-2.0
// Decoders of Huffman codes alone, to compare them: coded blocks to the digits of their streams in
// global memory. Exceptions are left out. The array tree is that of KVComp section 3.3.1.
#pragma once

#include <cstdint>

#include "bench/baselines/tree/tree_blocks.h"
#include "codec/gpu/coded/coded_batch.h"

namespace tierkv {

enum class DecodeForm {
  kArrayTree,  // a step for each bit of the stream, without a branch
  kTreeLoop,   // a loop over the bits of each code word
  kTable,      // a lookup for each symbol, in 16 copies of the table
};

// One warp decodes a block, a lane its stream. The blocks are believed: they are as
// make_tree_blocks() makes them.
struct TreeDecode {
  const uint8_t* bytes = nullptr;   // device: TreeBlocks::bytes, 16-byte aligned
  const uint32_t* units = nullptr;  // device: TreeBlocks::units
  uint32_t* digits = nullptr;       // device, out: as TreeBlocks::digits
  const uint16_t* tree = nullptr;   // device: build_tree(); forms with a tree only
  DeviceCodebook codebook;          // forms with a tree: mode kSingle only
  int32_t tree_entries = 0;
  int32_t num_blocks = 0;
  int32_t most_bytes = 0;  // of a block
};
// One kernel. kUnsupported where shared memory is too small, or for pairs by a tree.
Status decode_by_form(const TreeDecode& call, DecodeForm form, GpuStream stream);

}  // namespace tierkv
