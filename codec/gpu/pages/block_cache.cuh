// SPDX-License-Identifier: Apache-2.0
// encode_slots() of codec/format/block_cache.h token by token: a warp takes one token of one
// kv_head, so that a token is written alone, in the whole bytes that it owns, whatever the other
// tokens of its tile do. Prompts go by tiles (block_tiles.cuh).
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
  if (errors != nullptr && lane_index() == 0) atomicAdd(errors + static_cast<int32_t>(error), 1);
}

// The token of one kv_head that a warp works on.
struct WarpToken {
  int64_t token;
  int32_t kv_head;
};

// ---- encode ----

// Which slots of the tile that begins at `first` the call names: bit i is slot first + i. Tokens
// that follow each other are seen at once; the others are searched for.
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
__device__ __forceinline__ void open_tile(const PageRef& page, int32_t slot, uint32_t named) {
  if (named == 1) return open_token_slot(page, slot);
  const LaneSide nothing = {};
#pragma unroll 1
  for (int32_t i = 0; i < kTileTokens; ++i) {
    if ((named >> i & 1u) != 0) continue;
    store_whole_side(page, slot + i, Component::kKey, nothing);
    store_whole_side(page, slot + i, Component::kValue, nothing);
  }
}

__device__ __forceinline__ void encode_slot(const SlotEncode& e, const WarpToken& at) {
  const BlockCache& c = e.cache;
  const int64_t slot = e.slots[at.token];
  const bool is_stray = slot < -1 || slot >= c.num_blocks * c.layout.tokens;
  if (is_stray && at.kv_head == 0) count_error(e.errors, EngineError::kStraySlots);
  if (is_stray || slot < 0) return;
  const int32_t head_dim = c.layout.head_dim();
  const int64_t block = slot / c.layout.tokens;
  const auto in_page = static_cast<int32_t>(slot - block * c.layout.tokens);
  const PageRef page{c.page(block, at.kv_head), &c.layout, c.raw_dtype};
  LaneValues k, v;
  const int64_t k_first = at.token * e.k_strides.token + at.kv_head * e.k_strides.head;
  const int64_t v_first = at.token * e.v_strides.token + at.kv_head * e.v_strides.head;
  load_lane_values(static_cast<const uint16_t*>(e.k) + k_first, e.dtype, head_dim, k);
  load_lane_values(static_cast<const uint16_t*>(e.v) + v_first, e.dtype, head_dim, v);
  const float* reflection = c.reflection_of(at.kv_head);
  LaneValues normal;
  load_normal(reflection, head_dim, normal);
  rotate(c.rotation, head_dim, k);
  rotate(c.rotation, head_dim, v);
  if (reflection != nullptr) reflect(normal, head_dim, k);
  LaneSide k_side = {}, v_side = {};
  const StatusCode code =
      worst_of_warp(greater(encode_side(page, Component::kKey, c.rule[0], k, &k_side),
                            encode_side(page, Component::kValue, c.rule[1], v, &v_side)));
  if (in_page % kTileTokens == 0) open_tile(page, in_page, named_slots(e, at.token, slot));
  if (code != StatusCode::kOk) {
    count_error(e.errors, code == StatusCode::kNonFinite ? EngineError::kNonFiniteTokens
                                                         : EngineError::kOutOfRangeTokens);
    k_side = v_side = {};
  }
  store_whole_side(page, in_page, Component::kKey, k_side);
  store_whole_side(page, in_page, Component::kValue, v_side);
}

__global__ void __launch_bounds__(kBlockThreads)
    encode_slots_kernel(const __grid_constant__ SlotEncode e) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / 32;
  const WarpToken at = {i / e.cache.num_kv_heads, static_cast<int32_t>(i % e.cache.num_kv_heads)};
  if (at.token < e.count) encode_slot(e, at);
}

}  // namespace tierkv
