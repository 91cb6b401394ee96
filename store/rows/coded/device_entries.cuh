// SPDX-License-Identifier: Apache-2.0
// What a captured step does where staging memory does not hold all its blocks. How many there are
// is known on the device alone, and launches for groups that may be empty cost more than the work.
#pragma once

#include "store/rows/coded/device_encode.cuh"
#include "store/rows/coded/device_places.cuh"
#include "store/rows/coded/device_tokens.cuh"

namespace tierkv::store {

// What load and encode kernels do for a group, by a CTA for an entry: its blocks are a group in the
// CTA's part of staging memory, of call.blocks cells.
template <int32_t kPer>
struct EncodeEntries {
  static constexpr int32_t kThreads = EncodeCells<kPer>::kThreads;
  static constexpr int32_t kCtas = EncodeCells<kPer>::kCtas;
  static constexpr int32_t kCallBytes = (sizeof(CodedCall) + 15) / 16 * 16;  // in shared memory
  CodedCall call;
  int32_t decode_warps = 0;  // that there is shared memory for

  __device__ void operator()(uint8_t* shared) const {
    if (has_one_group(call) || (call.writes && !call.works.has_pages())) return;
    auto* const own = reinterpret_cast<CodedCall*>(shared);
    for (auto e = static_cast<int32_t>(blockIdx.x); e < call.works.entries();
         e += static_cast<int32_t>(gridDim.x)) {
      const EntryDraft draft = call.entries[e];
      if (draft.form == EntryForm::kNothing || draft.failed != 0) continue;
      const int32_t layer = e % call.works.num_layers;
      __syncthreads();
      if (threadIdx.x == 0) open(draft, layer, own);
      __syncthreads();
      load(*own, draft, layer, shared + kCallBytes);
      encode(*own, draft, layer, shared + kCallBytes);
    }
  }

 private:
  static __device__ int32_t warp() { return static_cast<int32_t>(threadIdx.x) / kWarpLanes; }
  static __device__ int32_t warps() { return static_cast<int32_t>(blockDim.x) / kWarpLanes; }
  __device__ void open(const EntryDraft& draft, int32_t layer, CodedCall* own) const {
    *own = call;
    const int64_t rows = int64_t{blockIdx.x} * call.blocks * call.heads();
    own->by_entry = false;
    own->group = {call.list_begins[layer] + draft.listed, draft.end_block - draft.first_block};
    own->staging += rows * kBlockTokens * call.head_dim();
    own->decided += rows * kBlockTokens;
    own->ranges += rows;
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
  __device__ void encode(const CodedCall& own, const EntryDraft& draft, int32_t layer,
                         uint8_t* shared) const {
    const int32_t items = 2 * own.group.cells * own.heads();
    for (int32_t i = warp(); own.writes && i < items; i += warps()) {
      MoveBlocks{{own}}.resolve(i, cell_of(own, i / 2 / own.heads()));
    }
    __syncthreads();
    if (draft.form == EntryForm::kCoded) EncodeCells<kPer>{{own}}.encode(layer, shared, 0, 1);
    for (int32_t i = 0; own.writes && i < items; ++i) WriteRawBlocks{{own}}.write(i);
  }
};

}  // namespace tierkv::store
