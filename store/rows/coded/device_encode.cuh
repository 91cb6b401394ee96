// SPDX-License-Identifier: Apache-2.0
// Cells as coded blocks: the codec's encoder over staged tokens, each layer with its codebooks.
#pragma once

#include "codec/gpu/coded/weighted_encode.cuh"
#include "store/rows/coded/device_coded_call.cuh"
#include "store/rows/coded/device_places.cuh"
#include "store/rows/coded/device_tokens.cuh"

namespace tierkv::store {

// blockIdx.y: layer of the call. Where the call writes, bytes to their places; else sizes.
template <int32_t kPer>
struct EncodeCells : CallWork {
  static constexpr int32_t kThreads = kWeightedWarps * kWarpLanes;
  static constexpr int32_t kCtas = 2;
  static constexpr int32_t kCallBytes = (sizeof(WeightedEncode) + 15) / 16 * 16;

  __device__ void operator()(uint8_t* shared) const {
    if (call.writes && (!call.works.has_pages() || *call.left == 0)) return;
    encode(static_cast<int32_t>(blockIdx.y), shared, blockIdx.x, gridDim.x);
  }
  // What the group has of a layer, by CTA `block` of `blocks`.
  __device__ void encode(int32_t layer, uint8_t* shared, uint32_t block, uint32_t blocks) const {
    if (cells_of_layer(call, layer).count() == 0) return;
    auto* const encode = reinterpret_cast<WeightedEncode*>(shared);
    if (threadIdx.x == 0) *encode = encode_call(layer);
    __syncthreads();
    // A layer that has no codebooks has no cells to encode.
    if (encode->books[0].codebook == nullptr) return;
    encode_weighted_items<kPer>(*encode, shared + kCallBytes, block, blocks);
  }

 private:
  __device__ WeightedEncode encode_call(int32_t l) const {
    const int32_t heads = call.heads();
    const Positions cells = cells_of_layer(call, l);
    const DeviceLayer& layer = call.device.layers[call.works.first_layer + l];
    const DeviceRowTables& tables = call.device.tables;
    WeightedEncode e;
    e.keys = call.staged(Component::kKey, 0);
    e.values = call.staged(Component::kValue, 0);
    e.decided = call.decided;
    e.ranges = call.ranges + int64_t{cells.first} * heads;
    e.rows.key_scales = tables.key_scales;
    e.rows.key_means = tables.key_means;
    e.rows.value_steps = tables.value_steps;
    e.rows.rope = layer.rope;
    e.rows.num_rows = tables.rows;
    e.rows.head_dim = call.head_dim();
    for (int32_t c = 0; c < 2; ++c) {
      e.books[c] = layer.books[c];
      e.places[c] = call.places[c];
    }
    if (call.writes) e.bytes = call.device.view.pages.base;
    e.size = call.device.pool_bytes;
    const int64_t first = status_of_layer(call, l);
    e.status = call.status + first;
    if (has_one_group(call)) e.kept = call.kept + first;
    e.token_stride = call.head_dim();
    e.num_ranges = cells.count() * heads;
    e.most_blocks = 1;
    return e;
  }
};

// Places of the layer become places of the pool, which the directories get; blocks that plan() left
// over their tokens go there. A warp for a block and component.
struct MoveBlocks : CallWork {
  static constexpr int32_t kThreads = 128;

  __device__ void operator()(uint8_t*) const {
    if (!call.works.has_pages()) return;
    const int32_t items = cells_of_group(call) * call.heads() * 2;
    for (int32_t i = warp_of_grid(); i < items; i += warps_of_grid()) {
      const CellOf cell = cell_of(call, i / 2 / call.heads());
      if (cell.entry < 0 || call.entries[cell.entry].failed != 0) continue;
      const WeightedPlace place = resolve(i, cell);
      if (!is_written(call, cell, EntryForm::kCoded)) continue;
      if (is_kept(i, cell)) {
        move(i, place);
      } else if (lane_index() == 0) {
        *call.left = 1;
      }
    }
  }

  // By a warp.
  __device__ WeightedPlace resolve(int32_t i, const CellOf& cell) const {
    const PagesView& pages = call.device.view.pages;
    const auto units = static_cast<uint32_t>(call.device.shape.page_units);
    const int32_t kv_head = i / 2 % call.heads();
    WeightedPlace& given = call.places[i % 2][cell.cell * call.heads() + kv_head];
    WeightedPlace place = given;
    const int32_t page = page_at(pages.allocator, pages.row(cell.slot, cell.layer, 0), 0,
                                 static_cast<int32_t>(place.unit / units));
    place.unit = static_cast<uint32_t>(page) * units + place.unit % units;
    __syncwarp();
    if (lane_index() == 0) {
      given = place;
      call.device.refs(cell.slot, cell.layer, kv_head,
                       static_cast<Component>(i % 2))[cell.block] = {place.unit, place.units};
    }
    return place;
  }

