// SPDX-License-Identifier: Apache-2.0
// The kernels of channel rows in device memory: the bytes of ChannelRows (channel_rows.h).
#pragma once

#include <cstdint>

#include "attention/channel/channel_kernel.cuh"
#include "attention/work/work.h"
#include "codec/gpu/channel_encode.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_reports.cuh"
#include "store/rows/channel/channel_rows.h"
#include "store/rows/device_row_format.h"
#include "store/rows/device_tokens.h"

namespace tierkv::store {

// A layer's pages as the kernels of attention/channel know a cache. A row is a kv_head of an entry
// of the call.
struct ChannelBodies {
  ChannelLayout layout{};
  const uint8_t* base = nullptr;
  int32_t num_pages = 0;
  int32_t num_kv_heads = 1;
  int32_t page_units = 0, block_units = 0;  // of ChannelBody::kBlockUnit; raw blocks too
  Divisor per_page;                         // blocks
  bool is_raw = false;
  int32_t sinks = 0;
  const int32_t* table = nullptr;  // of the layer's row of sequence 0
  int64_t table_stride = 0;        // from a sequence to the next
  int32_t table_slots = 0;
  const int32_t* slots = nullptr;  // [entries]
  const LayerTokens* at = nullptr;

  struct Row {
    const int32_t* line;
    int32_t kv_head;
  };
  TKV_HD Row row(int32_t index) const {
    const int32_t entry = index / num_kv_heads;
    return {table + slots[entry] * table_stride, index - entry * num_kv_heads};
  }
  // -1 where the table names no page of the pool.
  TKV_HD int32_t block_id(Row row, int32_t index) const {
    const auto number = static_cast<uint32_t>(index * num_kv_heads + row.kv_head);
    const uint32_t slot = per_page.quotient(number);
    if (slot >= static_cast<uint32_t>(table_slots)) return -1;
    const int32_t page = row.line[slot];
    if (page < 0 || page >= num_pages) return -1;
    return page * page_units + static_cast<int32_t>(number - slot * per_page.value()) * block_units;
  }
  TKV_HD const uint8_t* block(int32_t id) const {
    return base + static_cast<int64_t>(id) * ChannelBody::kBlockUnit;
  }
  TKV_HD const uint8_t* raw_tile(Row row, Component c, int32_t tile) const {
    const int32_t tiles = layout.tiles(), id = block_id(row, tile / tiles);
    if (id < 0) return nullptr;
    const int32_t of_block = static_cast<int32_t>(c) * tiles + tile % tiles;
    return block(id) + of_block * TileLayout{kRawCodes, layout.head_dim()}.bytes();
  }
};

__device__ inline ChannelItem item_of(const ChannelLaunch<ChannelBodies>& p, int32_t index) {
  ChannelItem item;
  item.row = index / p.splits;
  const int32_t body_end = p.cache.at[item.row / p.cache.num_kv_heads].body_end;
  const int32_t blocks = body_end / p.cache.layout.tokens;
  item.raw_tokens = p.cache.is_raw ? body_end : 0;
  const int32_t units = p.cache.is_raw ? blocks * p.cache.layout.tiles() : blocks;
  const int32_t split = index - item.row * p.splits;
  item.first = channel_unit(units, p.splits, split);
  item.end = channel_unit(units, p.splits, split + 1);
  item.part = p.splits == 1 ? -1 : index;
  return item;
}

}  // namespace tierkv::store

namespace tierkv {

template <>
struct ChannelTraits<store::ChannelBodies> {
  TKV_HD static constexpr int32_t skipped(const store::ChannelBodies& cache) { return cache.sinks; }
};

}  // namespace tierkv

namespace tierkv::store {

// is_raw: of the layer.
inline ChannelBodies bodies_of(const DeviceStoreView& view, const ChannelBody& body, bool is_raw,
                               const DeviceAttendBody& call) {
  const PageAllocator& pages = view.pages.allocator;
  const PageTableShape& table = pages.shape.table;
  ChannelBodies b;
  b.layout = body.layout;
  b.base = view.pages.base;
  b.num_pages = pages.shape.num_pages;
  b.num_kv_heads = view.num_kv_heads;
  b.page_units = static_cast<int32_t>(body.page_bytes / ChannelBody::kBlockUnit);
  b.block_units = body.block_bytes(is_raw) / ChannelBody::kBlockUnit;
  b.per_page = Divisor(body.per_page(is_raw));
  b.is_raw = is_raw;
  b.sinks = view.laws.sink_tokens;
  b.table = pages.slots + int64_t{view.pages.row(0, call.layer, 0)} * table.row_stride();
  b.table_stride = int64_t{table.rows_per_sequence} * table.row_stride();
  b.table_slots = table.table_slots[0];
  b.slots = call.slots;
  b.at = call.at;
  return b;
}

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
