// SPDX-License-Identifier: Apache-2.0
// encode_slots() of codec/format/block_cache.h token by token, each of one kv_head: a token is
// written alone, in the whole bytes that it owns, whatever the other tokens of its tile do. Prompts
// go by tiles (block_tiles.cuh).
//
// Bound: latency.
#pragma once

#include "codec/format/block_cache.h"
#include "codec/gpu/pages/lane_encode.cuh"
#include "codec/gpu/pages/lane_rotation.cuh"

namespace tierkv {

inline constexpr int32_t kBlockThreads = 128;
inline constexpr int32_t kBlockWarps = kBlockThreads / 32;

__device__ __forceinline__ void count_error(int32_t* errors, EngineError error) {
  if (errors != nullptr) atomicAdd(errors + static_cast<int32_t>(error), 1);
}

// ---- encode ----

// Which slots of the tile that begins at `first` the call names: bit i is slot first + i. Tokens
// that follow each other are seen at once; the others are searched for. By a warp.
__device__ __forceinline__ uint32_t named_slots(const SlotEncode& e, int64_t token, int64_t first) {
  const int32_t lane = lane_index();
  const int64_t next = token + lane;
  const bool follows = lane < kTileTokens && next < e.count && e.slots[next] == first + lane;
  uint32_t named = __ballot_sync(kFullWarp, follows);
  if (named == 0xffffu) return named;
  uint32_t mine = 0;
#pragma unroll 8
  for (int64_t i = lane; i < e.count; i += 32) {
    const int64_t place = e.slots[i] - first;
    if (place >= 0 && place < kTileTokens) mine |= 1u << place;
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < 32; lanes *= 2) mine |= __shfl_xor_sync(kFullWarp, mine, lanes);
  return mine;
}

// Clears what the call does not write of a tile: other warps may be writing the rest.
template <int32_t kDim>
__device__ __forceinline__ void open_tile(const PageRef& page, int32_t slot, uint32_t named) {
  if (named == 1) return clear_tile<kDim>(page, slot / kTileTokens);
#pragma unroll 1
  for (int32_t i = 0; i < kTileTokens; ++i) {
    if ((named >> i & 1u) == 0) clear_slot<kDim>(page, slot + i);
  }
}

// Opens the tiles whose first slots the tokens of the warp have, one token after the other.
template <int32_t kDim>
__device__ __forceinline__ void open_tiles(const SlotEncode& e, const PageRef& page, int32_t slot,
                                           int64_t token, bool is_first) {
  uint32_t first = __ballot_sync(kFullWarp, is_first);
#pragma unroll 1
  while (first != 0) {
    const int32_t lane = lowest_bit(first), of_warp = lane / kTokenLanes<kDim>;
    const int64_t at = __shfl_sync(kFullWarp, token, lane);
    const uint32_t named = named_slots(e, at, e.slots[at]);
    if (token_of_lane<kDim>() == of_warp) open_tile<kDim>(page, slot, named);
    first &= ~lanes_of_token<kDim>(of_warp);
  }
  __syncwarp();
}

// A token of the call; -1: none.
template <int32_t kDim>
__device__ __forceinline__ void encode_slot(const SlotEncode& e, int64_t token, int32_t kv_head) {
  const BlockCache& c = e.cache;
  const bool counts = lane_of_token<kDim>() == 0;
  const int64_t slot = token >= 0 ? e.slots[token] : -1;
  const bool is_stray = slot < -1 || slot >= c.num_blocks * c.layout.tokens;
  if (is_stray && kv_head == 0 && counts) count_error(e.errors, EngineError::kStraySlots);
  const bool is_there = slot >= 0 && !is_stray;
  const int64_t block = is_there ? slot / c.layout.tokens : 0;
  const auto in_page = is_there ? static_cast<int32_t>(slot - block * c.layout.tokens) : 0;
  const PageRef page{c.page(block, kv_head), &c.layout, c.raw_dtype};
  LaneValues k, v, normal;
  const int64_t k_first = token * e.k_strides.token + kv_head * e.k_strides.head;
  const int64_t v_first = token * e.v_strides.token + kv_head * e.v_strides.head;
  load_lane_values<kDim>(static_cast<const uint16_t*>(e.k) + k_first, e.dtype, is_there, k);
  load_lane_values<kDim>(static_cast<const uint16_t*>(e.v) + v_first, e.dtype, is_there, v);
  load_lane_floats<kDim>(c.reflection_of(kv_head), normal);
  rotate<kDim>(c.rotation, k);
  rotate<kDim>(c.rotation, v);
  if (c.reflection_of(0) != nullptr) reflect<kDim>(normal, k);
  const LaneFormat k_format = {c.layout.tile(Component::kKey).type, c.rule[0], c.raw_dtype};
  const LaneFormat v_format = {c.layout.tile(Component::kValue).type, c.rule[1], c.raw_dtype};
  LaneCodes k_codes, v_codes;
  const StatusCode k_status = encode_lane<kDim>(k_format, k, &k_codes);
  const StatusCode status = greater(k_status, encode_lane<kDim>(v_format, v, &v_codes));
  open_tiles<kDim>(e, page, in_page, token, is_there && in_page % kTileTokens == 0);
  if (!is_there) return;
  if (status != StatusCode::kOk) {
    if (counts) {
      count_error(e.errors, status == StatusCode::kNonFinite ? EngineError::kNonFiniteTokens
                                                             : EngineError::kOutOfRangeTokens);
    }
    k_codes = v_codes = {};
  }
  store_lane_codes<kDim>(page, in_page, Component::kKey, k_codes);
  store_lane_codes<kDim>(page, in_page, Component::kValue, v_codes);
}

// Grid of warps: kv_heads of every token.
template <int32_t kDim>
__global__ void __launch_bounds__(kBlockThreads)
    encode_slots_kernel(const __grid_constant__ SlotEncode e) {
  const int64_t i = int64_t{warp_of_grid()} * kWarpTokens<kDim> + token_of_lane<kDim>();
  const int64_t token = i / e.cache.num_kv_heads;
  const auto kv_head = static_cast<int32_t>(i - token * e.cache.num_kv_heads);
  encode_slot<kDim>(e, token < e.count ? token : -1, kv_head);
}

}  // namespace tierkv
