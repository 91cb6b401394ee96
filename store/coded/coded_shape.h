// What follows from the config of a coded store, where its tokens lie, and its state as host code
// and kernels see it. store/CODED.md holds the laws.
//
//   side 0   blocks of a row, back to back in 16-byte units; the allocator's "tokens" are units
//   side 2   raw tokens, a block of 64 to a page, the oldest first
#pragma once

#include <cstdint>

#include "attention/coded/coded_attention.h"
#include "codec/format/fixed_block.h"
#include "store/shared/sequence_info.h"
#include "tierkv/allocator.h"
#include "tierkv/page.h"
#include "tierkv/store.h"

namespace tierkv {

inline constexpr int32_t kCodedSide = 0;
inline constexpr int32_t kRawSide = 2;

// A unified page of 64 raw tokens (positions are not used, scores by prompts with fixed-rate
// blocks). It also holds the keys and values of 64 tokens as raw blocks: so what a row appends at
// once takes at most one new page.
inline constexpr int64_t coded_page_bytes(int32_t head_dim) {
  return int64_t{kBlockTokens} * (4 * head_dim + 8);
}

// Of one begin_prompt(): a kernel of append() has a CTA for each raw page that the tokens touch,
// one more than they fill, in a dimension of the grid that holds 65535.
inline constexpr int32_t kMaxCodedPromptTokens = 65534 * kBlockTokens;

// A block (slice) that would take more bytes coded is stored raw, as it would be worth little:
// attention has slots of this size. 5 bits a code.
inline constexpr int32_t most_coded_block_bytes(int32_t head_dim) {
  return kBlockTokens * (head_dim < kSliceDims ? head_dim : kSliceDims) * 5 / 8;
}

// Positions of a coded store's SequenceInfo: window_first is the first raw token, a multiple of 64;
// window_origin is 0, or kInPrompt.
TKV_HD int32_t coded_tokens_after_prompt(int32_t num_tokens, int32_t window) {
  return num_tokens <= window ? 0 : (num_tokens - window) / kBlockTokens * kBlockTokens;
}
TKV_HD SequenceInfo coded_info_after_prompt(int32_t num_tokens, int32_t window) {
  return {num_tokens, coded_tokens_after_prompt(num_tokens, window), 0, num_tokens};
}
// Whether a step of `tokens` codes the oldest raw block.
TKV_HD bool coded_step_fills_block(const SequenceInfo& info, int32_t tokens, int32_t window) {
  return info.num_tokens + tokens - info.window_first - window >= kBlockTokens;
}
TKV_HD SequenceInfo coded_info_after_step(SequenceInfo info, int32_t tokens, int32_t window) {
  if (coded_step_fills_block(info, tokens, window)) info.window_first += kBlockTokens;
  info.num_tokens += tokens;
  return info;
}
// A block that is cut becomes raw again.
TKV_HD SequenceInfo coded_info_after_truncate(SequenceInfo info, int32_t tokens) {
  info.num_tokens = tokens;
  info.window_first = smaller_of(info.window_first, tokens / kBlockTokens * kBlockTokens);
  info.prompt_tokens = smaller_of(info.prompt_tokens, tokens);
  return info;
}

// The page of a row's oldest raw block, which was coded, goes behind the others.
TKV_HD void rotate_raw_pages(int32_t* page_ids, int32_t pages) {
  const int32_t first = page_ids[0];
  for (int32_t i = 0; i + 1 < pages; ++i) page_ids[i] = page_ids[i + 1];
  page_ids[pages - 1] = first;
}

// Where a block of `units` begins behind `end` units: blocks do not straddle pages.
TKV_HD int32_t block_begin(int32_t end, int32_t units, int32_t page_units) {
  const int32_t left = page_units - end % page_units;
  return units <= left ? end : end + left;
}

// Which blocks are kept at a fixed rate (tierkv/coded.h): those with such a token.
struct FixedRule {
  FixedFormat format;  // none: no block is
  int32_t sink_tokens = 0;
  double alpha_high = 0;

