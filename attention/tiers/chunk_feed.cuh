// SPDX-License-Identifier: Apache-2.0
// A warp's supply of chunks: it walks the tiles of the warp's item, looks up their pages and copies
// them into the warp's ring, so many chunks ahead of their use as the ring has slots. No other warp
// is involved.
#pragma once

#include "attention/tiers/decode.h"
#include "gpu/copies.cuh"
#include "gpu/lanes.cuh"

namespace tierkv {

// What lies in a slot of the ring.
struct alignas(16) ChunkHeader {
  int32_t row;
  int32_t format;  // pair_format(); nothing where there are no tokens
  int32_t tiles;   // of the item that this chunk stands for: those copied, or 1 of an empty row
  int32_t tokens;  // 0: nothing to attend to
};
static_assert(sizeof(ChunkHeader) == kChunkHeaderBytes, "one 16-byte access per header");

// Where a chunk is among the newest tokens of its row that not every query sees, counted from its
// first token; kept where there may be several queries.
struct alignas(16) ChunkPlace {
  TailOrder tail;
};
static_assert(sizeof(ChunkPlace) == kChunkHeaderBytes, "one 16-byte access per place");

// A chunk and where its bytes are.
struct Chunk {
  ChunkHeader header;
  int32_t tier;  // of the launch's
  int32_t page;  // id
  int32_t tile;  // first tile in the page
  bool is_page;  // all tiles of a page
};

// By a whole warp; all lanes hold the same state but for page ids.
template <int32_t kClasses>
class ChunkFeed {
 public:
  __device__ __forceinline__ ChunkFeed(const DecodeParamsOf<kClasses>& params, const WorkItem& item)
      : p_(params), left_(item.tiles), row_(item.row) {
    if (left_ == 0) return;
    table_row_ = table_row_of(p_.rows, p_.layer, row_);
    first_tier_ = first_tier_of(p_.rows, row_);
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) tokens_[t] = item.tier[t];
    int32_t tile = item.tile;
    int32_t tier = 0;
#pragma unroll
    for (int32_t t = 0; t + 1 < kAttentionTiers; ++t) {
      if (tier != t || tile < tile_count(tokens_[t])) continue;
      tile -= tile_count(tokens_[t]);
      ++tier;
    }
    enter_tier(tier, tile);
  }

  __device__ __forceinline__ bool has_more() const {
    return left_ > 0;
  }

  // Tiles of a chunk in the tier that the feed is in.
  __device__ __forceinline__ int32_t chunk_tiles() const {
    return chunk_tiles_;
  }

  // Whether the next chunk was complete before the kernel before this one began.
  __device__ __forceinline__ bool is_settled() const {
    if (tier_ == kAttentionTiers) return true;  // nothing is copied
    const Settled settled = p_.settled[tier_];
    const int32_t rest_of_page = (page_tiles_ - page_tile_) * kTileTokens;
    return settled == Settled::kAll ||
           (settled == Settled::kAllButLastPage && tier_tokens_ > rest_of_page);
  }

  // Most chunks are full pages with more of their tier behind them, and no token that is not seen
  // by all queries. For these next_page() does what
  // next() does, in less time.
  __device__ __forceinline__ bool is_at_page() const {
    return page_tile_ == 0 && left_ > page_tiles_ && tier_tokens_ > fast_above_;
  }
  struct Page {
    ChunkHeader header;
    int32_t page;   // id
    int32_t bytes;  // of its segments
  };
  __device__ __forceinline__ Page next_page() {
    const int32_t tokens = page_tiles_ * kTileTokens;
    const Page page{{row_, format_, page_tiles_, tokens},
                    __shfl_sync(kFullWarp, ids_, page_ & 31),
                    page_bytes_};
    left_ -= page_tiles_;
    tier_tokens_ -= tokens;
    turn_page();
    return page;
  }

  // The place of the next chunk.
  __device__ __forceinline__ ChunkPlace place() const {
    ChunkPlace place{};
    if (tier_ == p_.tail.tier && !is_at_page()) {
      place.tail = tail_order((page_ * page_tiles_ + page_tile_) * kTileTokens);
    }
    return place;
  }

  // has_more() before.
  __device__ __forceinline__ Chunk next() {
    Chunk chunk{{row_, 0, 1, 0}, 0, kNoPage, 0, false};
    if (tier_ < kAttentionTiers) {
      const int32_t tiles = smaller(smaller(chunk_tiles_, page_tiles_ - page_tile_),
                                    smaller(tile_count(tier_tokens_), left_));
      chunk.header = {row_, format_, tiles, smaller(tiles * kTileTokens, tier_tokens_)};
      chunk.tier = first_tier_ + tier_;
      chunk.page = __shfl_sync(kFullWarp, ids_, page_ & 31);
      chunk.tile = page_tile_;
      chunk.is_page = tiles == page_tiles_;
    }
    pass(chunk.header.tiles);
    return chunk;
  }

 private:
  __device__ __forceinline__ static int32_t lane() {
    return threadIdx.x % 32;
  }

