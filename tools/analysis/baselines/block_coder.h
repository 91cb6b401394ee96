// SPDX-License-Identifier: Apache-2.0
// An entropy stage of the comparison: codes of a block of at most 64 tokens to bytes and back,
// every block readable alone. The library's own coded blocks are codec/host/coded/coded_block.h.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/file/segment.h"

namespace tierkv::analysis {

class BlockCoder : public BlockDecoder {
 public:
  // codes [tokens, head_dim]; appends the block.
  virtual StatusCode encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                            std::vector<uint8_t>* out) const = 0;
  // What the blocks of one (layer, component, tier) share, as stored.
  virtual int64_t table_bytes() const { return 0; }
};

}  // namespace tierkv::analysis