  // As Tier::kHigh of a prompt is found (docs/internals/policies.md).
  TKV_HD bool takes(int32_t position, float significance) const {
    return format.any() &&
           (position < sink_tokens ||
            static_cast<double>(significance) >= alpha_high / static_cast<double>(position + 1));
  }
};

// All pointers in one memory, host or device.
struct CodedView {
  PageAllocator allocator;
  PageView pages;
  SequenceInfo* infos = nullptr;    // [max_sequences]
  CodedBlockRef* keys = nullptr;    // [rows][max_blocks], offsets from pages.base
  CodedBlockRef* values = nullptr;  // likewise
  float* key_means = nullptr;       // [rows][head_dim], fp16 numbers; of rows past their prompts
  float* value_means = nullptr;
  float* key_steps = nullptr;  // [rows], of rows past their prompts
  float* value_steps = nullptr;
  int32_t max_blocks = 0;
  int32_t window_tokens = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  FixedRule fixed;

  TKV_HD int32_t rows_per_sequence() const { return allocator.shape.table.rows_per_sequence; }
  TKV_HD int32_t row_of(int32_t sequence, int32_t layer, int32_t kv_head) const {
    return sequence * rows_per_sequence() + layer * num_kv_heads + kv_head;
  }
  TKV_HD int32_t layer_of(int32_t row) const { return row % rows_per_sequence() / num_kv_heads; }
  TKV_HD int32_t page_units() const { return allocator.shape.table.tokens_per_page[kCodedSide]; }
  TKV_HD static int32_t raw_tokens(const SequenceInfo& info) {
    return info.num_tokens - info.window_first;
  }
  TKV_HD static int32_t raw_page_index(const SequenceInfo& info, int32_t position) {
    return (position - info.window_first) / kBlockTokens;
  }
  // Both sides grow from the left of their tables.
  TKV_HD int32_t* page_ids(int32_t row, int32_t side) const {
    const PageTableShape& t = allocator.shape.table;
    return allocator.slots + static_cast<int64_t>(row) * t.row_stride() + t.slot_of(side, 0);
  }
  TKV_HD int32_t page_id(int32_t row, int32_t side, int32_t index) const {
    return page_ids(row, side)[index];
  }
  TKV_HD uint8_t* page_bytes(int32_t page) const { return pages.base + page * pages.page_bytes; }
  TKV_HD uint8_t* raw_page(int32_t row, const SequenceInfo& info, int32_t position) const {
    return page_bytes(page_id(row, kRawSide, raw_page_index(info, position)));
  }
  TKV_HD CodedBlockRef* blocks(Component c, int32_t row) const {
    return (c == Component::kKey ? keys : values) + static_cast<int64_t>(row) * max_blocks;
  }
  TKV_HD float* means(Component c, int32_t row) const {
    return (c == Component::kKey ? key_means : value_means) + static_cast<int64_t>(row) * head_dim;
  }
  TKV_HD float& step(Component c, int32_t row) const {
    return (c == Component::kKey ? key_steps : value_steps)[row];
  }
};

// Byte of a raw value on its page: four fp16 tiles of keys, then four of values.
TKV_HD int32_t raw_tile_byte(int32_t head_dim, Component c, int32_t slot) {
  const int32_t first = c == Component::kKey ? 0 : kBlockTokens * 2 * head_dim;
  return first + slot / kTileTokens * (kTileTokens * 2 * head_dim);
}
TKV_HD int32_t raw_value_byte(int32_t head_dim, Component c, int32_t slot, int32_t dim) {
  const CodePosition at = code_position({kRawCodes, head_dim}, c, slot % kTileTokens, dim);
  return raw_tile_byte(head_dim, c, slot) + at.byte + at.bit / 8;
}
// Of a prompt's token its significance, behind the values.
TKV_HD int32_t raw_score_byte(int32_t head_dim, int32_t slot) {
  return kBlockTokens * 4 * head_dim + slot * 4;
}

struct CodedShape {
  AllocatorShape allocator;
  int64_t page_bytes = 0;
  int32_t max_blocks = 0;
};
// Validates the config of a coded store.
Result<CodedShape> coded_shape(const KvStoreConfig& config);
// kOutOfRange beyond kMaxCodedPromptTokens, on both back ends.
Status check_coded_prompt(int32_t tokens);
// Whether a prompt of so many tokens can end: kInvalidArgument where steps need a token.
Status check_coded_prompt_end(const CodedConfig& config, int32_t tokens);
// What calls that bring scores answer.
Status no_coded_scores();
// kUnsupported for what neither back end does.
Status validate_coded_request(const AttendRequest& request);
// Without pointers.
CodedView coded_view(const KvStoreConfig& config, const CodedShape& shape);

}  // namespace tierkv
