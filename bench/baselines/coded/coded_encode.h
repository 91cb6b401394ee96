// SPDX-License-Identifier: Apache-2.0
// Coded blocks in batches from codes in memory, by a warp each, through shared memory. The store
// encodes what lies in its lanes (codec/gpu/coded/weighted_streams.cuh); this is to compare with,
// and has the write-back of KVComp.
#pragma once

#include "bench/baselines/coded/coded_decode.h"

namespace tierkv {

// The blocks that encode_block() makes, byte for byte, where the caller left room for them. Modes
// kSingle and kPair.
struct CodedEncode {
  const int16_t* codes = nullptr;  // device
  uint8_t* bytes = nullptr;        // device, out: [size], 16-byte aligned
  CodedGroup* groups = nullptr;    // device, [num_groups]; bytes: in room, out used
  StatusCode* status = nullptr;    // device, out: [num_groups]
  DeviceCodebook codebook;         // with words and cheapest
  // Device; where not null, groups go where this counter of bytes says, in the order in which they
  // get there, and their offset is out: the write-back of KVComp section 3.2.2, to compare with.
  // head_dim up to kSliceDims. It ends at the bytes that all groups asked for, those without room
  // too.
  unsigned long long* cursor = nullptr;
  int64_t size = 0;
  int64_t token_stride = 0;  // of codes, in elements
  int32_t num_groups = 0;
  int32_t head_dim = 0;  // 1 to kMaxHeadDim

  // kInvalidArgument or kUnsupported naming the field. Reads no array.
  Status validate() const;
};
// Room that is always enough for a group: its raw form in 16 bits.
inline constexpr int64_t coded_group_capacity(int32_t head_dim) {
  return int64_t{(head_dim + kSliceDims - 1) / kSliceDims} * kMaxCodedBlockBytes;
}
// One kernel. kInvalidArgument (the group) or kBufferTooSmall (more than its room is needed; slices
// before may have been written) in the status.
Status encode_coded(const CodedEncode& call, GpuStream stream);

}  // namespace tierkv
