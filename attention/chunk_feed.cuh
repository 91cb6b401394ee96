// The feeding warp of a CTA: it walks the items of the other warps, looks up their pages and copies
// their chunks into shared memory ahead of use, so that they meet tables, page ids and addresses
// only as bytes that have arrived.
//
// Every warp has a ring of slots, and every lane here fills one slot of one warp: lane = slot *
// kDecodeWarps + warp. A warp's chunks go to its slots in turn, so the lane of slot j takes its
// chunks j, j + slots, j + 2 * slots, ... and passes over the others.
#pragma once

#include "attention/decode.h"
#include "attention/ptx.cuh"

namespace tierkv {

// What lies in a slot.
struct alignas(16) ChunkHeader {
  int32_t row;
  int32_t format;  // chunk_format()
  int32_t tiles;   // of the item that this chunk stands for: those copied, or 1 of an empty row
  int32_t tokens;  // 0: nothing to attend to
};

__device__ __forceinline__ int32_t chunk_format(const PageLayout& layout) {
  return layout.k_tile.bits << 8 | layout.v_tile.bits;
}

// The next chunk of an item.
struct Chunk {
  int32_t row;
  int32_t tier;
  int32_t tiles;
  int32_t tokens;
  int32_t page;  // slot of the row's tier
  int32_t tile;  // first tile in the page
  int64_t table_row;
};

// Walks the chunks of an item.
class ChunkCursor {
 public:
  __device__ ChunkCursor(const DecodeParams& params, const WorkItem& item)
      : p_(params), left_(item.tiles), row_(item.row) {
    if (left_ == 0) return;
    table_row_ = table_row_of(p_.rows, p_.layer, row_);
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) tokens_[t] = item.tier[t];
    int32_t tile = item.tile;
    enter_tier(0);
    while (tier_ < kAttentionTiers && tile >= tier_tiles_) {
      tile -= tier_tiles_;
      enter_tier(tier_ + 1);
    }
    if (tier_ == kAttentionTiers) return;
    tier_tile_ = tile;
    page_ = tile / p_.rows.tiers[tier_].tiles_per_page;
    page_tile_ = tile - page_ * p_.rows.tiers[tier_].tiles_per_page;
  }

  __device__ bool has_more() const {
    return left_ > 0;
  }

  // has_more() before.
  __device__ Chunk next() {
    if (tier_ == kAttentionTiers) {  // of a row without tokens
      const Chunk chunk{row_, 0, 1, 0, 0, 0, table_row_};
      pass(1);
      return chunk;
    }
    const TierSource& tier = p_.rows.tiers[tier_];
    const int32_t tiles = smaller(smaller(tier.tiles_per_chunk, tier.tiles_per_page - page_tile_),
                                  smaller(tier_tiles_ - tier_tile_, left_));
    const int32_t tokens = smaller(tiles * kTileTokens, tier_tokens_ - tier_tile_ * kTileTokens);
    const Chunk chunk{row_, tier_, tiles, tokens, page_, page_tile_, table_row_};
    tier_tile_ += tiles;
    page_tile_ += tiles;
    if (page_tile_ == tier.tiles_per_page) {
      page_tile_ = 0;
      ++page_;
    }
    pass(tiles);
    return chunk;
  }

 private:
  // The first tier from `tier` on that has tokens; kAttentionTiers where there is none.
  __device__ void enter_tier(int32_t tier) {
    tier_ = kAttentionTiers;
    tier_tokens_ = 0;
#pragma unroll
    for (int32_t t = kAttentionTiers - 1; t >= 0; --t) {
      if (t < tier || tokens_[t] == 0) continue;
      tier_ = t;
      tier_tokens_ = tokens_[t];
    }
    tier_tiles_ = tiles_of(tier_tokens_);
    tier_tile_ = page_ = page_tile_ = 0;
  }

  __device__ void pass(int32_t tiles) {
    left_ -= tiles;
    if (left_ == 0 || (tier_ < kAttentionTiers && tier_tile_ < tier_tiles_)) return;
    if (tier_ < kAttentionTiers) enter_tier(tier_ + 1);
    if (tier_ < kAttentionTiers) return;
    ++row_;
    table_row_ = table_row_of(p_.rows, p_.layer, row_);
    const RowTokens n = row_tokens(p_.rows, table_row_);
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) tokens_[t] = n.tier[t];
    enter_tier(0);
  }

  const DecodeParams& p_;
  int32_t left_;  // tiles of the item
  int32_t row_;
  int64_t table_row_ = kPaddingRow;
  int32_t tokens_[kAttentionTiers] = {0, 0, 0};
  int32_t tier_ = kAttentionTiers;  // kAttentionTiers: the row has no tokens
  int32_t tier_tokens_ = 0, tier_tiles_ = 0, tier_tile_ = 0;
  int32_t page_ = 0, page_tile_ = 0;
};

