// SPDX-License-Identifier: Apache-2.0
// Attention over the bodies of channel rows: a layer's pages as the kernels of attention/channel
// know a cache, and what a call comes to.
#pragma once

#include <algorithm>

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
  int32_t page_units = 0, block_units = 0;  // of kBlockUnit; raw blocks too
  Divisor per_page;                         // blocks
  bool is_raw = false;
  int32_t sinks = 0;
  const int32_t* table = nullptr;  // of the layer's row of sequence 0
  int64_t table_stride = 0;        // from a sequence to the next
  int32_t table_slots = 0;
  const int32_t* slots = nullptr;  // [entries]
  const LayerTokens* at = nullptr;

  static constexpr int32_t kBlockUnit = 128;
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
    return base + static_cast<int64_t>(id) * kBlockUnit;
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

// Parts times query columns of a call: they keep the CTAs of short calls busy.
inline constexpr int64_t kMostPartColumns = 1 << 14;

// What attention needs beside the call. is_raw: of the layer.
struct ChannelAttend {
  DeviceStoreView view;
  ChannelBody body;
  bool is_raw = false;
  int32_t num_q_heads = 0;
  float sm_scale = 0;
  StatusCode* status = nullptr;  // device; kCorrupt where a page is not there
  void* workspace = nullptr;     // channel_attention_bytes(), aligned to 16 bytes
};
// It serves calls with any number of sequences and queries.
inline int64_t channel_attention_bytes(int32_t head_dim) {
  return kMostPartColumns * (head_dim * 4 + static_cast<int64_t>(sizeof(SoftmaxState)));
}

inline ChannelBodies bodies_of(const ChannelAttend& a, const DeviceAttendBody& call) {
  const PageAllocator& pages = a.view.pages.allocator;
  ChannelBodies b;
  b.layout = a.body.layout;
  b.base = a.view.pages.base;
  b.num_pages = pages.shape.num_pages;
  b.num_kv_heads = a.view.num_kv_heads;
  b.page_units = static_cast<int32_t>(a.body.page_bytes / ChannelBodies::kBlockUnit);
  b.block_units = a.body.block_bytes(a.is_raw) / ChannelBodies::kBlockUnit;
  b.per_page = Divisor(a.body.per_page(a.is_raw));
  b.is_raw = a.is_raw;
  b.sinks = a.view.laws.sink_tokens;
  const PageTableShape& table = pages.shape.table;
  b.table = pages.slots + int64_t{a.view.pages.row(0, call.layer, 0)} * table.row_stride();
  b.table_stride = int64_t{table.rows_per_sequence} * table.row_stride();
  b.table_slots = table.table_slots[0];
  b.slots = call.slots;
  b.at = call.at;
  return b;
}

// resident_ctas: that the device runs at once.
inline ChannelLaunch<ChannelBodies> channel_launch(const ChannelAttend& a,
                                                   const DeviceAttendBody& call,
                                                   int32_t resident_ctas) {
  const int32_t head_dim = a.view.head_dim, heads = a.view.num_kv_heads;
  ChannelLaunch<ChannelBodies> p{};
  p.cache = bodies_of(a, call);
  p.ctas = channel_ctas(a.num_q_heads / heads, call.q_len, heads, head_dim);
  p.num_rows = call.count * heads;
  p.is_bfloat16 = call.dtype == DType::kBFloat16;
  p.q = static_cast<const uint16_t*>(call.q);
  p.out = static_cast<uint16_t*>(call.out);
  p.lse = call.lse;
  p.status = a.status;
  p.scale_log2 = a.sm_scale * kLog2E;
  const int64_t parts = kMostPartColumns / p.ctas.all_columns() / p.num_rows;
  const int32_t blocks = a.body.blocks_of(call.most_tokens);
  const tierkv::ChannelRows rows = {
      p.num_rows, a.is_raw ? blocks * a.body.layout.tiles() : blocks,
      static_cast<int32_t>(std::clamp<int64_t>(parts, 1, kMostChannelSplits))};
  p.splits = choose_channel_splits(p.ctas, rows, resident_ctas);
  p.parts = static_cast<float*>(a.workspace);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts + kMostPartColumns * head_dim);
  return p;
}

}  // namespace tierkv::store
