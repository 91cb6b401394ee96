// SPDX-License-Identifier: Apache-2.0
// What the kernels of coded rows in device memory are called with.
//
// An entry (sequence, layer) has blocks that are written, which are called cells. Cells are worked
// on in groups, for which there is staging memory: their tokens as fp16, those of partial blocks
// that are continued as codes. plan() finds the sizes of all cells; write() makes their bytes.
// Where one group is all, plan() leaves most blocks over their staged tokens, and write() moves
// them. A captured step has one group; where that does not hold all cells, EncodeEntries does them.
#pragma once

#include "codec/gpu/coded/weighted_batch.h"
#include "gpu/warp.cuh"
#include "store/place/device/device_reports.cuh"
#include "store/rows/coded/coded_shape.h"
#include "store/rows/device_row_format.h"

namespace tierkv::store {

// What all sequences share of a layer.
struct DeviceLayer {
  DeviceBook books[2];
  DeviceRope rope;
  int32_t is_raw = 0;    // blocks stay raw
  int32_t is_ready = 0;  // codebooks, means and steps are there before the tokens are
};

// What quantises each row, and what attention takes of that. Rows are [num_layers,
// num_kv_heads] where a profile knows them, else [num_sequences, num_layers, num_kv_heads].
struct DeviceRowTables {
  float* key_steps = nullptr;          // [rows]
  float* value_steps = nullptr;        // [rows]
  float* key_scales = nullptr;         // [rows, head_dim]
  uint16_t* key_means = nullptr;       // [rows, head_dim]
  float* query_units = nullptr;        // [rows]: units of WeightedRows
  float* query_scales = nullptr;       // [rows, head_dim]
  uint16_t* query_means = nullptr;     // [rows, head_dim]
  const float* key_weights = nullptr;  // [num_layers, num_kv_heads, head_dim]
  int32_t rows = 0;
  bool per_slot = false;
};

struct CodedDevice {
  DeviceStoreView view;
  CodedShape shape;
  DeviceRowTables tables;
  const DeviceLayer* layers = nullptr;  // device [num_layers]
  DeviceFault* fault = nullptr;
  int64_t pool_bytes = 0;

  TKV_HD int32_t heads() const { return shape.num_kv_heads; }
  TKV_HD int32_t row(int32_t slot, int32_t layer, int32_t kv_head) const {
    return ((tables.per_slot ? slot : 0) * view.num_layers + layer) * heads() + kv_head;
  }
  template <class T>
  TKV_HD T* state(int32_t slot, int32_t layer, int64_t byte) const {
    return reinterpret_cast<T*>(view.slots.state(slot, layer) + byte);
  }
  TKV_HD bool is_fixed(int32_t slot, int32_t layer) const {
    return *state<int32_t>(slot, layer, shape.fixed_byte()) != 0;
  }
  TKV_HD CodedBlockRef* refs(int32_t slot, int32_t layer, int32_t kv_head, Component c) const {
    return state<CodedBlockRef>(slot, layer, shape.refs_byte(kv_head, c));
  }
  TKV_HD uint32_t* ends(int32_t slot, int32_t layer) const {
    return state<uint32_t>(slot, layer, shape.ends_byte());
  }
};

enum class EntryForm : int32_t { kNothing = 0, kRaw = 1, kCoded = 2 };
struct alignas(16) EntryDraft {
  EntryForm form = EntryForm::kNothing;
  int32_t first_block = 0, end_block = 0;  // that are written
  int32_t begin = 0;                       // units of the layer that stay before them
  int32_t was_fixed = 0;                   // old blocks are coded ones
  int32_t waited = 0;                      // positions below are in raw blocks
  int32_t coded = 0;                       // positions below are in coded blocks
  int32_t failed = 0;
  int32_t listed = 0;  // place of its first cell in the layer's list
};
// What the host knows of an entry.
inline constexpr uint32_t kFixesEntry = 1, kRewritesEntry = 2;
inline constexpr int32_t kMostSavedBlocks = kSampleBlocks;  // of an entry

// The listed cells [first, first + cells).
struct CellGroup {
  int32_t first = 0, cells = 0;
};
struct CodedCall {
  CodedDevice device;
  DeviceWorks works;
  DeviceRowCounts counts;
  const PageCopy* copies = nullptr;
  // Device [entries]: kFixesEntry and kRewritesEntry, from bit 8 on where its old blocks are saved;
  // null: zeros.
  const uint32_t* hints = nullptr;
  uint8_t* saved = nullptr;  // [saved entries, kMostSavedBlocks, heads, 2] of saved_bytes
  int32_t saved_bytes = 0;
  EntryDraft* entries = nullptr;  // [entries]
  CodedRowState* rows = nullptr;  // [entries, heads]
  LogMean* sums = nullptr;        // [cells, heads]: what blocks add to the means of their rows
  // The cells that are written, layer by layer, those of an entry one behind the other: where each
  // layer begins among all, and, [layers, layer_cells()], the layer's cells by their places.
  int32_t* list_begins = nullptr;  // [layers + 1]
  int32_t* lists = nullptr;
  bool writes = false;            // of write(): one group's tokens are in staging memory already
  bool by_entry = false;          // what one group does not hold is EncodeEntries'
  WeightedPlace* places[2] = {};  // [cells, heads]
  uint32_t* ends = nullptr;       // [cells]
  StatusCode* status = nullptr;   // [layers, layer_cells(), heads, 2], by places in the lists
  uint8_t* kept = nullptr;        // as status: whether the block's bytes lie over its tokens
  // [2]: whether write() has blocks to encode; layers that are listed, 0 between kernels.
  int32_t* left = nullptr;
  uint16_t* staging = nullptr;      // [2, group_cells, heads, 64, head_dim]
  uint8_t (*decided)[4] = nullptr;  // [group_cells, heads, 64], as WeightedEncode has it
  WeightedRange* ranges = nullptr;  // [group_cells, heads]
  CellGroup group;                  // that is in staging memory
  int32_t group_cells = 0;          // that staging has room for
  int32_t blocks = 0;               // cells of an entry
  int32_t slice_bytes = 0;          // that the memory of a warp which decodes has room for

