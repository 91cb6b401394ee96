// SPDX-License-Identifier: Apache-2.0
// The kernels of channel rows in device memory: the bytes of ChannelRows (channel_rows.h).
#pragma once

#include <cstdint>

#include "codec/gpu/channel_encode.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_reports.cuh"
#include "store/rows/channel/channel_body.h"
#include "store/rows/device_tokens.h"

namespace tierkv::store {

struct ChannelCall {
  DeviceStoreView view;
  ChannelBody body;
  const uint8_t* is_raw_layer = nullptr;  // device [num_layers]
  DeviceWorks works;
  int32_t num_entries = 0;
  int32_t most_blocks = 0;  // that leave of a row
  DeviceRowCounts counts;
};

struct ChannelEntry {
  DeviceEntry at;
  bool is_raw;
  Positions blocks;  // that come, or that are cut where the end is less
};
__device__ __forceinline__ ChannelEntry channel_entry(const ChannelCall& c, int32_t entry) {
  ChannelEntry e;
  e.at = c.works.entry(entry);
  e.is_raw = c.is_raw_layer[e.at.layer] != 0;
  e.blocks = {c.body.blocks_of(c.works.from[entry].body_end),
              c.body.blocks_of(c.works.to[entry].body_end)};
  return e;
}
__device__ __forceinline__ uint8_t* channel_block(const DeviceStoreView& view,
                                                  const ChannelBody& body, const ChannelEntry& e,
                                                  int32_t kv_head, int32_t block) {
  const ChannelBody::BlockPlace at = body.place_of(e.is_raw, kv_head, block);
  const int32_t page =
      page_at(view.pages.allocator, view.pages.row(e.at.slot, e.at.layer, 0), 0, at.page);
  return view.pages.base + page * view.pages.page_bytes + at.byte;
}

// What the table rows hold afterwards; a thread an entry.
__global__ void __launch_bounds__(kChannelThreads)
    count_channel_kernel(const __grid_constant__ ChannelCall c) {
  wait_for_previous_kernel();
  const auto entry = static_cast<int32_t>(blockIdx.x * kChannelThreads + threadIdx.x);
  if (entry >= c.num_entries) return;
  const ChannelEntry e = channel_entry(c, entry);
  if (e.blocks.count() == 0) return;
  c.counts.target[c.view.counts_row(e.at)] = {{c.body.units_of(e.is_raw, e.blocks.end)}};
}

// fp16 of a place of a block, whose first position is given. Places of sinks hold the first body
// token; what is not finite is 0.
struct BlockTokens {
  RawTokens tokens;
  int32_t first, sinks;

  __device__ __forceinline__ uint16_t half_at(Component c, int32_t place, int32_t dim) const {
    const uint16_t x = tokens.half_at(c, most(first + place, sinks), dim);
    return is_finite_half(x) ? x : uint16_t{0};
  }
  // As a source of codec/gpu/channel_encode.cuh.
  template <int32_t kHeadDim>
  __device__ __forceinline__ bool stage(const ChannelLayout& l, Component c,
                                        ChannelShared<kHeadDim>& s) const {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < l.tokens * kHeadDim;
         i += kChannelThreads) {
      const int32_t place = i / kHeadDim, dim = i % kHeadDim;
      s.x[place * ChannelShared<kHeadDim>::kLine + dim] = half_at(c, place, dim);
    }
    return true;
  }
};

__device__ __forceinline__ void write_raw_block(const ChannelBody& body, const BlockTokens& from,
                                                uint8_t* block) {
  const int32_t dims = body.layout.head_dim(), values = body.layout.tokens * dims;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < 2 * values; i += kChannelThreads) {
    const auto c = static_cast<Component>(i / values);
    const int32_t place = i % values / dims, dim = i % dims;
    *reinterpret_cast<uint16_t*>(block + body.raw_byte(c, place, dim)) =
        from.half_at(c, place, dim);
  }
}

