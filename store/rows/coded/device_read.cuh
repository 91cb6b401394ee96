// SPDX-License-Identifier: Apache-2.0
// Body tokens of one (sequence, layer) back to finished keys and values, for readers and for the
// ring.
#pragma once

#include "codec/gpu/coded/weighted_decode.cuh"
#include "store/place/raw_tokens.h"
#include "store/rows/coded/device_tokens.cuh"

namespace tierkv::store {

// Body positions of all kv_heads of a layer: [count, num_kv_heads, head_dim].
struct ReadTarget {
  int32_t slot = 0, layer = 0;
  int32_t body_end = 0;
  Positions range;
  DType dtype = DType::kFloat16;
  uint16_t* k = nullptr;
  uint16_t* v = nullptr;

  TKV_HD uint16_t* of(Component c) const { return c == Component::kKey ? k : v; }
};

// Ranges of a fixed layer for decode_weighted_items(); empty ones where it is not fixed. A thread
// for a kv_head and component.
struct MakeReadRanges {
  static constexpr int32_t kThreads = 128;
  CodedDevice device;
  ReadTarget to;
  WeightedRange* ranges = nullptr;  // [2, num_kv_heads]

  __device__ void operator()(uint8_t*) const {
    const int32_t heads = device.heads();
    for (int32_t i = thread_of_grid(); i < 2 * heads; i += threads_of_grid()) {
      const int32_t h = i % heads;
      WeightedRange r;
      if (device.is_fixed(to.slot, to.layer)) {
        r.body_first = device.shape.sink_tokens, r.body_last = to.body_end;
        r.first = to.range.first, r.last = to.range.end;
        r.row = device.row(to.slot, to.layer, h);
        // The places are those of kv_head 0.
        r.first_block = 2 * h * device.shape.max_blocks;
        r.out = to.of(i < heads ? Component::kKey : Component::kValue) +
                int64_t{h} * device.shape.head_dim;
        r.token_stride = int64_t{heads} * device.shape.head_dim;
      }
      ranges[i] = r;
    }
  }
};

struct DecodeRanges {
  static constexpr int32_t kThreads = kDecodeWarps * kWarpLanes;
  WeightedDecode call;
  __device__ void operator()(uint8_t* shared) const { decode_weighted_items(call, shared); }
};

// Counts blocks of the fixed layers of a slot that do not decode. CTAs {x, 2 * layers}.
struct CheckBlocks {
  static constexpr int32_t kThreads = kDecodeWarps * kWarpLanes;
  CodedDevice device;
  int32_t slot = 0;
  const LayerTokens* counts = nullptr;  // [layers]
  WeightedDecode decode;                // but for component and book
  int32_t* damaged = nullptr;

  __device__ void operator()(uint8_t* shared) const {
    const auto layer = static_cast<int32_t>(blockIdx.y / 2u), heads = device.heads();
    WeightedDecode call = decode;
    call.component = static_cast<Component>(blockIdx.y % 2u);
    call.book = device.layers[layer].books[blockIdx.y % 2u];
    if (call.book.codebook == nullptr || !device.is_fixed(slot, layer)) return;
    const int32_t end = counts[layer].body_end;
    const auto block_of = [&](int32_t i, WeightedPlace* place) {
      const CodedBlockRef ref = device.refs(slot, layer, i % heads, call.component)[i / heads];
      *place = {ref.offset, ref.units};
      return device.shape.tokens_of(i / heads, end);
    };
    const int32_t found = count_damaged(call, shared, block_count(end) * heads, block_of);
    if (found > 0 && lane_index() == 0) atomicAdd(damaged, found);
  }
};

// Where the layer is not fixed.
struct ReadRawTokens {
  static constexpr int32_t kThreads = 256;
  CodedDevice device;
  ReadTarget to;

  __device__ void operator()(uint8_t*) const {
    if (device.is_fixed(to.slot, to.layer)) return;
    const int32_t heads = device.heads(), dims = device.shape.head_dim;
    const int64_t all = int64_t{to.range.count()} * heads * dims;
    for (int64_t i = thread_of_grid(); i < 2 * all; i += threads_of_grid()) {
      const auto c = static_cast<Component>(i / all);
      const auto at = static_cast<int32_t>(i % all);
      const int32_t p = to.range.first + at / (heads * dims), h = at / dims % heads;
      const CodedBlockRef ref = device.refs(to.slot, to.layer, h, c)[p / kBlockTokens];
      const uint8_t* tiles =
          device.view.pages.base + int64_t{ref.offset} * kUnitBytes + kBlockTokens;
      const int32_t t = p - device.shape.first_of(p / kBlockTokens);
      const uint16_t x = raw_tile_element(tiles, dims, c, t, at % dims);
      to.of(c)[at] = to.dtype == DType::kFloat16 ? x : float_to_bfloat16(half_to_float(x));
    }
  }
};

// Tokens that were read go to the ring, with what the format decided about them: positions of one
// block.
struct RestoreTokens {
  static constexpr int32_t kThreads = 256;
  CodedDevice device;
  ReadTarget from;

  __device__ void operator()(uint8_t*) const {
    const int32_t heads = device.heads(), dims = device.shape.head_dim;
    const int32_t all = from.range.count() * heads * dims;
    uint8_t* const rows = device.view.slots.raw(from.slot, from.layer);
    const RawLayout& raw = device.view.raw;
    for (int32_t i = thread_of_grid(); i < all; i += threads_of_grid()) {
      const int32_t p = from.range.first + i / (heads * dims), h = i / dims % heads, d = i % dims;
      uint8_t* const row = rows + int64_t{h} * raw.row_bytes;
      for (const Component c : {Component::kKey, Component::kValue}) {
        *reinterpret_cast<uint16_t*>(row + raw.ring_byte(c, p, d)) = from.of(c)[i];
      }
      if (d == 0) *reinterpret_cast<RawScore*>(row + raw.score_byte(p)) = score_of(h, p);
    }
  }

 private:
  __device__ RawScore score_of(int32_t h, int32_t p) const {
    if (device.layers[from.layer].is_raw != 0) return {};
    const int32_t block = p / kBlockTokens, t = p - device.shape.first_of(block);
    DecidedExponents decided;
    decided.importance = exponent_of(h, Component::kKey, block, t);
    decided.has_value = device.is_fixed(from.slot, from.layer);
    if (decided.has_value) decided.value = exponent_of(h, Component::kValue, block, t);
    return {bits_float(decided.bits()), RawScore::kDecided};
  }
  __device__ int32_t exponent_of(int32_t h, Component c, int32_t block, int32_t t) const {
    const CodedBlockRef ref = device.refs(from.slot, from.layer, h, c)[block];
    const uint8_t* bytes = device.view.pages.base + int64_t{ref.offset} * kUnitBytes;
    if (!device.is_fixed(from.slot, from.layer)) return static_cast<int8_t>(bytes[t]);
    const WeightedBlockHeader header = load_weighted_header(bytes);
    return header.least_exponent + static_cast<int32_t>(load_field(bytes + kCodedBlockHeaderBytes,
                                                                   t, header.exponent_bits));
  }
};

}  // namespace tierkv::store
