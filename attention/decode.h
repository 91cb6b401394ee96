// The fused kernel's parameters and its launch: one CTA per item of the plan, kDecodeWarps warps,
// each with its own ring of chunks in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/online_softmax.h"
#include "attention/work.h"
#include "tierkv/attention.h"

namespace tierkv {

inline constexpr int32_t kDecodeWarps = 8;
inline constexpr int32_t kMaxSlots = 4;  // of a warp's ring
inline constexpr int32_t kMaxGroup = 8;  // q heads of a row: the columns of one mma

struct DecodeParams {
  AttentionRows rows;
  int32_t layer = 0;
  const uint8_t* pool = nullptr;  // [num_pages][page_bytes]
  int64_t page_bytes = 0;
  int32_t num_pages = 0;
  int32_t group = 1;                // q heads of a row
  const void* q = nullptr;          // fp16 [num_rows][group][head_dim]
  void* out = nullptr;              // fp16, like q
  float* lse = nullptr;             // [num_rows][group] or null
  int32_t* row_status = nullptr;    // [num_rows], kCorrupt is added
  const WorkItem* items = nullptr;  // [grid + 1]
  int32_t* arrivals =
      nullptr;  // [grid], 0 between launches: finished parts of the row that starts there
  float* parts = nullptr;  // [2 * grid][group][head_dim]: parts of rows that several items share
  SoftmaxState* part_states = nullptr;  // [2 * grid][group]
  float scale_log2 = 0;                 // sm_scale * log2(e)
  int32_t slot_bytes = 0;               // of one chunk in the ring
  int32_t slots = 0;                    // of a warp, at most kMaxSlots
  bool plan_is_settled = false;
};

// Offsets into the dynamic shared memory of a CTA.
struct DecodeShared {
  int32_t barriers;  // uint64_t [kDecodeWarps][kMaxSlots]; the ring is before them
  int32_t headers;   // ChunkHeader [kDecodeWarps][kMaxSlots]
  int32_t states;    // SoftmaxState [kDecodeWarps + 1][kMaxGroup]
  int32_t flags;     // int32_t [4]
  int32_t parts;     // float [kDecodeWarps + 1][group][head_dim + 4]
  int32_t bytes;
};
TKV_HD constexpr DecodeShared decode_shared(int32_t head_dim, int32_t group, int32_t slot_bytes,
                                            int32_t slots) {
  DecodeShared s{};
  s.barriers = kDecodeWarps * slots * slot_bytes;
  s.headers = s.barriers + kDecodeWarps * kMaxSlots * 8;
  s.states = s.headers + kDecodeWarps * kMaxSlots * 16;
  s.flags = s.states + (kDecodeWarps + 1) * kMaxGroup * 8;
  s.parts = s.flags + 16;
  s.bytes = s.parts + (kDecodeWarps + 1) * group * (head_dim + 4) * 4;
  return s;
}

// Bytes of a ring slot: a raw tile, or four tiles of 4-bit codes.
TKV_HD constexpr int32_t decode_slot_bytes(int32_t head_dim) {
  return 68 * head_dim;
}

// Lets the kernel use shared_bytes. Once per device, before the first launch.
Status prepare_decode(int32_t head_dim, int32_t shared_bytes);
// One kernel of num_items CTAs.
Status launch_decode(const DecodeParams& params, int32_t head_dim, int32_t num_items,
                     GpuStream stream);

}  // namespace tierkv
