// SPDX-License-Identifier: Apache-2.0
// A layer of a sequence between its pages and raw rows and the bytes of its parts
// (store/transfer/sequence_chunks.h), both in device memory. Bound: memory.
#pragma once

#include "codec/format/sound_halves.h"
#include "codec/gpu/chunk_checksums.cuh"
#include "gpu/pdl.cuh"
#include "gpu/warp.cuh"
#include "store/place/device/device_kernels.h"
#include "store/rows/row_format.h"

namespace tierkv::store {

inline constexpr int32_t kLinkThreads = 128, kLinkWarps = kLinkThreads / kWarpLanes;
inline constexpr int32_t kLinkLayers = 32;  // of a call

// A layer's raw rows, and ranges of its pages.
struct LinkLayer {
  LayerTokens at;
  uint8_t* rows = nullptr;  // the raw rows of the layer
  int32_t layer = 0;
  int32_t raw_ctas = 0;               // of a kv_head
  int32_t num_ranges = 0;             // a warp each
  const PageRange* ranges = nullptr;  // mapped host memory; addresses of the device

  TKV_HD int32_t ctas(int32_t heads) const {
    return raw_ctas * heads + (num_ranges + kLinkWarps - 1) / kLinkWarps;
  }
};
// Layers that go together, a line of CTAs each.
struct LinkCall : RawRows {
  uint8_t* bytes = nullptr;              // their parts
  const ChecksumChunk* parts = nullptr;  // [layers of the sequence, 2 * num_kv_heads]
  int32_t num_kv_heads = 0;
  bool comes = false;        // parts to rows
  int32_t* fault = nullptr;  // the least import_fault()
  LinkLayer layers[kLinkLayers];
};

// Bit 15 of each half is set unless it is as `check` wants it.
__device__ __forceinline__ uint32_t unsound_halves(uint32_t x, RangeCheck check) {
  if (check == RangeCheck::kNone) return 0;
  const uint32_t not_finite = (x & 0x7c007c00u) + 0x04000400u;
  return not_finite | (check == RangeCheck::kParams ? x & 0x8000u : 0);
}

// By all lanes of a warp in one load, for host memory is far.
__device__ __forceinline__ PageRange load_range(const PageRange* at) {
  constexpr int32_t kLoads = sizeof(PageRange) / 16;
  static_assert(sizeof(PageRange) == 16 * kLoads);
  const int32_t lane = lane_index();
  const uint4 x = lane < kLoads ? reinterpret_cast<const uint4*>(at)[lane] : uint4{0, 0, 0, 0};
  uint32_t words[4 * kLoads];
  for (int32_t i = 0; i < kLoads; ++i) {
    words[4 * i] = __shfl_sync(kFullWarp, x.x, i);
    words[4 * i + 1] = __shfl_sync(kFullWarp, x.y, i);
    words[4 * i + 2] = __shfl_sync(kFullWarp, x.z, i);
    words[4 * i + 3] = __shfl_sync(kFullWarp, x.w, i);
  }
  PageRange range;
  memcpy(&range, words, sizeof(range));
  return range;
}

// By a warp.
__device__ __forceinline__ void move_range(const LinkCall& c, int32_t layer,
                                           const PageRange& range) {
  constexpr int32_t kLoads = 8;
  const auto* from = reinterpret_cast<const uint4*>(range.from);
  auto* to = reinterpret_cast<uint4*>(range.to);
  const auto words = static_cast<int32_t>(range.bytes / 16);
  uint32_t wrong = 0;
  for (int32_t i = lane_index(); i < words; i += kLoads * kWarpLanes) {
    uint4 x[kLoads];
    for (int32_t j = 0; j < kLoads; ++j) {
      const int32_t word = i + j * kWarpLanes;
      x[j] = from != nullptr && word < words ? from[word] : uint4{0, 0, 0, 0};
    }
    for (int32_t j = 0; j < kLoads; ++j) {
      const int32_t word = i + j * kWarpLanes;
      if (word < words) to[word] = x[j];
      for (const CheckedBytes& checked : {range.keys, range.values}) {
        if (16 * word < checked.first || 16 * word >= checked.end) continue;
        for (const uint32_t y : {x[j].x, x[j].y, x[j].z, x[j].w}) {
          wrong |= unsound_halves(y, checked.check);
        }
      }
    }
  }
  if ((wrong & 0x80008000u) != 0) atomicMin(c.fault, import_fault(layer, ImportFault::kBody));
}

// By the CTA `cta` of the kv_head.
__device__ __forceinline__ void move_raw(const LinkCall& c, const LinkLayer& layer, int32_t head,
                                         int32_t cta) {
  uint8_t* const row = layer.rows + static_cast<int64_t>(head) * c.raw.row_bytes;
  uint8_t* const part = c.bytes + c.parts[2 * (layer.layer * c.num_kv_heads + head)].first;
  const int32_t sinks = sink_count(c.laws, layer.at), ring = ring_count(c.laws, layer.at);
  const int32_t first = ring_first(c.laws, layer.at), dim = c.raw.head_dim;
  const int32_t thread = cta * kLinkThreads + static_cast<int32_t>(threadIdx.x);
  const int32_t step = layer.raw_ctas * kLinkThreads;
  bool is_finite_all = true, is_possible_all = true;
  for (int32_t i = thread; i < (sinks + ring) * 2 * dim; i += step) {
    const int32_t token = i / (2 * dim), d = i % dim;
    const auto component = static_cast<Component>(i / dim % 2);
    const int32_t position = token < sinks ? token : first + token - sinks;
    auto* const held = reinterpret_cast<uint16_t*>(row + c.raw.token_byte(component, position)) + d;
    uint16_t* const sent = reinterpret_cast<uint16_t*>(part) + i;
    const uint16_t x = c.comes ? *sent : *held;
    *(c.comes ? held : sent) = x;
    is_finite_all &= is_finite_half(x);
  }
  auto* const scores =
      reinterpret_cast<RawScore*>(part + static_cast<int64_t>(sinks + ring) * 4 * dim);
  for (int32_t i = thread; i < ring; i += step) {
    auto* const held = reinterpret_cast<RawScore*>(row + c.raw.score_byte(first + i));
    const RawScore score = c.comes ? scores[i] : *held;
    *(c.comes ? held : scores + i) = score;
    is_possible_all &= is_possible(score);
  }
  if (!c.comes) {
    // The part's end, up to a multiple of 16.
    if (thread == 0 && ring % 2 != 0) scores[ring] = {};
    return;
  }
  if (!is_finite_all) atomicMin(c.fault, import_fault(layer.layer, ImportFault::kRawValue));
  if (!is_possible_all) atomicMin(c.fault, import_fault(layer.layer, ImportFault::kRawScore));
}

// CTAs of raw rows, then of ranges.
inline __global__ void __launch_bounds__(kLinkThreads)
    link_layers_kernel(const __grid_constant__ LinkCall c) {
  wait_for_previous_kernel();
  const LinkLayer& layer = c.layers[blockIdx.y];
  const auto cta = static_cast<int32_t>(blockIdx.x);
  const int32_t of_ranges = cta - layer.raw_ctas * c.num_kv_heads;
  if (of_ranges < 0) {
    move_raw(c, layer, cta % c.num_kv_heads, cta / c.num_kv_heads);
    return;
  }
  const int32_t range = of_ranges * kLinkWarps + static_cast<int32_t>(threadIdx.x) / kWarpLanes;
  if (range < layer.num_ranges) move_range(c, layer.layer, load_range(layer.ranges + range));
}

}  // namespace tierkv::store
