// SPDX-License-Identifier: Apache-2.0
// What becomes of the entries of a call, where their blocks go, and what the slots say of it.
#pragma once

#include "gpu/arrivals.cuh"
#include "gpu/warp_sums.cuh"
#include "store/rows/coded/device_coded_call.cuh"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {

// A CTA for a layer: what is written of its entries, from which place on, and its list. The last
// CTA adds up what layers have. Bound: latency. Loads that do not need each other are in flight
// together.
struct OpenEntries {
  static constexpr int32_t kThreads = 128;
  CodedCall call;

  __device__ void operator()(uint8_t*) const {
    const auto l = static_cast<int32_t>(blockIdx.x);
    for (auto i = static_cast<int32_t>(threadIdx.x); i < call.works.count; i += kThreads) {
      const int32_t e = i * call.works.num_layers + l;
      call.entries[e] = open(e);
    }
    __syncthreads();
    if (threadIdx.x >= kWarpLanes) return;
    list_layer(l);
    bool is_last = false;
    if (lane_index() == 0) is_last = arrive_acq_rel(call.left + 1) + 1 == call.works.num_layers;
    __syncwarp();
    if (__any_sync(kFullWarp, is_last)) add_up();
  }

 private:
  // Counts of layers become ends. By a warp.
  __device__ void add_up() const {
    int32_t* const ends = call.list_begins + 1;
    int32_t before = 0;
    for (int32_t first = 0; first < call.works.num_layers; first += kWarpLanes) {
      const int32_t l = first + lane_index();
      const int32_t cells = l < call.works.num_layers ? __ldcg(ends + l) : 0;
      int32_t all = 0;
      const int32_t end = before + sum_before(cells, &all) + cells;
      if (l < call.works.num_layers) ends[l] = end;
      before += all;
    }
    if (lane_index() == 0) call.left[0] = call.left[1] = 0, call.list_begins[0] = 0;
  }
  // By a warp.
  __device__ void list_layer(int32_t l) const {
    int32_t* const list = call.lists + int64_t{l} * call.layer_cells();
    int32_t listed = 0;
    for (int32_t first = 0; first < call.works.count; first += kWarpLanes) {
      const int32_t i = first + lane_index();
      int32_t cells = 0, all = 0;
      EntryDraft* const draft = call.entries + i * call.works.num_layers + l;
      if (i < call.works.count && draft->failed == 0) cells = draft->end_block - draft->first_block;
      const int32_t place = listed + sum_before(cells, &all);
      if (i < call.works.count) draft->listed = place;
      for (uint32_t left = __ballot_sync(kFullWarp, cells > 0); left != 0; left &= left - 1) {
        const int32_t j = lowest_bit(left);
        const int32_t of_lane = __shfl_sync(kFullWarp, cells, j);
        const int32_t to = __shfl_sync(kFullWarp, place, j);
        for (int32_t b = lane_index(); b < of_lane; b += kWarpLanes) {
          list[to + b] = (first + j) * call.blocks + b;
        }
      }
      listed += all;
    }
    if (lane_index() == 0) call.list_begins[l + 1] = listed;
  }
  __device__ EntryDraft open(int32_t e) const {
    const CodedDevice& device = call.device;
    const LayerTokens from = call.works.from[e], to = call.works.to[e];
    const auto [sequence, slot, layer] = call.works.entry(e);
    EntryDraft d;
    if (to.body_end <= from.body_end) return d;
    const int32_t full = from.body_end / kBlockTokens, row = device.view.pages.row(slot, layer, 0);
    const uint32_t hint = call.hints == nullptr ? 0 : call.hints[e];
    const int32_t is_ready = device.layers[layer].is_ready, is_raw = device.layers[layer].is_raw;
    const bool fixed = device.is_fixed(slot, layer);
    const auto end = static_cast<int32_t>(full == 0 ? 0 : device.ends(slot, layer)[full - 1]);
    const int32_t held = device.view.pages.allocator.tokens[row].of[0];
    const bool becomes_fixed = (hint & kFixesEntry) != 0 || (is_ready != 0 && from.body_end == 0);
    const bool coded = is_raw == 0 && (fixed || becomes_fixed);
    d.form = coded ? EntryForm::kCoded : EntryForm::kRaw;
    d.was_fixed = fixed ? 1 : 0;
    d.first_block = coded && !fixed ? 0 : full;
    d.end_block = block_count(to.body_end);
    (fixed ? d.coded : d.waited) = from.body_end;
    d.begin = d.first_block == 0 ? 0 : end;
    if ((hint & kRewritesEntry) == 0) d.begin = private_begin(row, d.begin, held);
    if (d.end_block - d.first_block > call.blocks) {
      report_fault(device.fault, {StatusCode::kInvalidArgument, slot, layer, 0});
      d.failed = 1;
    }
    return d;
  }
  // Old blocks are written over unless another sequence reads their pages: then the new ones go
  // behind the `held` units of the row.
  __device__ int32_t private_begin(int32_t row, int32_t begin, int32_t held) const {
    const PagesView& pages = call.device.view.pages;
    const int32_t units = call.device.shape.page_units;
    for (int32_t p = begin / units; p * units < held; ++p) {
      if (is_frozen(pages.allocator, page_at(pages.allocator, row, 0, p))) return held;
    }
    return begin;
  }
};