  __device__ __forceinline__ void turn_page() {
    if ((++page_ & 31) != 0) return;
    ids_ = next_ids_;
    next_ids_ = read_ids(page_ + 32);
  }

  // Counted from token `here` of the tier, the next tile's first.
  __device__ __forceinline__ TailOrder tail_order(int32_t here) const {
    const TailSource& tail = p_.tail;
    const int32_t entry = batch_row_of(p_.rows, row_) / p_.rows.num_kv_heads;
    const int32_t tokens = here + tier_tokens_;
    const bool is_ring = tail.ring_tokens > 0 && tokens >= tail.ring_first + tail.ring_tokens;
    TailOrder order;
    order.newest = (tail.newest == nullptr ? tokens - 1 : tail.newest[entry]) - here;
    order.sinks = (is_ring ? tail.ring_first : 0) - here;
    order.ring = is_ring ? tail.ring_tokens : 0;
    return order;
  }

  // Over the tiles of a chunk, to where the next one begins.
  __device__ __forceinline__ void pass(int32_t tiles) {
    left_ -= tiles;
    tier_tokens_ -= tiles * kTileTokens;
    page_tile_ += tiles;
    if (page_tile_ == page_tiles_) {
      page_tile_ = 0;
      turn_page();
    }
    if (left_ == 0 || tier_tokens_ > 0) return;
    int32_t tier = tier_ + 1;
    bool row_has_more = false;
#pragma unroll
    for (int32_t t = 0; t < kAttentionTiers; ++t) row_has_more |= t >= tier && tokens_[t] > 0;
    if (!row_has_more) {
      // Counts that have changed since the plan was made may lead behind the last row: nothing is
      // there.
      const bool is_row = row_ + 1 < p_.rows.num_rows;
      if (is_row) ++row_;
      table_row_ = is_row ? table_row_of(p_.rows, p_.layer, row_) : kPaddingRow;
      first_tier_ = first_tier_of(p_.rows, row_);
      const RowTokens n = row_tokens(p_.rows, table_row_, first_tier_);
#pragma unroll
      for (int32_t t = 0; t < kAttentionTiers; ++t) tokens_[t] = n.tier[t];
      tier = 0;
    }
    enter_tier(tier, 0);
  }

  // The first tier from `tier` on that has tokens, at its tile `tile`; kAttentionTiers where there
  // is none.
  __device__ __forceinline__ void enter_tier(int32_t tier, int32_t tile) {
    tier_ = kAttentionTiers;
    tier_tokens_ = 0;
#pragma unroll
    for (int32_t t = kAttentionTiers - 1; t >= 0; --t) {
      if (t < tier || tokens_[t] == 0) continue;
      tier_ = t;
      tier_tokens_ = tokens_[t];
    }
    page_tile_ = 0;
    page_tiles_ = -1;  // which no page tile is
    if (tier_ == kAttentionTiers) return;
    const TierSource& at = p_.rows.tiers[first_tier_ + tier_];
    format_ = at.format;
    page_tiles_ = at.page_tiles;
    page_bytes_ = at.page_bytes;
    chunk_tiles_ = at.chunk_tiles;
    tier_tokens_ -= tile * kTileTokens;
    fast_above_ = page_tiles_ * kTileTokens;
    if (chunk_tiles_ != page_tiles_) {
      fast_above_ = kMaxTierTokens;
    } else if (tier_ == p_.tail.tier) {
      fast_above_ = p_.tail.newest == nullptr ? fast_above_ + p_.columns.q_len - 1 : kMaxTierTokens;
    }
    page_ = tile / page_tiles_;
    page_tile_ = tile - page_ * page_tiles_;
    ids_ = read_ids(page_ & ~31);
    next_ids_ = read_ids((page_ & ~31) + 32);
  }

  __device__ __forceinline__ int32_t read_ids(int32_t first) const {
    const TierSource& tier = p_.rows.tiers[first_tier_ + tier_];
    const int32_t page = first + lane();
    if (page >= tier.max_pages) return kNoPage;
    return tier.slots[table_row_ * p_.rows.row_stride + page * tier.direction];
  }

  const DecodeParamsOf<kClasses>& p_;
  int32_t left_;  // tiles of the item
  int32_t row_;
  int64_t table_row_ = kPaddingRow;
  int32_t first_tier_ = 0;  // of the row's class, in the launch's
  int32_t tokens_[kAttentionTiers] = {0, 0, 0};
  int32_t tier_ = kAttentionTiers;  // kAttentionTiers: the row has no tokens
  int32_t format_ = 0, page_tiles_ = 1, chunk_tiles_ = 1, page_bytes_ = 0;
  int32_t tier_tokens_ = 0;           // from the next tile on
  int32_t fast_above_ = 0;            // of them, so many that is_at_page() is possible
  int32_t page_ = 0, page_tile_ = 0;  // of the next tile
  int32_t ids_ = 0, next_ids_ = 0;    // of page (page_ & ~31) + lane, and 32 further
};

