// SPDX-License-Identifier: Apache-2.0
// Decode attention over rows of channel blocks (codec/format/channel_block.h) that lie on pages of
// a pool and are found through page tables, as a store has them.
//
// With k = scale_d code + zero_point_d, q . k = (q * scale) . code + q . zero_point: a block costs
// one scaling of the query and one product with the zero points, its tokens nothing. Values as in
// pages.
//
// Sources: BitDecoding section 4 (channel-wise keys on tensor cores).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/channel/channel_plan.h"
#include "codec/format/channel_block.h"
#include "tierkv/layout.h"

namespace tierkv {

inline constexpr int32_t kMaxChannelGroup = 16;

// All pointers in device memory.
struct ChannelPages {
  ChannelLayout layout{};
  const uint8_t* base = nullptr;  // [num_pages] x page_bytes, less than 2^31 x 128 bytes
  int64_t page_bytes = 0;
  int32_t num_pages = 0;
  int32_t block_shift = 0;         // a page holds 1 or 2 blocks, back to back: their log2
  int32_t raw_page_tokens = 16;    // on a page: for each 16 a tile of keys, then one of values
  const int32_t* slots = nullptr;  // [num_table_rows][row_stride] ids of pages
  int32_t num_table_rows = 0;
  int32_t row_stride = 0;
  int32_t block_slots = 0;  // of a line: pages of blocks first,
  int32_t raw_slots = 0;    // then pages of raw tokens

  // Where a table row's line of pages is; null where it is outside the tables.
  using Row = const int32_t*;
  TKV_HD Row row(int32_t at) const {
    return at < 0 || at >= num_table_rows ? nullptr : slots + static_cast<int64_t>(at) * row_stride;
  }
  // In units of kBlockUnit from the base: -1 where the line names no page of the pool.
  static constexpr int32_t kBlockUnit = 128;
  TKV_HD int32_t block_id(Row line, int32_t index) const {
    const int32_t slot = index >> block_shift, part = index & ((1 << block_shift) - 1);
    if (line == nullptr || slot >= block_slots) return -1;
    const int32_t page = line[slot];
    if (page < 0 || page >= num_pages) return -1;
    return page * static_cast<int32_t>(page_bytes / kBlockUnit) +
           part * (layout.bytes / kBlockUnit);
  }
  TKV_HD const uint8_t* block(int32_t id) const {
    return base + static_cast<int64_t>(id) * kBlockUnit;
  }
  // Null where the line names no page of the pool.
  TKV_HD const uint8_t* raw_tile(Row line, Component c, int32_t tile) const {
    const int32_t tiles = raw_page_tokens / kTileTokens, slot = tile / tiles;
    if (line == nullptr || slot >= raw_slots) return nullptr;
    const int32_t page = line[block_slots + slot];
    if (page < 0 || page >= num_pages) return nullptr;
    const int32_t of_page = 2 * (tile % tiles) + static_cast<int32_t>(c);
    return base + page * page_bytes + of_page * TileLayout{kRawCodes, layout.head_dim()}.bytes();
  }
  // kInvalidArgument.
  Status validate() const;
};

struct ChannelPagesCall {
  ChannelCtas ctas;  // channel_ctas()
  int32_t num_sequences = 0;
  ChannelPlan plan;  // by earlier work on the stream, of ctas.team
  float sm_scale = 0;
  DType dtype = DType::kFloat16;  // of q and out: that, or bfloat16
  const uint16_t* q = nullptr;    // [num_sequences, q_len, num_q_heads, head_dim], 16-byte aligned
  uint16_t* out = nullptr;        // likewise; 0 for rows without tokens
  float* lse = nullptr;  // [num_sequences, q_len, num_q_heads], natural logarithm; may be null
  const float* sinks = nullptr;  // [num_q_heads], as of AttendCall; null: none
  StatusCode* status = nullptr;  // kCorrupt where it was kOk and an id led outside the tables or
                                 // the pool: what it named was left out
};

// kInvalidArgument, and kUnsupported for more than kMaxChannelGroup q heads a kv_head.
Status validate_channel_group(int32_t group);
// Of calls with up to num_rows rows; device memory, 16-byte aligned, nothing kept in it.
size_t channel_pages_workspace_bytes(const ChannelCtas& ctas, int32_t head_dim, int32_t num_rows);
// What plan_channel() needs beside the sequences, the plan and the status.
ChannelPlanCall channel_plan_call(const ChannelPages& pages, const ChannelCtas& ctas);
Status attend_channel_pages(const ChannelPages& pages, const ChannelPagesCall& call,
                            void* workspace, GpuStream stream);

}  // namespace tierkv
