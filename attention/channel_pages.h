// Decode attention over rows of channel blocks that lie on pages of a pool and are found through
// page tables, as a store has them: the kernel of channel_attention.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/channel_block.h"

namespace tierkv {

// What a row holds now. table_row -1: nothing.
struct ChannelRow {
  int32_t table_row = -1;  // of the tables that the call gets
  int32_t blocks = 0;
  int32_t raw_tokens = 0;
};

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
  int32_t block_slots = 0;           // of a line: pages of blocks first,
  int32_t raw_slots = 0;             // then pages of raw tokens
  const ChannelRow* rows = nullptr;  // [num_rows], written by earlier work on the stream
  int32_t num_rows = 0;

  // Where a row's line of pages is; null where it holds nothing, or is outside the tables.
  using Row = const int32_t*;
  TKV_HD Row row(int32_t index) const {
    const int32_t at = rows[index].table_row;
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
    return base + page * page_bytes + of_page * TileLayout{16, layout.head_dim()}.bytes();
  }
  // kInvalidArgument.
  Status validate() const;
};

struct ChannelPagesCall {
  int32_t group = 1;  // q heads of a row
  float sm_scale = 0;
  const uint16_t* q = nullptr;   // fp16 [num_rows, group, head_dim], 16-byte aligned
  uint16_t* out = nullptr;       // likewise; 0 for rows without tokens
  float* lse = nullptr;          // [num_rows, group], natural logarithm; may be null
  StatusCode* status = nullptr;  // kCorrupt where it was kOk and a count or an id led outside the
                                 // tables or the pool: what it named was left out
  int32_t units = 1;             // blocks and raw tiles of the longest row, for the split; a guess
};

// kUnsupported for head_dim 256 and more than kMaxChannelGroup heads.
Status validate_channel_pages(const ChannelLayout& layout, int32_t group);
// Of a call with up to num_rows rows; device memory, 16-byte aligned, nothing kept in it.
size_t channel_pages_workspace_bytes(const ChannelLayout& layout, int32_t num_rows, int32_t group);
Status attend_channel_pages(const ChannelPages& pages, const ChannelPagesCall& call,
                            void* workspace, GpuStream stream);

}  // namespace tierkv
