// SPDX-License-Identifier: Apache-2.0
// Rows of channel blocks (codec/format/channel_block.h) with a table of their own, without a store:
// the whole of what KIVI's and BitDecoding's caches are, to test and to compare with.
#pragma once

#include "codec/format/channel_block.h"
#include "tierkv/attention.h"

namespace tierkv {

// A row's residual: the key tiles, then the value tiles, of 16 bits.
TKV_HD constexpr int32_t residual_bytes(const ChannelLayout& l) {
  return l.tokens * l.head_dim() * 4;
}
TKV_HD constexpr int32_t residual_tile(const ChannelLayout& l, Component c, int32_t tile_index) {
  return (c == Component::kValue ? l.tokens * l.head_dim() * 2 : 0) +
         tile_index * TileLayout{kRawCodes, l.head_dim()}.bytes();
}
// Where a value lies in it.
TKV_HD int32_t residual_byte(const ChannelLayout& l, Component c, int32_t token, int32_t dim) {
  const CodePosition at =
      code_position(TileLayout{kRawCodes, l.head_dim()}, c, token % kTileTokens, dim);
  return residual_tile(l, c, token / kTileTokens) + at.byte + at.bit / 8;
}
float residual_value(const ChannelLayout& layout, const uint8_t* residual, Component component,
                     int32_t token, int32_t dim);

// The rows of a cache; all memory is the caller's, host or device. Rows are (sequence, kv_head) of
// one layer, kv_heads innermost.
struct ChannelCache {
  ChannelLayout layout{};
  int32_t num_rows = 0;
  int32_t max_blocks = 0;              // of a row
  int32_t num_blocks = 0;              // of the pool
  uint8_t* pool = nullptr;             // [num_blocks] x layout.bytes, 128-byte aligned
  const int32_t* table = nullptr;      // [num_rows, max_blocks] ids of blocks
  uint8_t* residual = nullptr;         // [num_rows] x residual_bytes(layout), 16-byte aligned;
                                       // finite: zeros before the first use
  int32_t* block_count = nullptr;      // [num_rows] blocks in use
  int32_t* residual_tokens = nullptr;  // [num_rows] 0 to layout.tokens - 1

  // What the methods below name a row by.
  using Row = int32_t;
  TKV_HD Row row(int32_t index) const { return index; }
  TKV_HD uint8_t* block(int32_t id) const { return pool + static_cast<int64_t>(id) * layout.bytes; }
  TKV_HD uint8_t* residual_of(int32_t row) const {
    return residual + static_cast<int64_t>(row) * residual_bytes(layout);
  }
  TKV_HD const uint8_t* raw_tile(int32_t row, Component c, int32_t tile) const {
    return residual_of(row) + residual_tile(layout, c, tile);
  }
  // The id of a row's block; -1 where the tables name none of the pool.
  TKV_HD int32_t block_id(int32_t row, int32_t index) const {
    if (index < 0 || index >= max_blocks) return -1;
    const int32_t id = table[static_cast<int64_t>(row) * max_blocks + index];
    return id >= 0 && id < num_blocks ? id : -1;
  }
  // kInvalidArgument.
  Status validate() const;
};

// One token for each row, and what became of it: kNonFinite, kOutOfPages (the token would fill a
// block and the table has none for it), kCorrupt (counts that cannot be): the row is as it was.
struct ChannelAppend {
  const uint16_t* k = nullptr;   // fp16 [num_rows, head_dim]
  const uint16_t* v = nullptr;   // likewise
  StatusCode* status = nullptr;  // [num_rows]
};
// The tokens of prompts, for rows that are empty. Token t of sequence s is at (indptr[s] + t).
// Statuses are per row, as above; kCorrupt also where a prompt does not fit max_blocks. A row whose
// status is not kOk is left empty.
struct ChannelPrompt {
  const uint16_t* k = nullptr;      // fp16 [tokens, num_kv_heads, head_dim], 16-byte aligned
  const uint16_t* v = nullptr;      // likewise
  const int32_t* indptr = nullptr;  // [num_rows / num_kv_heads + 1]
  int32_t num_kv_heads = 0;
  StatusCode* status = nullptr;  // [num_rows]
};
Status append_channel_host(const ChannelCache& cache, const ChannelAppend& append);
Status append_channel(const ChannelCache& cache, const ChannelAppend& append, GpuStream stream);
Status fill_channel_host(const ChannelCache& cache, const ChannelPrompt& prompt);
Status fill_channel(const ChannelCache& cache, const ChannelPrompt& prompt, GpuStream stream);

}  // namespace tierkv
