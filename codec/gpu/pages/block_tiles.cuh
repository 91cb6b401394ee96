// SPDX-License-Identifier: Apache-2.0
// encode_slots() of codec/format/block_cache.h for many tokens. Where 16 tokens that follow each
// other fill a tile, a warp makes the tile's words of one component as a whole; other tokens go one
// by one (block_cache.cuh).
//
// A CTA takes kWindowTokens tokens of one kv_head. It also takes the rest of a tile that begins
// among them and ends behind them.
//
// Bound: instructions (tile_codes.cuh).
#pragma once

#include "codec/gpu/pages/block_cache.cuh"
#include "codec/gpu/pages/tile_codes.cuh"

namespace tierkv {

inline constexpr int32_t kWindowTokens = 32;
inline constexpr int32_t kWindowTiles = kWindowTokens / kTileTokens;
static_assert(kWindowTiles == 2 && 2 * kWindowTiles == kBlockWarps);
// Slots that a CTA looks at: place i is the token begin - 15 + i. A tile that covers a token of the
// window begins and ends among them.
inline constexpr int32_t kPlacesBefore = kTileTokens - 1;
inline constexpr int32_t kPlaces = kWindowTokens + 2 * kPlacesBefore;
static_assert(kPlaces <= 64);

// Shared memory of a CTA: the slots of its places, a flag for each tile, and for each warp a
// channel table and a tile of rows.
struct WindowSlots {
  int64_t slots[64];
  int32_t failed[kWindowTiles];  // a token of the tile has no codes
  int32_t padding[2];
};
template <int32_t kDim>
inline constexpr int32_t kTilesSharedBytes =
    static_cast<int32_t>(sizeof(WindowSlots)) + kBlockWarps* kTileWarpBytes<kDim>;

// Rows are copied in pieces of 16 bytes.
inline bool has_aligned_rows(const SlotEncode& e) {
  for (const void* p : {e.k, e.v}) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  }
  for (const EngineStrides& s : {e.k_strides, e.v_strides}) {
    if (s.token % 8 != 0 || s.head % 8 != 0) return false;
  }
  return true;
}

// ---- which tokens fill tiles ----

// Bit i is place i.
struct WindowTiles {
  uint64_t first;    // the first token of a tile that is filled
  uint64_t covered;  // a token of such a tile
};
__device__ __forceinline__ uint64_t ballot_places(bool low, bool high) {
  const uint64_t upper = __ballot_sync(kFullWarp, high);
  return upper << 32 | __ballot_sync(kFullWarp, low);
}
__device__ __forceinline__ WindowTiles window_tiles(const int64_t* slots, int64_t end_slot) {
  const int32_t lane = lane_index();
  bool follows[2], begins[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t place = 32 * i + lane;
    const int64_t slot = slots[place];
    follows[i] = place + 1 < 64 && slots[(place + 1) % 64] == slot + 1;
    begins[i] = slot >= 0 && slot < end_slot && slot % kTileTokens == 0;
  }
  uint64_t run = ballot_places(follows[0], follows[1]);  // of 2, 3, 5, 9 and 16 places
  run &= run >> 1;
  run &= run >> 2;
  run &= run >> 4;
  run &= run >> 7;
  WindowTiles w;
  w.first = run & ballot_places(begins[0], begins[1]);
  w.covered = w.first | w.first << 1;
  w.covered |= w.covered << 2;
  w.covered |= w.covered << 4;
  w.covered |= w.covered << 8;
  return w;
}

// One component of the tokens token .. token + 15, which fill the tile of `slot`.
template <int32_t kDim>
__device__ __forceinline__ bool encode_filled_tile(const SlotEncode& e, int64_t token, int64_t slot,
                                                   int32_t kv_head, Component part,
                                                   uint8_t* shared) {
  const BlockCache& c = e.cache;
  const bool is_key = part == Component::kKey;
  const EngineStrides& strides = is_key ? e.k_strides : e.v_strides;
  const auto* from = static_cast<const uint16_t*>(is_key ? e.k : e.v);
  uint8_t* rows = shared + kTableBytes<kDim>;
  start_rows<kDim>(from + token * strides.token + kv_head * strides.head, strides.token, rows);
  auto* table = reinterpret_cast<ChannelPair*>(shared);
  const float* normal = is_key ? c.reflection_of(kv_head) : nullptr;
  fill_channel_table<kDim>(c.rotation, false, normal, 1.0f, table);
  const int64_t block = slot / c.layout.tokens;
  const int32_t tile = static_cast<int32_t>(slot - block * c.layout.tokens) / kTileTokens;
  uint8_t* page = c.page(block, kv_head);
  const TileTarget to = {page + c.layout.tile_codes_byte(part, tile),
                         page + c.layout.tile_metadata_byte(part, tile), c.rule[is_key ? 0 : 1],
                         !is_key, c.raw_dtype};
  wait_copies();
  __syncwarp();
  return encode_tile_of<kDim, ChannelVector::kNormal>(
      c.layout.tile(part).type, {rows, table, e.dtype, &c.rotation, 0xffff, normal != nullptr}, to);
}

