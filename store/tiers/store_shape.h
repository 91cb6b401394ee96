// What follows from a config: page layouts and the allocator's shape; and the store's state as host
// code and kernels see it.
#pragma once

#include <cstdint>

#include "allocator/row_plan.h"
#include "codec/format/page_layout.h"
#include "store/shared/sequence_info.h"
#include "tierkv/allocator.h"
#include "tierkv/page.h"
#include "tierkv/store.h"

namespace tierkv {

struct StoreShape {
  AllocatorShape allocator;
  PageLayout layouts[kStoreSides];
  int64_t page_bytes = 0;
  DType raw_dtype = DType::kFloat16;  // of 16-bit components
};
// Validates the config.
Result<StoreShape> store_shape(const KvStoreConfig& config);

inline const TierFormat& side_format(const KvStoreConfig& config, int32_t side) {
  return side == kHighSide  ? config.high_format
         : side == kLowSide ? config.low_format
                            : config.window_format;
}

// All pointers in one memory, host or device.
struct StoreView {
  PageAllocator allocator;
  PageView pages;
  PageLayout layouts[kStoreSides];
  DType raw_dtype = DType::kFloat16;
  TierPolicy policy;
  int32_t score_interval = 1;
  int32_t num_kv_heads = 0;
  SequenceInfo* infos = nullptr;  // [max_sequences]

  TKV_HD int32_t rows_per_sequence() const { return allocator.shape.table.rows_per_sequence; }
  TKV_HD int32_t row_of(int32_t sequence, int32_t layer, int32_t kv_head) const {
    return sequence * rows_per_sequence() + layer * num_kv_heads + kv_head;
  }
  TKV_HD int32_t page_tokens(int32_t side) const { return layouts[side].tokens; }
  TKV_HD int32_t page_id(int32_t row, int32_t side, int32_t page_index) const {
    return page_at(allocator, row, side, page_index);
  }
  TKV_HD uint8_t* page_bytes(int32_t page) const { return pages.base + page * pages.page_bytes; }
  // Tokens in use on page `page_index` of a side that holds `tokens`.
  TKV_HD int32_t page_used(int32_t side, int32_t page_index, int32_t tokens) const {
    return smaller_of(page_tokens(side), tokens - page_index * page_tokens(side));
  }
};

// Without pointers.
StoreView store_view(const KvStoreConfig& config, const StoreShape& shape);

// Pages for the tokens of a prompt that are neither sinks nor window, however they are dealt.
TKV_HD int32_t prompt_pages(const StoreView& s, int32_t num_tokens) {
  const SequenceInfo after = info_after_prompt(s.policy, num_tokens);
  return worst_case_pages(num_tokens - window_side_tokens(s.policy, after),
                          s.page_tokens(kHighSide), s.page_tokens(kLowSide));
}

// Adds a row that holds `tokens` of a sequence of num_tokens.
void count_row(const StoreView& s, const SideCounts& tokens, int32_t num_tokens, StoreStats* stats);

// A query of a row and what it saw.
struct ScoredQuery {
  int32_t position;
  const float* probabilities;  // by position
};
// The running mean of the token at `position`, older than the query, after one more observation.
TKV_HD float scored(const CountSchedule& schedule, float score, int32_t position, int32_t query,
                    float probability) {
  return running_mean(score, schedule.count_of(position, query) - 1, probability);
}

// Token `index` of a side of a row.
struct TokenPlace {
  uint8_t* page;
  int32_t slot;
};
TKV_HD TokenPlace place_of(const StoreView& s, int32_t row, int32_t side, int32_t index) {
  const int32_t per_page = s.page_tokens(side);
  return {s.page_bytes(s.page_id(row, side, index / per_page)), index % per_page};
}
// Segments are aligned to their elements (codec/format/page_layout.h).
TKV_HD float score_at(const StoreView& s, int32_t side, TokenPlace at) {
  return *reinterpret_cast<const float*>(at.page + s.layouts[side].score_byte(at.slot));
}
TKV_HD int32_t position_at(const StoreView& s, int32_t side, TokenPlace at) {
  return *reinterpret_cast<const int32_t*>(at.page + s.layouts[side].position_byte(at.slot));
}

}  // namespace tierkv
