// SPDX-License-Identifier: Apache-2.0
// What a captured step does where staging memory does not hold all its blocks, and the end of its
// write(). How many blocks there are is known on the device alone, and launches that may be empty
// cost more than the work.
#pragma once

#include "store/rows/coded/device_encode.cuh"
#include "store/rows/coded/device_places.cuh"
#include "store/rows/coded/device_tokens.cuh"

namespace tierkv::store {

// What load and encode kernels do for a group, by a CTA for an entry: its blocks are a group in the
// CTA's part of staging memory, of call.blocks cells. Where staging memory holds all blocks,
// only write() has work here: it encodes the blocks whose bytes plan() has not kept there. In both
// cases write() ends here: entries are finished and counts committed.
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