// The bytes of `tiles` tiles of a page from `tile` on, to a slot: the four segments, back to back.
// A whole page is one piece, because its segments lie like that already.
__device__ __forceinline__ CopyPieces chunk_pieces(const PageLayout& layout, const uint8_t* page,
                                                   int32_t tile, int32_t tiles, uint8_t* slot) {
  CopyPieces out{};
  if (tiles == layout.tiles()) {
    out.piece[0] = {slot, page, static_cast<uint32_t>(layout.scores)};
    return out;
  }
  int32_t i = 0;
#pragma unroll
  for (const Component c : {Component::kKey, Component::kValue}) {
    const int32_t bytes[2] = {tiles * layout.tile(c).bytes(),
                              tiles * tile_metadata_bytes(layout.groups(c))};
    const int32_t from[2] = {layout.tile_codes_byte(c, tile), layout.tile_metadata_byte(c, tile)};
#pragma unroll
    for (int32_t k = 0; k < 2; ++k) {
      out.piece[i++] = {slot, page + from[k], static_cast<uint32_t>(bytes[k])};
      slot += bytes[k];
    }
  }
  return out;
}

// One lane's slot: where it is and what goes there next.
class SlotFeed {
 public:
  struct Place {
    uint8_t* slot;
    uint64_t *full, *empty;
    ChunkHeader* header;
    int32_t index;  // in the ring
  };

  __device__ SlotFeed(const DecodeParams& params, const WorkItem& item, const Place& place)
      : p_(params), cursor_(params, item), at_(place) {
    for (int32_t i = 0; i < at_.index && cursor_.has_more(); ++i) cursor_.next();
    take();
  }

  __device__ bool has_chunk() const { return has_chunk_; }

  __device__ void prefetch() const {
    if (!has_chunk_ || !is_page()) return;
    const CopyPieces pieces =
        chunk_pieces(layout(), page_bytes(), chunk_.tile, chunk_.tiles, at_.slot);
#pragma unroll
    for (int32_t i = 0; i < kCopyPieces; ++i) {
      prefetch_to_l2(pieces.piece[i].from, pieces.piece[i].bytes);
    }
  }

  // By the whole warp: starts the copy of the chunk if its slot is free, and goes on to the next
  // one. True if it did.
  __device__ bool issue_if_free() {
    const bool go = has_chunk_ && test_barrier(at_.empty, parity_ ^ 1);
    CopyPieces pieces{};
    if (go) {
      ChunkHeader header{chunk_.row, chunk_format(layout()), chunk_.tiles, chunk_.tokens};
      if (header.tokens > 0 && !is_page()) {
        p_.row_status[header.row] = static_cast<int32_t>(StatusCode::kCorrupt);
        header.tokens = 0;
      }
      *at_.header = header;
      if (header.tokens > 0) {
        pieces = chunk_pieces(layout(), page_bytes(), chunk_.tile, header.tiles, at_.slot);
      }
    }
    start_copies(go, at_.full, pieces);
    if (go) {
      parity_ ^= 1;
      for (int32_t i = 1; i < p_.slots && cursor_.has_more(); ++i) cursor_.next();
      take();
    }
    return go;
  }

 private:
  // The page id is used when the slot is free, when its load has long arrived.
  __device__ void take() {
    has_chunk_ = cursor_.has_more();
    if (!has_chunk_) return;
    chunk_ = cursor_.next();
    page_ = kNoPage;
    if (chunk_.tokens == 0) return;
    const SideView& side = p_.rows.tiers[chunk_.tier].side;
    page_ = side.slots[chunk_.table_row * side.row_stride + chunk_.page * side.direction];
  }

  __device__ bool is_page() const {
    return page_ >= 0 && page_ < p_.num_pages;
  }
  __device__ const PageLayout& layout() const {
    return p_.rows.tiers[chunk_.tier].layout;
  }
  __device__ const uint8_t* page_bytes() const {
    return p_.pool + page_ * p_.page_bytes;
  }

  const DecodeParams& p_;
  ChunkCursor cursor_;
  Place at_;
  Chunk chunk_{};
  int32_t page_ = kNoPage;
  bool has_chunk_ = false;
  uint32_t parity_ = 0;  // of the next phase of the full barrier
};

}  // namespace tierkv