// A chunk ready to be copied.
struct ReadyChunk {
  ChunkHeader header;
  CopyPieces pieces;
  bool is_stray;  // its page is outside the pool
};

// The chunk's four segments go to the slot back to back. A whole page is one piece, because its
// segments lie like that already.
template <int32_t kClasses>
__device__ __forceinline__ ReadyChunk prepare_chunk(const DecodeParamsOf<kClasses>& p,
                                                    const Chunk& chunk, uint8_t* slot) {
  ReadyChunk ready;
  ready.header = chunk.header;
  ready.is_stray = false;
  ready.pieces.count = 0;
  ready.pieces.total = 0;
  if (chunk.header.tokens == 0) return ready;
  if (chunk.page < 0 || chunk.page >= p.num_pages) {
    ready.is_stray = true;
    ready.header.tokens = 0;
    return ready;
  }
  const TierSource& tier = p.rows.tiers[chunk.tier];
  const uint8_t* page = p.pool + chunk.page * p.page_bytes;
  if (chunk.is_page) {
    ready.pieces.count = 1;
    ready.pieces.total = tier.page_bytes;
    ready.pieces.piece[0] = {slot, page, ready.pieces.total};
    return ready;
  }
  ready.pieces.count = kCopyPieces;
#pragma unroll
  for (int32_t i = 0; i < kCopyPieces; ++i) {
    const int32_t tile_bytes = tier.segment_tile[i], bytes = chunk.header.tiles * tile_bytes;
    ready.pieces.piece[i] = {slot, page + tier.segment[i] + chunk.tile * tile_bytes,
                             static_cast<uint32_t>(bytes)};
    ready.pieces.total += bytes;
    slot += bytes;
  }
  return ready;
}

template <int32_t kClasses>
__device__ __forceinline__ void announce_chunk(const DecodeParamsOf<kClasses>& p,
                                               const ChunkHeader& chunk, bool is_stray,
                                               ChunkHeader* header) {
  if (!is_first_lane()) return;
  *header = chunk;
  if (is_stray) {
    p.row_status[batch_row_of(p.rows, chunk.row)] = static_cast<int32_t>(StatusCode::kCorrupt);
  }
}

// The order in which the slots of a ring are filled and attended to.
class RingOrder {
 public:
  __device__ __forceinline__ explicit RingOrder(int32_t slots) : slots_(slots) {}

  // The slot and the barrier's phase of the chunk to attend to next, if one is pending.
  __device__ __forceinline__ int32_t slot() const { return slot_; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }
  // Chunks that were started and not passed.
  __device__ __forceinline__ int32_t pending() const { return pending_; }
  // Whether there is room for a copy, though all pending ones may be on their way.
  __device__ __forceinline__ bool may_start() const {
    return pending_ < smaller(slots_, kChunksInFlight);
  }
  // A chunk is started: its slot.
  __device__ __forceinline__ int32_t start() {
    const int32_t slot = slot_ + pending_++;
    return slot < slots_ ? slot : slot - slots_;
  }
  // The chunk of slot() was attended to.
  __device__ __forceinline__ void pass() {
    --pending_;
    if (++slot_ < slots_) return;
    slot_ = 0;
    parity_ ^= 1;
  }

 private:
  int32_t slots_;
  int32_t slot_ = 0, pending_ = 0;
  uint32_t parity_ = 0;
};

// What start_chunk() fills.
struct RingSlot {
  uint8_t* bytes;
  uint64_t* full;  // ends its phase when the chunk has arrived
  ChunkHeader* header;
  ChunkPlace* place;  // null: not kept
};

// By the whole warp: the feed's next chunk into a slot. A page outside the pool is left out and
// reported. True where the chunk is a full page with more of its tier behind it: those of a tier
// have one header, which is not written where the slot has it already.
template <int32_t kClasses>
__device__ __forceinline__ bool start_chunk(const DecodeParamsOf<kClasses>& p,
                                            ChunkFeed<kClasses>& feed, const RingSlot& slot,
                                            bool has_header) {
  if (slot.place != nullptr) {
    const ChunkPlace place = feed.place();
    if (is_first_lane()) *slot.place = place;
  }
  if (feed.is_at_page()) {
    typename ChunkFeed<kClasses>::Page page = feed.next_page();
    if (page.page >= 0 && page.page < p.num_pages) {
      if (!has_header && is_first_lane()) *slot.header = page.header;
      copy_page(slot.full,
                {slot.bytes, p.pool + page.page * p.page_bytes, static_cast<uint32_t>(page.bytes)});
      return true;
    }
    page.header.tokens = 0;
    announce_chunk(p, page.header, true, slot.header);
    copy_pieces(slot.full, {});
    return false;
  }
  const ReadyChunk chunk = prepare_chunk(p, feed.next(), slot.bytes);
  announce_chunk(p, chunk.header, chunk.is_stray, slot.header);
  copy_pieces(slot.full, chunk.pieces);
  return false;
}

}  // namespace tierkv