 private:
  __device__ bool is_kept(int32_t i, const CellOf& cell) const {
    if (!has_one_group(call)) return false;
    const int32_t l = cell.layer - call.works.first_layer;
    const int64_t before = 2 * int64_t{cells_of_layer(call, l).first} * call.heads();
    return call.kept[status_of_layer(call, l) + i - before] != 0;
  }
  __device__ void move(int32_t i, const WeightedPlace& place) const {
    const auto* const from =
        reinterpret_cast<const uint4*>(call.staged(static_cast<Component>(i % 2), i / 2));
    auto* const to = reinterpret_cast<uint4*>(call.device.view.pages.base) + place.unit;
    constexpr uint32_t kLoads = 8;  // in flight
    for (uint32_t u = lane_index(); u < place.units; u += kLoads * kWarpLanes) {
      uint4 x[kLoads];
#pragma unroll
      for (uint32_t n = 0; n < kLoads; ++n) {
        if (u + n * kWarpLanes < place.units) x[n] = from[u + n * kWarpLanes];
      }
#pragma unroll
      for (uint32_t n = 0; n < kLoads; ++n) {
        if (u + n * kWarpLanes < place.units) to[u + n * kWarpLanes] = x[n];
      }
    }
  }
};

// What load and encode kernels do for a group, by a CTA for an entry: its blocks are a group in the
// CTA's part of staging memory, of call.blocks cells. Where staging memory holds all blocks,
// only write() has work here: it encodes the blocks whose bytes plan() has not kept there. In both
// cases write() ends here: entries are finished and counts committed. How many blocks there are is
// known on the device alone, and launches that may be empty cost more than the work.
template <int32_t kPer>
struct EncodeEntries {
  static constexpr int32_t kThreads = EncodeCells<kPer>::kThreads;
  static constexpr int32_t kCtas = EncodeCells<kPer>::kCtas;
  static constexpr int32_t kCallBytes = (sizeof(CodedCall) + 15) / 16 * 16;  // in shared memory
  CodedCall call;
  int32_t decode_warps = 0;  // that there is shared memory for
  int32_t entry_ctas = 0;    // that there is staging memory for

  __device__ void operator()(uint8_t* shared) const {
    if (call.writes) commit(call.works);
    if (call.writes && !call.works.has_pages()) return;
    const bool is_one = has_one_group(call);
    if (is_one && !call.writes) return;
    auto* const own = reinterpret_cast<CodedCall*>(shared);
    const auto cta = static_cast<int32_t>(blockIdx.x);
    const int32_t ctas = is_one ? static_cast<int32_t>(gridDim.x) : entry_ctas;
    for (int32_t e = cta; cta < ctas && e < call.works.entries(); e += ctas) {
      const EntryDraft draft = call.entries[e];
      if (draft.form == EntryForm::kNothing || draft.failed != 0) continue;
      if (!is_one || *call.left != 0 || draft.form == EntryForm::kRaw) {
        const int32_t layer = e % call.works.num_layers;
        __syncthreads();
        if (threadIdx.x == 0) open(draft, layer, is_one, own);
        __syncthreads();
        if (!is_one) load(*own, draft, layer, shared + kCallBytes);
        encode(*own, draft, layer, is_one, shared + kCallBytes);
      }
      if (call.writes) FinishEntries{{call}}.finish(e, draft);
    }
  }

 private:
  static __device__ int32_t warp() { return static_cast<int32_t>(threadIdx.x) / kWarpLanes; }
  static __device__ int32_t warps() { return static_cast<int32_t>(blockDim.x) / kWarpLanes; }
  // Ranges of one group know where its tokens are.
  __device__ void open(const EntryDraft& draft, int32_t layer, bool is_one, CodedCall* own) const {
    *own = call;
    own->by_entry = false;
    own->group = {call.list_begins[layer] + draft.listed, draft.end_block - draft.first_block};
    const int64_t cells = is_one ? own->group.first : int64_t{blockIdx.x} * call.blocks;
    own->ranges += cells * call.heads();
    if (is_one) return;
    own->staging += cells * call.heads() * kBlockTokens * call.head_dim();
    own->decided += cells * call.heads() * kBlockTokens;
  }
  __device__ void load(const CodedCall& own, const EntryDraft& draft, int32_t layer,
                       uint8_t* shared) const {
    const int32_t heads = own.heads(), rows = own.group.cells * heads;
    for (int32_t i = 0; i < rows; ++i) {
      GatherTokens{{own}}.gather(i, cell_of(own, i / heads), i % heads);
    }
    __syncthreads();
    for (int32_t i = warp(); i < rows; i += warps()) {
      DecideExponents{{own}}.decide_cell(i / heads, i % heads);
    }
    __syncthreads();
    if (draft.coded <= own.device.shape.first_of(draft.first_block)) return;
    for (const Component c : {Component::kKey, Component::kValue}) {
      const int32_t first = warp() < decode_warps ? warp() : rows;
      DecodeOldBlocks{{own}}.decode(layer, c, shared, first, decode_warps);
      __syncthreads();
    }
  }
  __device__ void encode(const CodedCall& own, const EntryDraft& draft, int32_t layer, bool is_one,
                         uint8_t* shared) const {
    const int32_t heads = own.heads(), items = 2 * own.group.cells * heads;
    for (int32_t i = warp(); own.writes && !is_one && i < items; i += warps()) {
      MoveBlocks{{own}}.resolve(i, cell_of(own, i / 2 / heads));
    }
    __syncthreads();
    if (draft.form == EntryForm::kCoded) {
      EncodeCells<kPer>{{own}}.encode(layer, shared, 0, 1);
    } else if (own.writes) {
      const CodedCall& of = is_one ? call : own;
      const int32_t first = is_one ? 2 * own.group.first * heads : 0;
      for (int32_t i = 0; i < items; ++i) WriteRawBlocks{{of}}.write(first + i);
    }
  }
};

}  // namespace tierkv::store
