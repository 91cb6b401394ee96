// What follows from the config of a store of channel blocks, where its tokens lie, and its state as
// host code and kernels see it. store/CHANNEL.md holds the laws.
//
//   side 0   blocks of a row, the oldest first; the allocator's "tokens" are blocks
//   side 2   raw tokens, the oldest first
#pragma once

#include <cstdint>

#include "codec/format/channel_block.h"
#include "store/shared/sequence_info.h"
#include "tierkv/allocator.h"
#include "tierkv/page.h"
#include "tierkv/store.h"

namespace tierkv {

inline constexpr int32_t kBlockSide = 0;
inline constexpr int32_t kResidualSide = 2;

// Of one begin_prompt(): a kernel of append() has a CTA for each block, in a dimension of the grid
// that holds 65535.
inline constexpr int32_t kMaxChannelPromptBlocks = 65535;

// Positions of a SequenceInfo here: window_first is the first raw token, a multiple of the block;
// window_origin is 0, or kInPrompt; prompt_tokens is the first raw token before the last
// begin_prompt() or begin_step(), which an append() of a prompt makes blocks from.
TKV_HD int32_t first_raw_token(const SequenceInfo& info, int32_t num_tokens, int32_t window,
                               int32_t block_tokens) {
  const int32_t left = larger_of(0, num_tokens - window);  // have left the window
  return larger_of(info.window_first, left / block_tokens * block_tokens);
}
TKV_HD SequenceInfo channel_info_after_begin(SequenceInfo info, int32_t tokens, int32_t window,
                                             int32_t block_tokens) {
  info.prompt_tokens = info.window_first;
  info.num_tokens += tokens;
  info.window_first = first_raw_token(info, info.num_tokens, window, block_tokens);
  return info;
}
TKV_HD SequenceInfo channel_info_after_prompt(SequenceInfo info) {
  info.window_origin = 0;
  info.prompt_tokens = info.window_first;
  return info;
}
// A block that is cut becomes raw again.
TKV_HD SequenceInfo channel_info_after_truncate(SequenceInfo info, int32_t tokens,
                                                int32_t block_tokens) {
  info.num_tokens = tokens;
  info.window_first = smaller_of(info.window_first, tokens / block_tokens * block_tokens);
  info.prompt_tokens = info.window_first;
  return info;
}

// The first `leaving` of a row's raw pages, whose tokens are in blocks now, go behind the others.
// Where they are all there are none that must move.
TKV_HD void rotate_left(int32_t* page_ids, int32_t pages, int32_t leaving) {
  if (leaving >= pages) return;
  const auto reverse = [page_ids](int32_t first, int32_t end) {
    for (--end; first < end; ++first, --end) {
      const int32_t id = page_ids[first];
      page_ids[first] = page_ids[end];
      page_ids[end] = id;
    }
  };
  reverse(0, leaving);
  reverse(leaving, pages);
  reverse(0, pages);
}

// All pointers in one memory, host or device.
struct ChannelView {
  PageAllocator allocator;
  PageView pages;
  ChannelLayout layout{};
  SequenceInfo* infos = nullptr;  // [max_sequences]
  int32_t blocks_per_page = 1;
  int32_t raw_page_tokens = 0;  // a multiple of kTileTokens that divides the tokens of a block
  int32_t window_tokens = 0;
  int32_t num_kv_heads = 0;

  TKV_HD int32_t head_dim() const { return layout.head_dim(); }
  TKV_HD int32_t rows_per_sequence() const { return allocator.shape.table.rows_per_sequence; }
  TKV_HD int32_t row_of(int32_t sequence, int32_t layer, int32_t kv_head) const {
    return sequence * rows_per_sequence() + layer * num_kv_heads + kv_head;
  }
  TKV_HD int32_t blocks_of(const SequenceInfo& info) const {
    return info.window_first / layout.tokens;
  }
  TKV_HD static int32_t raw_tokens(const SequenceInfo& info) {
    return info.num_tokens - info.window_first;
  }
  // Both sides grow from the left of their tables.
  TKV_HD int32_t* page_ids(int32_t row, int32_t side) const {
    const PageTableShape& t = allocator.shape.table;
    return allocator.slots + static_cast<int64_t>(row) * t.row_stride() + t.slot_of(side, 0);
  }
  TKV_HD uint8_t* page_bytes(int32_t page) const { return pages.base + page * pages.page_bytes; }
  TKV_HD uint8_t* block(int32_t row, int32_t index) const {
    return page_bytes(page_ids(row, kBlockSide)[index / blocks_per_page]) +
           index % blocks_per_page * layout.bytes;
  }
  // The raw page of a token whose side begins with the token `first`; and the byte on it of a tile
  // of keys, then of values, of 16 bits.
  TKV_HD uint8_t* raw_page(int32_t row, int32_t first, int32_t position) const {
    return page_bytes(page_ids(row, kResidualSide)[(position - first) / raw_page_tokens]);
  }
  TKV_HD int32_t raw_tile_byte(Component c, int32_t position) const {
    const int32_t tile = position % raw_page_tokens / kTileTokens;
    return (2 * tile + static_cast<int32_t>(c)) * TileLayout{kRawCodes, head_dim()}.bytes();
  }
  TKV_HD int32_t raw_value_byte(Component c, int32_t position, int32_t dim) const {
    const CodePosition at = code_position({kRawCodes, head_dim()}, c, position % kTileTokens, dim);
    return raw_tile_byte(c, position) + at.byte + at.bit / 8;
  }
  // Raw pages whose tokens `blocks` blocks hold.
  TKV_HD int32_t pages_of_blocks(int32_t blocks) const {
    return blocks * (layout.tokens / raw_page_tokens);
  }
  // What the sides of a row hold when its sequence is `after` a begin: raw pages stay, so that a
  // row's count of raw tokens is that of the most that it has had.
  TKV_HD SideCounts counts_after(const SideCounts& held, const SequenceInfo& after) const {
    SideCounts counts;
    counts.of[kBlockSide] = blocks_of(after);
    counts.of[kResidualSide] = larger_of(held.of[kResidualSide], raw_tokens(after));
    return counts;
  }
};

struct ChannelShape {
  AllocatorShape allocator;
  ChannelLayout layout{};
  int64_t page_bytes = 0;
  int32_t blocks_per_page = 1;
  int32_t raw_page_tokens = 0;
};
// Validates the config of a store of channel blocks.
Result<ChannelShape> channel_shape(const KvStoreConfig& config);
// kOutOfRange beyond kMaxChannelPromptBlocks blocks, on both back ends.
Status check_channel_prompt(const KvStoreConfig& config, int32_t tokens);
// kUnsupported for what neither back end does.
Status validate_channel_request(const AttendRequest& request);
// Without pointers.
ChannelView channel_view(const KvStoreConfig& config, const ChannelShape& shape);

}  // namespace tierkv