// A CTA for an entry: places of its blocks, counts from the layer's first unit on, and what the
// table's row is to hold.
struct PlaceBlocks {
  static constexpr int32_t kThreads = 1024;
  static constexpr int32_t kSharedBytes = (3 * kThreads + kWarpLanes + 2) * 4;
  CodedCall call;

  __device__ void operator()(uint8_t* shared) const {
    for (auto e = static_cast<int32_t>(blockIdx.x); e < call.works.entries();
         e += static_cast<int32_t>(gridDim.x)) {
      if (call.entries[e].form != EntryForm::kNothing) place(e, reinterpret_cast<int32_t*>(shared));
      __syncthreads();
    }
  }

 private:
  static __device__ int32_t thread() { return static_cast<int32_t>(threadIdx.x); }
  static __device__ int32_t threads() { return static_cast<int32_t>(blockDim.x); }

  // Blocks that are placed at once, a thread's each.
  struct Chunk {
    int32_t* ends;   // [threads]: units up to the end of each block
    int32_t* next;   // [threads]: where a page that begins with the block is full
    int32_t* pages;  // [threads]: the first block of each page but the one that was begun
    int32_t* sums;   // [32]: of the warps
    int32_t* num_pages;
    int32_t* used;  // before the chunk, then behind it
    // The first of the blocks [first, count) that ends behind `end`.
    __device__ int32_t first_behind(int32_t first, int32_t count, int32_t end) const {
      int32_t last = count;  // it is in [first, last]
      while (first < last) {
        const int32_t middle = (first + last) / 2;
        if (ends[middle] > end) {
          last = middle;
        } else {
          first = middle + 1;
        }
      }
      return first;
    }
    __device__ void add_up(int32_t units) const {
      int32_t all = 0;
      const int32_t end = sum_before(units, &all) + units;
      if (lane_index() == 0) sums[thread() / kWarpLanes] = all;
      __syncthreads();
      (void)sum_before(lane_index() < thread() / kWarpLanes ? sums[lane_index()] : 0, &all);
      ends[thread()] = end + all;
      __syncthreads();
    }
  };

  // place_blocks() for a chunk. Returns where the thread's block goes.
  __device__ int32_t place_chunk(const Chunk& chunk, int32_t count, int32_t units) const {
    const int32_t page_units = call.device.shape.page_units, i = thread();
    chunk.add_up(units);
    const int32_t used = *chunk.used, room = page_units - used % page_units;
    if (i < count) chunk.next[i] = chunk.first_behind(i, count, chunk.ends[i] - units + page_units);
    __syncthreads();
    if (i == 0) {
      int32_t pages = 0;
      for (int32_t b = chunk.first_behind(0, count, room); b < count; b = chunk.next[b]) {
        chunk.pages[pages++] = b;
      }
      *chunk.num_pages = pages;
    }
    __syncthreads();
    int32_t page = 0;  // how many begin with the block or before it
    for (int32_t last = *chunk.num_pages; page < last;) {
      const int32_t middle = (page + last) / 2;
      if (chunk.pages[middle] <= i) {
        page = middle + 1;
      } else {
        last = middle;
      }
    }
    const int32_t before = chunk.ends[i] - units;
    if (page == 0) return used + before;
    const int32_t first = chunk.pages[page - 1];
    const int32_t units_before = first == 0 ? 0 : chunk.ends[first - 1];
    return used + room + (page - 1) * page_units + before - units_before;
  }