// By a CTA: block `index` of those that come of a row of an entry, most_blocks at most.
template <int32_t kHeadDim>
__device__ __forceinline__ void write_channel_block(const ChannelCall& c, int32_t index,
                                                    ChannelShared<kHeadDim>& shared) {
  const int32_t row = index / c.most_blocks, entry = row / c.view.num_kv_heads;
  const int32_t kv_head = row - entry * c.view.num_kv_heads;
  const ChannelEntry e = channel_entry(c, entry);
  const int32_t block = e.blocks.first + index - row * c.most_blocks;
  if (block >= e.blocks.end) return;
  const BlockTokens from = {device_tokens(c.view, c.works, entry, kv_head),
                            block * c.body.layout.tokens, c.view.laws.sink_tokens};
  uint8_t* to = channel_block(c.view, c.body, e, kv_head, block);
  if (e.is_raw) {
    write_raw_block(c.body, from, to);
  } else {
    (void)encode_channels(c.body.layout, from, to, shared);
  }
}

// CTAs take the blocks of a call in turn: in most steps nothing leaves of most rows. Dynamic shared
// memory: a ChannelShared.
template <int32_t kHeadDim>
__global__ void __launch_bounds__(kChannelThreads)
    write_channel_kernel(const __grid_constant__ ChannelCall c) {
  extern __shared__ __align__(16) uint8_t block_shared_bytes[];
  wait_for_previous_kernel();
  auto& shared = *reinterpret_cast<ChannelShared<kHeadDim>*>(block_shared_bytes);
  commit(c.works);
  if (!c.works.has_pages()) return;
  const int32_t blocks = c.num_entries * c.view.num_kv_heads * c.most_blocks;
  for (auto i = static_cast<int32_t>(blockIdx.x); i < blocks;
       i += static_cast<int32_t>(gridDim.x)) {
    write_channel_block(c, i, shared);
  }
}

// ---- read ----

// Body positions of one (sequence, layer): to arrays, or back to the ring.
struct ChannelRead : DeviceRead {  // k null: to the ring
  DeviceStoreView view;
  ChannelBody body;
  bool is_raw = false;
};

__device__ __forceinline__ float block_value(const ChannelRead& r, const uint8_t* block,
                                             Component c, int32_t place, int32_t dim) {
  if (!r.is_raw) return channel_value(r.body.layout, block, c, place, dim);
  return half_to_float(*reinterpret_cast<const uint16_t*>(block + r.body.raw_byte(c, place, dim)));
}

// A thread an element of keys and values.
__global__ void __launch_bounds__(kChannelThreads)
    read_channel_kernel(const __grid_constant__ ChannelRead r) {
  wait_for_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kChannelThreads + threadIdx.x;
  const int32_t dims = r.view.head_dim, heads = r.view.num_kv_heads;
  const auto position = static_cast<int32_t>(r.range.first + i / (heads * dims));
  if (position >= r.range.end) return;
  const auto kv_head = static_cast<int32_t>(i / dims % heads), dim = static_cast<int32_t>(i % dims);
  const ChannelEntry e = {{0, r.slot, r.layer}, r.is_raw, {}};
  const int32_t tokens = r.body.layout.tokens;
  const uint8_t* block = channel_block(r.view, r.body, e, kv_head, position / tokens);
  uint8_t* raw = r.view.raw_row(r.slot, r.layer, kv_head);
  for (const Component c : {Component::kKey, Component::kValue}) {
    const float x = block_value(r, block, c, position % tokens, dim);
    if (r.k != nullptr) {
      store_element(r.of(c), r.dtype, i, x);
      continue;
    }
    reinterpret_cast<uint16_t*>(raw + r.view.raw.token_byte(c, position))[dim] =
        float_to_half(saturate_to_half_range(x));
  }
  if (r.k == nullptr && dim == 0) {
    *reinterpret_cast<RawScore*>(raw + r.view.raw.score_byte(position)) = {};
  }
}

}  // namespace tierkv::store