// The tokens of `places`, as many as a warp takes at a time, in turn by the warps of the CTA.
template <int32_t kDim>
__device__ __forceinline__ void encode_places(const SlotEncode& e, uint64_t places, int64_t first,
                                              int32_t kv_head) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
#pragma unroll 1
  for (int32_t turn = 0; places != 0; ++turn) {
    int64_t token = -1;
#pragma unroll
    for (int32_t i = 0; i < kWarpTokens<kDim>; ++i) {
      const auto low = static_cast<uint32_t>(places), high = static_cast<uint32_t>(places >> 32);
      const int32_t place = low != 0 ? lowest_bit(low) : 32 + lowest_bit(high);
      if (places != 0 && i == token_of_lane<kDim>()) token = first + place;
      places &= places - 1;
    }
    if (turn % kBlockWarps == warp) encode_slot<kDim>(e, token, kv_head);
  }
}

// As many CTAs of an SM as the words and values of raw elements leave registers for.
template <int32_t kDim>
inline constexpr int32_t kTilesCtas = kDim == 256 ? 3 : 5;

// Grid: windows times kv_heads. Shared memory: kTilesSharedBytes.
template <int32_t kDim>
__global__ void __launch_bounds__(kBlockThreads, kTilesCtas<kDim>)
    encode_tiles_kernel(const __grid_constant__ SlotEncode e) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto* window = reinterpret_cast<WindowSlots*>(shared_bytes);
  const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / 32;
  const int32_t cta = static_cast<int32_t>(blockIdx.x), heads = e.cache.num_kv_heads;
  const int32_t kv_head = cta % heads;
  const int64_t begin = int64_t{cta / heads} * kWindowTokens, first = begin - kPlacesBefore;
  if (thread < 64) {
    const int64_t token = first + thread;
    const bool is_there = thread < kPlaces && token >= 0 && token < e.count;
    window->slots[thread] = is_there ? e.slots[token] : -2;
  }
  if (thread < kWindowTiles) window->failed[thread] = 0;
  __syncthreads();
  const WindowTiles tiles = window_tiles(window->slots, e.cache.num_blocks * e.cache.layout.tokens);
  const uint64_t all = (uint64_t{1} << kWindowTokens) - 1;
  uint64_t alone = all << kPlacesBefore & ~tiles.covered;
  // At most one tile begins among 16 tokens.
  int32_t place_of[kWindowTiles];
#pragma unroll
  for (int32_t i = 0; i < kWindowTiles; ++i) {
    const int32_t from = kPlacesBefore + i * kTileTokens;
    place_of[i] = from + lowest_bit(static_cast<uint32_t>(tiles.first >> from) & 0xffffu);
    if (place_of[i] < from) place_of[i] = -1;
  }
  const int32_t mine = warp < 2 ? place_of[0] : place_of[1];
  if (mine >= 0) {
    uint8_t* shared = shared_bytes + sizeof(WindowSlots) + warp * kTileWarpBytes<kDim>;
    const bool is_sound =
        encode_filled_tile<kDim>(e, first + mine, window->slots[mine], kv_head,
                                 warp % 2 == 0 ? Component::kKey : Component::kValue, shared);
    if (!is_sound && lane_index() == 0) window->failed[warp / 2] = 1;
  }
  __syncthreads();
#pragma unroll
  for (int32_t i = 0; i < kWindowTiles; ++i) {
    if (window->failed[i] != 0) alone |= uint64_t{0xffff} << place_of[i];
  }
  alone &= e.count - first >= 64 ? ~uint64_t{0} : (uint64_t{1} << (e.count - first)) - 1;
  if (alone != 0) encode_places<kDim>(e, alone, first, kv_head);
}

}  // namespace tierkv
