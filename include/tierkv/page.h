// SPDX-License-Identifier: Apache-2.0
// Unified pages: fixed-size pages of one pool that hold tokens of any tier, and the choice of their
// size.
//
// A page belongs to one row (sequence, layer, kv_head) and one tier at a time. It holds six
// segments: key codes, key metadata, value codes, value metadata, scores, positions. Pages without
// records end after the first four. How many tokens fit follows from the tier's format, in
// multiples of 16 (a tile). So one page_bytes serves every tier with some waste: choose_page_size()
// picks the smallest page that wastes little for all of them. docs/reference/format.md has every
// byte.
//
// Sources: DiffKV section 5.2 ("Unified Pages"); the side table is ours.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/status.h"

namespace tierkv {

inline constexpr int32_t kTileTokens = 16;
inline constexpr int32_t kPageAlignment = 128;     // of page_bytes and of the pool's base
inline constexpr int32_t kMaxPageBytes = 1 << 20;  // offsets inside a page are int32_t
inline constexpr int32_t kNoSlot = -1;
inline constexpr int32_t kNoPosition = -1;
inline constexpr float kNoScore = -std::numeric_limits<float>::infinity();  // of an unused slot

// The pool as kernels and host code see it. All of it lies in one memory (host or device) and is
// owned by the caller.
struct TKV_API PageView {
  uint8_t* base = nullptr;  // num_pages x page_bytes, aligned to kPageAlignment
  int64_t page_bytes = 0;   // multiple of kPageAlignment, at most kMaxPageBytes
  int32_t num_pages = 0;

  // kInvalidArgument naming the field: null or misaligned base, sizes out of range.
  Status validate() const;
};

inline Status PageView::validate() const {
  const auto invalid = [](const char* why) { return Status(StatusCode::kInvalidArgument, why); };
  if (page_bytes <= 0 || page_bytes > kMaxPageBytes)
    return invalid("page_bytes must be 128 to 1 MiB");
  if (page_bytes % kPageAlignment != 0) return invalid("page_bytes is not a multiple of 128");
  if (num_pages < 1) return invalid("num_pages must be positive");
  if (base == nullptr) return invalid("page pool is null");
  if (reinterpret_cast<uintptr_t>(base) % kPageAlignment != 0) {
    return invalid("page pool is not aligned to 128 bytes");
  }
  return Status::ok();
}

// What choose_page_size() may choose from.
struct TKV_API PageSizing {
  double max_waste = 0.06;  // of page_bytes, for a full page of any of the formats
  int32_t min_tokens = 64;  // tokens per page of the smallest format at least
  int32_t max_page_bytes = 131072;
  bool records = true;  // false: pages end before their scores and positions

  Status validate() const;
};

struct PageChoice {
  int32_t page_bytes = 0;
  std::vector<int32_t> tokens;  // per page, for each format, in multiples of kTileTokens
  std::vector<double> waste;    // 1 - bytes used by a full page / page_bytes, for each format
  double worst_waste = 0;
  bool within_limit =
      true;  // false: no page up to max_page_bytes keeps max_waste; this one wastes least
};

// The page size for rows whose tokens are stored in these formats. Name each format once.
//
// Candidates are the sizes that one of the formats fills exactly, rounded up to kPageAlignment.
// They hold at least a tile of every format and min_tokens of the smallest. The smallest candidate
// within max_waste for every format wins. Where there is none, the one whose worst waste is least
// (the smaller of two equals) is returned with within_limit false. kUnsupported for formats without
// pages, kInvalidArgument for an empty list or sizes that admit no candidate.
TKV_API Result<PageChoice> choose_page_size(const std::vector<TierFormat>& formats,
                                            int32_t head_dim, const PageSizing& sizing = {});

}  // namespace tierkv
