// SPDX-License-Identifier: Apache-2.0
// What the kernel of every rung is given. head_dim is 128, a row is one (sequence, kv_head) with
// all q heads of its group.
#pragma once

#include <cstdint>

#include "attention/core/online_softmax.h"
#include "attention/work/work.h"

namespace tierkv {

inline constexpr int32_t kRungHeadDim = 128;
inline constexpr int32_t kRungMaxGroup = 8;

struct RungParams {
  RowsOf<1> rows;  // chunk_tiles as the rung wants them
  int32_t layer = 0;
  const uint8_t* pool = nullptr;  // [num_pages][page_bytes]
  int64_t page_bytes = 0;
  int32_t num_pages = 0;
  int32_t group = 1;        // q heads of a row
  int32_t splits = 1;       // equal parts that every row is cut into
  const void* q = nullptr;  // fp16 [num_rows][group][128]
  void* out = nullptr;      // fp16, like q
  float* lse = nullptr;     // [num_rows][group] or null
  // Used where splits > 1.
  float* parts = nullptr;               // [num_rows][splits][group][128]
  SoftmaxState* part_states = nullptr;  // [num_rows][splits][group]
  int32_t* arrivals = nullptr;          // [num_rows][group], 0 between launches
  float scale_log2 = 0;                 // sm_scale * log2(e)
  int32_t slot_bytes = 0;               // of the largest chunk
};

}  // namespace tierkv
