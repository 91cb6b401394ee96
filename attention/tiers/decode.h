// SPDX-License-Identifier: Apache-2.0
// The fused kernel's parameters and its launch: CTAs of kDecodeWarps warps, or of fewer where
// shared memory is too small, each with its own item of the plan and its own ring of chunks there.
#pragma once

#include <cstdint>

#include "attention/core/columns.h"
#include "attention/core/online_softmax.h"
#include "attention/work/work.h"
#include "tierkv/attention.h"

namespace tierkv {

inline constexpr int32_t kDecodeWarps = 8;
inline constexpr int32_t kDecodeThreads = kDecodeWarps * 32;
inline constexpr int32_t kMaxSlots = 4;  // of a warp's ring
// Copies of a warp that are on their way at a time; more only make all of them late. Further slots
// are for what is copied while the kernel before ends.
inline constexpr int32_t kChunksInFlight = 2;
// Where chunks are smaller arithmetic binds, and copies that begin early only disturb.
inline constexpr int32_t kLargeChunkBytes = 6144;
// Large heads leave no registers to tell what has arrived.
TKV_HD constexpr int32_t most_slots(int32_t head_dim) {
  return head_dim <= 128 ? kMaxSlots : kChunksInFlight;
}

// The tier with the newest tokens, where there are several queries; otherwise no tier.
struct TailSource {
  int32_t tier = kAttentionTiers;
  const int32_t* newest = nullptr;  // [batch], index in the tier; null: the last one
  int32_t ring_first = 0;
  int32_t ring_tokens = 0;
};

template <int32_t kClasses>
struct DecodeParamsOf {
  const WorkItem* items = nullptr;  // [grid * warps + 1]
  RowsOf<kClasses> rows;
  int32_t layer = 0;
  const uint8_t* pool = nullptr;  // [num_pages][page_bytes]
  int64_t page_bytes = 0;
  int32_t num_pages = 0;
  QueryColumns columns;
  TailSource tail;
  const void* q = nullptr;        // [batch][q_len][num_q_heads][head_dim]
  void* out = nullptr;            // like q
  float* lse = nullptr;           // [batch][q_len][num_q_heads] or null
  const float* sinks = nullptr;   // [num_q_heads] or null
  int32_t* row_status = nullptr;  // [num_rows / passes], kCorrupt is added
  float* parts = nullptr;  // [2 * grid][of_row][head_dim]: parts of rows that several CTAs share
  SoftmaxState* part_states = nullptr;  // [2 * grid][of_row]
  float scale_log2 = 0;                 // sm_scale * log2(e)
  int32_t slot_bytes = 0;               // of one chunk in the ring
  int32_t slots = 0;                    // of a warp, at most kMaxSlots
  bool plan_is_settled = false;
  Settled settled[kAttentionTiers] = {};
  bool is_bfloat16 = false;      // q, out and raw pages; otherwise fp16
  uint8_t warps = kDecodeWarps;  // of a CTA, at most kDecodeWarps
};

// In a part in shared memory, dim d of a column is at d ^ part_swizzle(column): stores of a warp,
// 8 dims of four columns 1 or 2 apart, are then free of conflicts.
TKV_HD constexpr int32_t part_swizzle(int32_t column) {
  return ((column ^ column >> 1) & 3) * 8;
}
// dim ^ swizzle, of which four values are enough for all constant dims.
TKV_HD constexpr int32_t swizzled(int32_t dim, int32_t swizzle) {
  return (dim & ~24) + ((dim & 24) ^ swizzle);
}

inline constexpr int32_t kChunkHeaderBytes = 16;

// Offsets into the dynamic shared memory of a CTA. A warp has two parts: of the row that began
// before its item, here, and of the row that goes on behind it, in its ring when that is done.
struct DecodeShared {
  int32_t full;       // uint64_t [warps][kMaxSlots] barriers; the rings are before them
  int32_t headers;    // ChunkHeader [warps][kMaxSlots]
  int32_t places;     // ChunkPlace [warps][kMaxSlots]
  int32_t states;     // SoftmaxState [warps][2][columns]
  int32_t ends;       // WorkItem [2]
  int32_t part_rows;  // int32_t [warps][2]
  int32_t parts;      // float [warps][columns][head_dim]
  int32_t bytes;
};
TKV_HD constexpr DecodeShared decode_shared(int32_t head_dim, int32_t columns, int32_t slot_bytes,
                                            int32_t slots, int32_t warps) {
  DecodeShared s{};
  s.full = warps * slots * slot_bytes;
  s.headers = s.full + warps * kMaxSlots * 8;
  s.places = s.headers + warps * kMaxSlots * kChunkHeaderBytes;
  s.states = s.places + warps * kMaxSlots * kChunkHeaderBytes;
  s.ends = s.states + warps * 2 * columns * 8;
  s.part_rows = s.ends + 2 * static_cast<int32_t>(sizeof(WorkItem));
  s.parts = ceil_div(s.part_rows + warps * 2 * 4, 16) * 16;  // joined as float4
  s.bytes = s.parts + warps * columns * head_dim * 4;
  return s;
}

// Blocks of columns that the kernel for rows of `of_row` columns has.
TKV_HD constexpr int32_t column_blocks(int32_t of_row) {
  return of_row > kBlockColumns ? 2 : 1;
}
// Kernels of their own, so that the usual one has none of the others' code.
enum class DecodeMode {
  kPlain,   // one block of columns, every query sees all tokens, kDecodeWarps warps
  kNarrow,  // plain, of at most kNarrowColumns columns
  kFull,
  kBFloat16,  // full, for q, out and raw pages of bfloat16
  // The same for rows of several classes.
  kClassPlain,
  kClassNarrow,
  kClassFull,
  kClassBFloat16,
};
inline constexpr int32_t kModesOfOneClass = 4;
TKV_HD constexpr int32_t classes_of(DecodeMode mode) {
  return static_cast<int32_t>(mode) < kModesOfOneClass ? 1 : kMaxAttentionClasses;
}
// The mode that differs in the classes only.
TKV_HD constexpr DecodeMode of_one_class(DecodeMode mode) {
  return static_cast<DecodeMode>(static_cast<int32_t>(mode) % kModesOfOneClass);
}
template <int32_t kClasses>
TKV_HD constexpr DecodeMode of_classes(DecodeMode mode) {
  return static_cast<DecodeMode>(static_cast<int32_t>(of_one_class(mode)) +
                                 (kClasses > 1 ? kModesOfOneClass : 0));
}
// Whether the mode has one block of columns, all warps and no masks, sinks or bfloat16.
TKV_HD constexpr bool is_plain(DecodeMode mode) {
  return of_one_class(mode) == DecodeMode::kPlain || of_one_class(mode) == DecodeMode::kNarrow;
}
template <int32_t kClasses>
using DecodeKernelOf = void (*)(DecodeParamsOf<kClasses>);
// Selects a kernel. few_warps: CTAs have fewer than kDecodeWarps warps. Full modes of one class
// have two kernels, for few and for all warps. With classes a full mode has one kernel for both.
struct DecodeChoice {
  int32_t blocks;  // of columns
  DecodeMode mode;
  bool few_warps;
};
template <int32_t kClasses>
TKV_HD DecodeChoice decode_choice(const DecodeParamsOf<kClasses>& p) {
  using enum DecodeMode;
  const int32_t blocks = column_blocks(p.columns.of_row);
  const bool few_warps = p.warps < kDecodeWarps;
  const bool is_full =
      blocks > 1 || few_warps || p.tail.tier != kAttentionTiers || p.sinks != nullptr;
  const DecodeMode mode = p.is_bfloat16                        ? kBFloat16
                          : is_full                            ? kFull
                          : p.columns.of_row <= kNarrowColumns ? kNarrow
                                                               : kPlain;
  return {blocks, of_classes<kClasses>(mode), few_warps};
}
// Null where there is none. Each head_dim has an object for one class and one for several, from
// decode_instance.cu.in.
template <int32_t kHeadDim, int32_t kClasses>
DecodeKernelOf<kClasses> decode_kernel_of(const DecodeChoice& choice);

// Lets the kernels for so many blocks of columns use shared_bytes. Once per device, before the
// first launch.
template <int32_t kClasses>
Status prepare_decode(int32_t head_dim, int32_t blocks, int32_t shared_bytes);
// One kernel of num_ctas CTAs.
template <int32_t kClasses>
Status launch_decode(const DecodeParamsOf<kClasses>& params, int32_t head_dim, int32_t num_ctas,
                     GpuStream stream);

}  // namespace tierkv
