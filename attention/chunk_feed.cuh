// A warp's supply of chunks: it walks the chunks of the CTA's item that fall to this warp (every
// kDecodeWarps-th), looks up their pages and copies them into the warp's ring, `slots` chunks ahead
// of their use. No other warp is involved.
#pragma once

#include "attention/decode.h"
#include "attention/ptx.cuh"

namespace tierkv {

// What lies in a slot of the ring.
struct alignas(16) ChunkHeader {
  int32_t row;
  int32_t tier;
  int32_t tiles;   // copied
  int32_t tokens;  // 0: nothing to attend to
};

// The bytes of `tiles` tiles in a slot: the four segments, back to back.
struct ChunkSegments {
  int32_t k_bytes, k_metadata_bytes, v_bytes, v_metadata_bytes;

  __device__ ChunkSegments(const PageLayout& page, int32_t tiles)
      : k_bytes(tiles * page.k_tile.bytes()),
        k_metadata_bytes(tiles * tile_metadata_bytes(page.k_groups)),
        v_bytes(tiles * page.v_tile.bytes()),
        v_metadata_bytes(tiles * tile_metadata_bytes(page.v_groups)) {}
  __device__ int32_t total() const {
    return k_bytes + k_metadata_bytes + v_bytes + v_metadata_bytes;
  }
};

// The share of lane 0..3 of a chunk: one segment each. `to` is the slot.
__device__ __forceinline__ CopyPiece segment_of_lane(const PageLayout& page, const uint8_t* from,
                                                     uint8_t* to, int32_t tile, int32_t tiles) {
  const ChunkSegments s(page, tiles);
  const int32_t lane = threadIdx.x % 32;
  switch (lane) {
    case 0:
      return {to, from + page.tile_codes_byte(Component::kKey, tile),
              static_cast<uint32_t>(s.k_bytes)};
    case 1:
      return {to + s.k_bytes, from + page.tile_metadata_byte(Component::kKey, tile),
              static_cast<uint32_t>(s.k_metadata_bytes)};
    case 2:
      return {to + s.k_bytes + s.k_metadata_bytes,
              from + page.tile_codes_byte(Component::kValue, tile),
              static_cast<uint32_t>(s.v_bytes)};
    case 3:
      return {to + s.k_bytes + s.k_metadata_bytes + s.v_bytes,
              from + page.tile_metadata_byte(Component::kValue, tile),
              static_cast<uint32_t>(s.v_metadata_bytes)};
    default:
      return {to, from, 0};
  }
}

class ChunkFeed {
 public:
  // The chunks of `item` from its `first`-th on. Reads the tables.
  __device__ ChunkFeed(const DecodeParams& params, const WorkItem& item, int32_t first)
      : p_(params), row_(item.row), chunk_(item.chunk + first) {
    remaining_ = item.num_chunks > first ? ceil_div(item.num_chunks - first, kDecodeWarps) : 0;
    if (remaining_ == 0) return;
    enter_row();
    look_up();
  }

  __device__ int32_t remaining() const { return remaining_; }

  // The next chunk into `slot`, and on to the one after. remaining() is not 0.
  __device__ void issue(uint8_t* slot, uint64_t* barrier, ChunkHeader* header) {
    const TierSource& tier = p_.rows.tiers[place_.tier];
    const bool stray = page_ < 0 || page_ >= p_.num_pages;
    int32_t tokens = place_.tokens;
    if (tokens > 0 && stray) {
      p_.row_status[row_] = static_cast<int32_t>(StatusCode::kCorrupt);
      tokens = 0;
    }
    const int32_t tiles = ceil_div(tokens, kTileTokens);
    if (threadIdx.x % 32 == 0) *header = {row_, place_.tier, tiles, tokens};
    const uint8_t* page = p_.pool + (tokens > 0 ? page_ * p_.page_bytes : 0);
    start_copies(barrier, segment_of_lane(tier.layout, page, slot, place_.tile, tiles),
                 ChunkSegments(tier.layout, tiles).total());
    advance();
  }

  // Asks for the next chunk to be brought into L2, and moves on to the one after.
  __device__ void prefetch() {
    if (page_ >= 0 && page_ < p_.num_pages) {
      const PageLayout& layout = p_.rows.tiers[place_.tier].layout;
      const CopyPiece piece = segment_of_lane(layout, p_.pool + page_ * p_.page_bytes, nullptr,
                                              place_.tile, ceil_div(place_.tokens, kTileTokens));
      prefetch_to_l2(piece.from, piece.bytes);
    }
    advance();
  }

 private:
  __device__ void enter_row() {
    table_row_ = table_row_of(p_.rows, p_.layer, row_);
    tokens_ = row_tokens(p_.rows, table_row_);
    row_chunks_ = row_work(p_.rows, tokens_).chunks;
    while (chunk_ >= row_chunks_ && row_ + 1 < p_.rows.num_rows) {
      chunk_ -= row_chunks_;
      ++row_;
      table_row_ = table_row_of(p_.rows, p_.layer, row_);
      tokens_ = row_tokens(p_.rows, table_row_);
      row_chunks_ = row_work(p_.rows, tokens_).chunks;
    }
  }

  // The page id is used one chunk later, when its load has long arrived.
  __device__ void look_up() {
    place_ = chunk_place(p_.rows, tokens_, chunk_);
    page_ = kNoPage;
    if (place_.tokens == 0) return;
    const SideView& side = p_.rows.tiers[place_.tier].side;
    page_ = side.slots[table_row_ * side.row_stride + place_.page * side.direction];
  }

  __device__ void advance() {
    --remaining_;
    if (remaining_ == 0) return;
    chunk_ += kDecodeWarps;
    if (chunk_ >= row_chunks_) enter_row();
    look_up();
  }

  const DecodeParams& p_;
  int32_t row_, chunk_;  // of the next chunk
  int32_t remaining_;
  int64_t table_row_ = kPaddingRow;
  RowTokens tokens_;
  int32_t row_chunks_ = 0;
  ChunkPlace place_{};
  int32_t page_ = kNoPage;
};

}  // namespace tierkv