  __device__ void place(int32_t e, int32_t* memory) const {
    const EntryDraft d = call.entries[e];
    const int32_t per_block = 2 * call.heads();
    const int32_t items = (d.end_block - d.first_block) * per_block;
    const int64_t first = call.cell(e, 0) * call.heads();
    if (d.failed != 0 || fails(e, items, first)) return;
    int32_t* const sums = memory + 3 * kThreads;
    const Chunk chunk = {memory, memory + kThreads, memory + 2 * kThreads,
                         sums,   sums + kWarpLanes, sums + kWarpLanes + 1};
    if (thread() == 0) *chunk.used = d.begin;
    for (int32_t from = 0; from < items; from += threads()) {
      const int32_t count = least(threads(), items - from), item = from + thread();
      const int32_t units = units_of(e, d, item, items, first);
      const int32_t at = place_chunk(chunk, count, units);
      __syncthreads();
      if (thread() >= count) continue;
      call.places[item % 2][first + item / 2] = {static_cast<uint32_t>(at),
                                                 static_cast<uint32_t>(units)};
      if (item % per_block == per_block - 1) {
        call.ends[call.cell(e, item / per_block)] = static_cast<uint32_t>(at + units);
      }
      if (thread() == count - 1) *chunk.used = at + units;
    }
    __syncthreads();
    if (thread() != 0) return;
    const int64_t row = call.device.view.counts_row(call.works.entry(e));
    call.counts.target[row].of[0] = *chunk.used;
    if (call.hints != nullptr && (call.hints[e] & kRewritesEntry) != 0) {
      call.counts.kept[row].of[0] = d.begin;
    }
  }
  // The units of item i of the entry. Items behind the last one have 0.
  __device__ int32_t units_of(int32_t e, const EntryDraft& d, int32_t i, int32_t items,
                              int64_t first) const {
    if (i >= items) return 0;
    if (d.form == EntryForm::kCoded) {
      return static_cast<int32_t>(call.places[i % 2][first + i / 2].units);
    }
    const CodedShape& shape = call.device.shape;
    const int32_t b = d.first_block + i / (2 * call.heads());
    return shape.raw_block_bytes(shape.tokens_of(b, call.works.to[e].body_end)) / kUnitBytes;
  }
  // Whether a block was not coded; a value that has no code is told alone.
  __device__ bool fails(int32_t e, int32_t items, int64_t first) const {
    if (call.entries[e].form != EntryForm::kCoded) return false;
    const int64_t layer = e % call.works.num_layers;
    const StatusCode* status =
        call.status + (layer * call.layer_cells() + call.entries[e].listed) * call.heads() * 2;
    bool is_fine = true;
#pragma unroll 4
    for (int32_t i = thread(); i < items; i += threads()) {
      const StatusCode code = status[i];
      if (code == StatusCode::kOk) continue;
      const DeviceEntry at = call.works.entry(e);
      report_fault(call.device.fault, {code, at.slot, at.layer, i / 2 % call.heads()});
      is_fine &= code == StatusCode::kOutOfRange && call.places[i % 2][first + i / 2].units != 0;
    }
    if (__syncthreads_and(is_fine) != 0) return false;
    // Without room write() leaves memory as it is.
    for (int32_t i = thread(); i < items; i += threads()) {
      call.places[i % 2][first + i / 2].units = 0;
    }
    if (thread() == 0) call.entries[e].failed = 1;
    return true;
  }
};

// Directories of entries some of whose pages were replaced by copies; positions below from.body_end
// count. A warp for the blocks of a row and component.
struct RelocateBlocks {
  static constexpr int32_t kThreads = 128;
  CodedCall call;

  __device__ void operator()(uint8_t*) const {
    if (!call.works.has_pages()) return;
    const int32_t per_entry = 2 * call.heads(), items = call.works.entries() * per_entry;
    for (int32_t i = warp_of_grid(); i < items; i += warps_of_grid()) {
      const int32_t e = i / per_entry;
      const DeviceEntry at = call.works.entry(e);
      const PageCopy copy = call.copies[call.device.view.counts_row(at) * kMaxSides];
      if (copy.source == kNoPage) continue;
      const auto units = static_cast<uint32_t>(call.device.shape.page_units);
      CodedBlockRef* const refs =
          call.device.refs(at.slot, at.layer, i / 2 % call.heads(), static_cast<Component>(i % 2));
      for (int32_t b = lane_index(); b < block_count(call.works.from[e].body_end);
           b += kWarpLanes) {
        if (refs[b].offset / units != static_cast<uint32_t>(copy.source)) continue;
        refs[b].offset = static_cast<uint32_t>(copy.target) * units + refs[b].offset % units;
      }
    }
  }
};

// Raw blocks out of staging memory: a CTA for a block and component.
struct WriteRawBlocks : CallWork {
  static constexpr int32_t kThreads = 256;

