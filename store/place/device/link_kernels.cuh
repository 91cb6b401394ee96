// SPDX-License-Identifier: Apache-2.0
// A layer of a sequence between its pages and raw rows and the bytes of its parts
// (store/transfer/sequence_chunks.h), both in device memory. Bound: memory.
#pragma once

#include "codec/format/sound_halves.h"
#include "codec/gpu/chunk_checksums.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_kernels.h"
#include "store/rows/row_format.h"

namespace tierkv::store {

inline constexpr int32_t kLinkThreads = 128;

// A layer's raw rows, and ranges of its pages.
struct LinkLayer {
  RawLayout raw;
  TokenLaws laws;
  LayerTokens at;
  uint8_t* rows = nullptr;               // the raw rows of the layer
  uint8_t* bytes = nullptr;              // the layer's parts
  const ChecksumChunk* parts = nullptr;  // [2 * num_kv_heads], mapped host memory
  int32_t layer = 0, num_kv_heads = 0;
  bool comes = false;  // parts to rows
  bool can_prune = false;
  int32_t raw_ctas = 0;               // of a kv_head
  int64_t num_ranges = 0;             // a CTA each
  const PageRange* ranges = nullptr;  // mapped host memory; addresses of the device
  int32_t* fault = nullptr;           // the least import_fault()
};

// Bit 15 of each half is set unless it is as `check` wants it.
__device__ __forceinline__ uint32_t unsound_halves(uint32_t x, RangeCheck check) {
  if (check == RangeCheck::kNone) return 0;
  const uint32_t not_finite = (x & 0x7c007c00u) + 0x04000400u;
  return not_finite | (check == RangeCheck::kParams ? x & 0x8000u : 0);
}

__device__ __forceinline__ void move_range(const LinkLayer& c, PageRange range) {
  constexpr int32_t kLoads = 4;
  const auto* from = reinterpret_cast<const uint4*>(range.from);
  auto* to = reinterpret_cast<uint4*>(range.to);
  const auto words = static_cast<int32_t>(range.bytes / 16);
  uint32_t wrong = 0;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < words; i += kLoads * kLinkThreads) {
    uint4 x[kLoads];
    for (int32_t j = 0; j < kLoads; ++j) {
      const int32_t word = i + j * kLinkThreads;
      x[j] = from != nullptr && word < words ? from[word] : uint4{0, 0, 0, 0};
    }
    for (int32_t j = 0; j < kLoads; ++j) {
      const int32_t word = i + j * kLinkThreads;
      if (word < words) to[word] = x[j];
      for (const CheckedBytes& checked : {range.keys, range.values}) {
        if (16 * word < checked.first || 16 * word >= checked.end) continue;
        for (const uint32_t y : {x[j].x, x[j].y, x[j].z, x[j].w}) {
          wrong |= unsound_halves(y, checked.check);
        }
      }
    }
  }
  if ((wrong & 0x80008000u) != 0) atomicMin(c.fault, import_fault(c.layer, ImportFault::kBody));
}

// By the CTA `cta` of the kv_head.
__device__ __forceinline__ void move_raw(const LinkLayer& c, int32_t head, int32_t cta) {
  uint8_t* const row = c.rows + static_cast<int64_t>(head) * c.raw.row_bytes;
  uint8_t* const part = c.bytes + c.parts[2 * head].first;
  const int32_t sinks = sink_count(c.laws, c.at), ring = ring_count(c.laws, c.at);
  const int32_t first = ring_first(c.laws, c.at), dim = c.raw.head_dim;
  const int32_t thread = cta * kLinkThreads + static_cast<int32_t>(threadIdx.x);
  const int32_t step = c.raw_ctas * kLinkThreads;
  bool is_finite_all = true, is_possible_all = true;
  for (int32_t i = thread; i < (sinks + ring) * 2 * dim; i += step) {
    const int32_t token = i / (2 * dim), d = i % dim;
    const auto component = static_cast<Component>(i / dim % 2);
    const int32_t byte = token < sinks ? c.raw.sink_byte(component, token, d)
                                       : c.raw.ring_byte(component, first + token - sinks, d);
    auto* const held = reinterpret_cast<uint16_t*>(row + byte);
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
    is_possible_all &= is_possible(score, c.can_prune);
  }
  if (!c.comes) {
    // The part's end, up to a multiple of 16.
    if (thread == 0 && ring % 2 != 0) scores[ring] = {};
    return;
  }
  if (!is_finite_all) atomicMin(c.fault, import_fault(c.layer, ImportFault::kRawValue));
  if (!is_possible_all) atomicMin(c.fault, import_fault(c.layer, ImportFault::kRawScore));
}

// CTAs of raw rows, then of ranges.
inline __global__ void __launch_bounds__(kLinkThreads)
    link_layer_kernel(const __grid_constant__ LinkLayer c) {
  wait_for_previous_kernel();
  const auto cta = static_cast<int32_t>(blockIdx.x);
  const int32_t range = cta - c.raw_ctas * c.num_kv_heads;
  if (range < 0) {
    move_raw(c, cta % c.num_kv_heads, cta / c.num_kv_heads);
  } else {
    move_range(c, c.ranges[range]);
  }
}

}  // namespace tierkv::store