  TKV_HD int32_t heads() const { return device.shape.num_kv_heads; }
  TKV_HD int32_t head_dim() const { return device.shape.head_dim; }
  // Cells are ordered by layer, sequence, block.
  TKV_HD int32_t layer_cells() const { return works.count * blocks; }
  TKV_HD int64_t cell(int32_t entry, int32_t block) const {
    const int32_t i = entry / works.num_layers, l = entry % works.num_layers;
    return (int64_t{l} * works.count + i) * blocks + block;
  }
  TKV_HD uint16_t* staged(Component c, int64_t group_row) const {
    const int64_t all = int64_t{group_cells} * heads();
    return staging + ((c == Component::kKey ? 0 : all) + group_row) * kBlockTokens * head_dim();
  }
};

// Whether all cells are in the first group, which then stays in staging memory.
TKV_HD bool has_one_group(const CodedCall& call) {
  return call.list_begins[call.works.num_layers] <= call.group_cells;
}
TKV_HD int32_t cells_of_group(const CodedCall& call) {
  if (call.by_entry && !has_one_group(call)) return 0;
  const int32_t all = call.list_begins[call.works.num_layers];
  return most(0, least(call.group.cells, all - call.group.first));
}
// What a group has of layer l of the call, counted from the group's first cell.
TKV_HD Positions cells_of_layer(const CodedCall& call, int32_t l) {
  const int32_t first = most(call.list_begins[l] - call.group.first, 0);
  const int32_t end = least(call.list_begins[l + 1] - call.group.first, cells_of_group(call));
  return {first, most(first, end)};
}
// Whether load kernels have nothing to do.
TKV_HD bool is_loaded(const CodedCall& call) {
  return call.writes && has_one_group(call);
}
// Where the first item of layer l of a group has its status, or how many are before it.
TKV_HD int64_t status_of_layer(const CodedCall& call, int32_t l) {
  const int64_t listed = call.group.first + cells_of_layer(call, l).first - call.list_begins[l];
  return (int64_t{l} * call.layer_cells() + listed) * call.heads() * 2;
}

// The cell of an index of a group; entry -1: there is none.
struct CellOf {
  int32_t entry = -1, block = 0;  // block: of the sequence
  int32_t slot = 0, layer = 0;
  int64_t cell = 0;
};
// By a warp: each lane looks at one layer in 32.
__device__ inline CellOf cell_of(const CodedCall& call, int32_t index) {
  CellOf c;
  if (index >= cells_of_group(call)) return c;
  const int32_t i = call.group.first + index;
  int32_t l = 0;  // layers whose cells all come before
  for (int32_t base = 1; base < call.works.num_layers; base += kWarpLanes) {
    const int32_t next = base + lane_index();
    const bool is_before = next < call.works.num_layers && call.list_begins[next] <= i;
    l += __popc(__ballot_sync(kFullWarp, is_before));
  }
  const int64_t first = int64_t{l} * call.layer_cells();
  const int32_t at = call.lists[first + i - call.list_begins[l]];
  c.entry = at / call.blocks * call.works.num_layers + l;
  c.block = at % call.blocks + call.entries[c.entry].first_block;
  c.slot = call.works.slots[at / call.blocks];
  c.layer = call.works.first_layer + l;
  c.cell = first + at;
  return c;
}
TKV_HD bool is_written(const CodedCall& call, const CellOf& c, EntryForm form) {
  return c.entry >= 0 && call.entries[c.entry].form == form;
}
TKV_HD Positions tokens_of(const CodedCall& call, const CellOf& c) {
  const CodedShape& shape = call.device.shape;
  return {shape.first_of(c.block), CodedShape::end_of(c.block, call.works.to[c.entry].body_end)};
}

// The bytes of a block that the entry held before the call.
TKV_HD const uint8_t* old_block(const CodedCall& call, const CellOf& c, int32_t kv_head,
                                Component component) {
  const uint32_t hint = call.hints == nullptr ? 0 : call.hints[c.entry];
  if ((hint & kRewritesEntry) != 0 && call.saved != nullptr) {
    const int32_t b = c.block - call.entries[c.entry].first_block;
    const int64_t at = (int64_t{hint >> 8} * kMostSavedBlocks + b) * call.heads() + kv_head;
    return call.saved + (2 * at + static_cast<int32_t>(component)) * call.saved_bytes;
  }
  const CodedBlockRef ref = call.device.refs(c.slot, c.layer, kv_head, component)[c.block];
  return call.device.view.pages.base + int64_t{ref.offset} * kUnitBytes;
}

__device__ __forceinline__ int32_t thread_of_grid() {
  return static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
}
__device__ __forceinline__ int32_t threads_of_grid() {
  return static_cast<int32_t>(gridDim.x * blockDim.x);
}
__device__ __forceinline__ int32_t warps_of_grid() {
  return threads_of_grid() / kWarpLanes;
}

// A kernel of what a Work of a call does.
template <class Work>
struct OfCall {
  static constexpr int32_t kThreads = Work::kThreads, kCtas = Work::kCtas;
  CodedCall call;
  __device__ void operator()(uint8_t* shared) const { Work{{call}}(shared); }
};
// kCtas: that an SM has at once; 0: as the compiler likes.
struct CallWork {
  static constexpr int32_t kCtas = 0;
  const CodedCall& call;
};

}  // namespace tierkv::store