  __device__ void operator()(uint8_t*) const {
    if (!call.works.has_pages()) return;
    const int32_t items = cells_of_group(call) * call.heads() * 2;
    for (auto i = static_cast<int32_t>(blockIdx.x); i < items;
         i += static_cast<int32_t>(gridDim.x)) {
      write(i);
    }
  }
  // By a CTA.
  __device__ void write(int32_t i) const {
    const int32_t row = i / 2, kv_head = row % call.heads();
    const CellOf cell = cell_of(call, row / call.heads());
    if (!is_written(call, cell, EntryForm::kRaw)) return;
    const auto c = static_cast<Component>(i % 2);
    const WeightedPlace place = call.places[i % 2][cell.cell * call.heads() + kv_head];
    uint8_t* const to = call.device.view.pages.base + int64_t{place.unit} * kUnitBytes;
    const int32_t tokens = tokens_of(call, cell).count();
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const auto threads = static_cast<int32_t>(blockDim.x);
    const int32_t dims = call.head_dim();
    const uint8_t(*const words)[4] = call.decided + int64_t{row} * kBlockTokens;
    for (int32_t t = thread; t < kBlockTokens; t += threads) to[t] = t < tokens ? words[t][0] : 0;
    const uint16_t* const from = call.staged(c, row);
    for (int32_t n = thread; n < tile_count(tokens) * kTileTokens * dims; n += threads) {
      const int32_t t = n / dims;
      uint8_t* const byte = to + kBlockTokens + raw_tile_byte(dims, c, t, n % dims);
      *reinterpret_cast<uint16_t*>(byte) = t < tokens ? from[n] : uint16_t{0};
    }
  }
};

// Writes into the slots what holds of the new blocks together, and commits. A CTA for an entry.
struct FinishEntries : CallWork {
  static constexpr int32_t kThreads = 256;

  __device__ void operator()(uint8_t*) const {
    commit(call.works);
    if (!call.works.has_pages()) return;
    for (auto e = static_cast<int32_t>(blockIdx.x); e < call.works.entries();
         e += static_cast<int32_t>(gridDim.x)) {
      const EntryDraft& d = call.entries[e];
      if (d.form != EntryForm::kNothing && d.failed == 0) finish(e, d);
    }
  }
  // By a CTA.
  __device__ void finish(int32_t e, const EntryDraft& d) const {
    const CodedDevice& device = call.device;
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const auto threads = static_cast<int32_t>(blockDim.x);
    const auto [sequence, slot, layer] = call.works.entry(e);
    const int32_t heads = call.heads();
    const int32_t blocks = d.end_block - d.first_block;
    const int64_t first = call.cell(e, 0);
    for (int32_t b = thread; b < blocks; b += threads) {
      device.ends(slot, layer)[d.first_block + b] = call.ends[first + b];
    }
    const bool becomes_fixed = d.form == EntryForm::kCoded && d.was_fixed == 0;
    for (int32_t h = thread; h < heads; h += threads) {
      CodedRowState state = call.rows[int64_t{e} * heads + h];
      if (becomes_fixed) {
        const int32_t row = device.row(slot, layer, h);
        state.key_step = device.tables.key_steps[row];
        state.value_step = device.tables.value_steps[row];
      }
      *device.state<CodedRowState>(slot, layer, device.shape.row_byte(h)) = state;
    }
    if (!becomes_fixed) return;
    for (int32_t i = thread; i < heads * call.head_dim(); i += threads) {
      const int32_t h = i / call.head_dim(), dim = i % call.head_dim();
      device.state<uint16_t>(slot, layer, device.shape.means_byte(h))[dim] =
          device.tables.key_means[int64_t{device.row(slot, layer, h)} * call.head_dim() + dim];
    }
    if (thread == 0) *device.state<int32_t>(slot, layer, device.shape.fixed_byte()) = 1;
  }
};

// Counts once the bodies end at to.body_end: a thread for an entry.
struct CutCounts {
  static constexpr int32_t kThreads = 128;
  CodedCall call;

  __device__ void operator()(uint8_t*) const {
    for (int32_t e = thread_of_grid(); e < call.works.entries(); e += threads_of_grid()) {
      const LayerTokens from = call.works.from[e], to = call.works.to[e];
      if (to.body_end >= from.body_end) continue;
      const DeviceEntry at = call.works.entry(e);
      const uint32_t* ends = call.device.ends(at.slot, at.layer);
      const uint32_t kept = to.body_end == 0 ? 0 : ends[to.body_end / kBlockTokens - 1];
      call.counts.target[call.device.view.counts_row(at)].of[0] = static_cast<int32_t>(kept);
    }
  }
};

}  // namespace tierkv::store
