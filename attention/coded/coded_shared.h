// SPDX-License-Identifier: Apache-2.0
// Shared memory of the kernels of coded attention: barriers, two tables, slots for blocks.
//
// A table lies at a multiple of its size, which shared memory reaches only once it has skipped as
// much: slots fill the room before the tables first.
#pragma once

#include <cstdint>

#include "codec/format/coded_block_format.h"
#include "codec/format/fragment_order.h"
#include "tierkv/half.h"

namespace tierkv {

inline constexpr uint32_t kCodedBarrierBytes = 512;

struct CodedSharedLayout {
  uint32_t tables;        // of keys; that of values is one region on
  uint32_t before;        // the slots before the tables start here,
  uint32_t slots_before;  // so many
  uint32_t after;         // the others here
  uint32_t tail;          // behind the slots: weighted_tail_bytes()
  uint32_t end;

  TKV_HD uint32_t slot(uint32_t i, uint32_t slot_bytes) const {
    return i < slots_before ? before + i * slot_bytes : after + (i - slots_before) * slot_bytes;
  }
};

// start: address of the dynamic shared memory; region: bytes of a table with its copies, a power of
// two; tail_bytes: a multiple of 16.
TKV_HD CodedSharedLayout coded_shared_layout(uint32_t start, uint32_t region, uint32_t slot_bytes,
                                             uint32_t slots, uint32_t tail_bytes) {
  CodedSharedLayout at;
  at.before = (start + kCodedBarrierBytes + 127) / 128 * 128;
  at.tables = (at.before + region - 1) / region * region;
  at.slots_before = (at.tables - at.before) / slot_bytes;
  if (at.slots_before > slots) at.slots_before = slots;
  at.after = (at.tables + 2 * region + 127) / 128 * 128;
  at.tail = at.after + (slots - at.slots_before) * slot_bytes;
  at.end = at.tail + tail_bytes + static_cast<uint32_t>(kPayloadSlackBytes);
  return at;
}

// The tail: turns of 64 places; then for each warp the means of its row, what it
// keeps of its row and run while it decodes, and the references of its run.
TKV_HD uint32_t weighted_turn_bytes(int32_t head_dim, bool turns) {
  return turns ? static_cast<uint32_t>(head_dim * 2 * kBlockTokens) : 0;
}
inline constexpr uint32_t kKeptRowBytes = 64;
TKV_HD uint32_t weighted_warp_bytes(int32_t head_dim) {
  return static_cast<uint32_t>(head_dim * 2) + kKeptRowBytes + kWarpLanes * 8;
}
TKV_HD uint32_t weighted_tail_bytes(int32_t head_dim, bool turns, int32_t warps) {
  return weighted_turn_bytes(head_dim, turns) +
         static_cast<uint32_t>(warps) * weighted_warp_bytes(head_dim);
}

}  // namespace tierkv
