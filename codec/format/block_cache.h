// SPDX-License-Identifier: Apache-2.0
// The cache of one layer in the hands of an engine with block tables of its own: a block holds a
// page without records for every kv_head, and a token is named by its slot, block * tokens + place.
//
// Tokens are written where a slot mapping says, in any order and any number. What a call leaves
// behind depends only on the set of its tokens:
//   1. Tiles whose first slot is named are cleared: codes 0, metadata 0. So no tile in use holds
//      bytes that were never written.
//   2. Every token is written over what its slot held. One that its format cannot hold leaves its
//      slot cleared and is counted.
// Slots of a call are distinct; of a slot that is named twice the bytes are unspecified. Slots
// below 0 are skipped: -1 silently, others and those behind the last block are counted.
//
// Sources: vLLM's slot_mapping; DiffKV section 5.2 for the pages.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "codec/format/rotation.h"
#include "tierkv/basis.h"
#include "tierkv/engine.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

struct BlockCache {
  uint8_t* base = nullptr;   // of block 0; aligned to kPageAlignment
  int64_t block_stride = 0;  // bytes; a multiple of kPageAlignment
  int64_t num_blocks = 0;
  int32_t num_kv_heads = 0;
  int32_t page_bytes = 0;                                     // from a kv_head to the next
  PageLayout layout{};                                        // without records and sub-groups
  StepRule rule[2] = {StepRule::kMinMax, StepRule::kMinMax};  // keys, values
  DType raw_dtype = DType::kFloat16;
  Rotation rotation;
  const float* key_reflection = nullptr;  // [num_kv_heads, head_dim], of rotated keys; null: none

  TKV_HD uint8_t* page(int64_t block, int32_t kv_head) const {
    return base + block * block_stride + static_cast<int64_t>(kv_head) * page_bytes;
  }
  TKV_HD const float* reflection_of(int32_t kv_head) const {
    return key_reflection == nullptr
               ? nullptr
               : key_reflection + static_cast<int64_t>(kv_head) * layout.head_dim();
  }
  // kInvalidArgument naming the field.
  Status validate() const;
};

// Normals [num_kv_heads, head_dim] of the reflections that take rotated means [num_kv_heads,
// head_dim] onto the vector of ones or its negative, whichever is farther: a token's zero point
// then holds what the token has of the mean. Zeros for a mean of zeros. Host memory; kNonFinite.
Status key_reflections(const Rotation& rotation, const float* key_mean, int32_t num_kv_heads,
                       int32_t head_dim, float* out);

// Tokens into their slots. Here strides of 0 do not stand for a dense array.
struct SlotEncode : EngineTokens {
  BlockCache cache;
  DType dtype = DType::kFloat16;  // of k and v: fp16 or bf16

  Status validate() const;
};

// Ranges of sequences back to keys and values: range i is the tokens first[i] .. of sequence
// sequences[i], to the rows starts[i] .. starts[i + 1] - 1 of k and v. Blocks that are not there
// give zeros.
struct BlockDecode : EngineRanges {
  BlockCache cache;
  DType dtype = DType::kFloat16;  // of k and v: fp16 or bf16

  Status validate() const;
};

// The fixed rotation as a basis.
Basis rotation_basis(const Rotation& rotation, int32_t head_dim);
// Host memory. The bytes and values of the kernels.
Status encode_slots_host(const SlotEncode& e);
Status decode_blocks_host(const BlockDecode& d);
// Device memory, one launch each, capturable: no host reads, no allocation.
Status encode_slots(const SlotEncode& e, GpuStream stream);
Status decode_blocks(const BlockDecode& d, GpuStream stream);

}  // namespace tierkv
