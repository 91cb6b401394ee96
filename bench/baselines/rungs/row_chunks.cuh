// SPDX-License-Identifier: Apache-2.0
// The tokens of a row as a list of chunks that can be asked for in any order: what a fixed split
// deals out. A chunk is up to `chunk_tiles` consecutive tiles of one page; the chunks of a row are
// numbered through its tiers in order.
#pragma once

#include "bench/baselines/rungs/rung_params.h"
#include "gpu/lanes.cuh"

namespace tierkv {

struct RowChunk {
  int32_t tier;
  int32_t page;    // id as the table has it: see page_of()
  int32_t tile;    // first tile in the page
  int32_t tiles;   // with tokens in them
  int32_t tokens;  // 0: no chunk
};
inline constexpr RowChunk kNoChunk{0, kNoPage, 0, 0, 0};

// Null where the table names no page of the pool: such a chunk is left out.
__device__ __forceinline__ const uint8_t* page_of(const RungParams& p, const RowChunk& chunk) {
  const bool is_stray = chunk.page < 0 || chunk.page >= p.num_pages;
  return is_stray ? nullptr : p.pool + chunk.page * p.page_bytes;
}

class RowChunks {
 public:
  __device__ __forceinline__ RowChunks(const RungParams& p, int32_t row)
      : p_(p), table_row_(table_row_of(p.rows, p.layer, row)) {
    const RowTokens n = row_tokens(p.rows, table_row_);
    count_ = 0;
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) {
      tokens_[t] = n.tier[t];
      first_[t] = count_;
      count_ += chunks_of(p.rows.tiers[t], n.tier[t]);
    }
  }

  __device__ __forceinline__ int32_t count() const {
    return count_;
  }

  // The first chunk of part i of `parts` nearly equal parts.
  __device__ __forceinline__ int32_t part_begin(int32_t i, int32_t parts) const {
    return static_cast<int32_t>(static_cast<int64_t>(count_) * i / parts);
  }

  // i is in [0, count()). The page id is on its way when this returns; page_of() waits for it.
  __device__ __forceinline__ RowChunk at(int32_t i) const {
    int32_t t = 0, left = i, tokens = tokens_[0];
#pragma unroll
    for (int32_t k = 1; k < kAttentionTiers; ++k) {
      if (i < first_[k] || tokens_[k] == 0) continue;
      t = k;
      left = i - first_[k];
      tokens = tokens_[k];
    }
    const TierSource& tier = p_.rows.tiers[t];
    const int32_t per_page = ceil_div(tier.page_tiles, tier.chunk_tiles);
    const int32_t page_index = left / per_page;
    RowChunk chunk;
    chunk.tier = t;
    chunk.page = tier.slots[table_row_ * p_.rows.row_stride + page_index * tier.direction];
    chunk.tile = (left - page_index * per_page) * tier.chunk_tiles;
    const int32_t behind =
        tokens - (page_index * tier.page_tiles + chunk.tile) * kTileTokens;  // from here on
    const int32_t most = smaller(tier.chunk_tiles, tier.page_tiles - chunk.tile);
    chunk.tokens = smaller(behind, most * kTileTokens);
    chunk.tiles = tile_count(chunk.tokens);
    return chunk;
  }

 private:
  __device__ __forceinline__ static int32_t chunks_of(const TierSource& tier, int32_t tokens) {
    const int32_t tiles = tile_count(tokens), pages = tiles / tier.page_tiles;
    return pages * ceil_div(tier.page_tiles, tier.chunk_tiles) +
           ceil_div(tiles - pages * tier.page_tiles, tier.chunk_tiles);
  }

  const RungParams& p_;
  int64_t table_row_;
  int32_t tokens_[kAttentionTiers];
  int32_t first_[kAttentionTiers];
  int32_t count_;
};

}  // namespace tierkv
