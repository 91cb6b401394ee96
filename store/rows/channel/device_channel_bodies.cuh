// SPDX-License-Identifier: Apache-2.0
// A layer's pages as the kernels of attention/channel know a cache.
#pragma once

#include "attention/channel/channel_kernel.cuh"
#include "attention/work/work.h"
#include "store/rows/channel/channel_body.h"
#include "store/rows/device_row_format.h"

namespace tierkv::store {

// A row is a kv_head of an entry of the call.
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

}  // namespace tierkv::store
