// SPDX-License-Identifier: Apache-2.0
// Coded blocks in batches on the GPU: decode to codes or fp16 values, by
// the table; the decoder of trees is compared with it. The bytes are those of
// codec/format/coded_block.h, which is the reference.
//
// One warp works on a group: up to 64 tokens of one (row, component), all slices of the head_dim. A
// decoder believes nothing in the bytes: it makes every check of decode_block() before it uses a
// size or a position, writes to the group's output only, and runs loops whose lengths follow from
// the group alone. A group that breaks a rule gets kCorrupt and zeros.
//
// Bound: shared-memory lookups, one for two codes (kPair).
#pragma once

#include <cstdint>

#include "codec/gpu/coded/coded_batch.h"
#include "tierkv/status.h"

namespace tierkv {

// Up to kBlockTokens tokens and their blocks.
struct alignas(16) CodedGroup {
  int64_t offset = 0;  // of the first block in `bytes`, a multiple of 16
  int64_t codes = 0;   // of token 0 in codes and values, in elements
  int32_t bytes = 0;   // of all slices
  int32_t tokens = 0;  // 1 to kBlockTokens
  int32_t step = 0;    // index of its step and mean; used with values only
  int32_t unused = 0;
};

struct CodedDecode {
  const uint8_t* bytes = nullptr;      // device, [size], 16-byte aligned
  const CodedGroup* groups = nullptr;  // device, [num_groups]
  int16_t* codes = nullptr;            // device, out: codes, where not null
  uint16_t* values = nullptr;          // device, out: fp16 of step * code + mean, where not null
  const float* steps = nullptr;        // device, [num_steps]; with values
  const float* means = nullptr;        // device, [num_steps, head_dim]; null: none
  StatusCode* status = nullptr;        // device, out: [num_groups]
  DeviceCodebook codebook;
  int64_t size = 0;
  int64_t token_stride = 0;  // in elements, of codes and of values
  int32_t num_groups = 0;
  int32_t num_steps = 0;
  int32_t head_dim = 0;  // 1 to kMaxHeadDim
  // The most bytes that a block (slice) may have: more warps fit with less. Larger blocks get
  // kOutOfRange.
  int32_t max_block_bytes = kMaxCodedBlockBytes;

  // kInvalidArgument naming the field. Reads no array.
  Status validate() const;
};
// One kernel. A group's status is kOk, kCorrupt, kInvalidArgument (the group itself) or
// kOutOfRange; unless it is kOk its codes and values are zeros (kInvalidArgument: not written).
Status decode_coded(const CodedDecode& call, GpuStream stream);

}  // namespace tierkv
