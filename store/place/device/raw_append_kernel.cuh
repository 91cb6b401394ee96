// SPDX-License-Identifier: Apache-2.0
// A chunk's tokens that stay raw, into sinks and ring: as write_chunk() of store/place/raw_tokens.h
// puts them there, byte for byte. Values that fp16 does not hold are faults; they count as the
// nearest that it holds, NaN as 0.
//
// Bound: a launch for a step, memory for a chunk: each of its values is checked, also those of
// tokens that have left already, unless the format has checked them.
#pragma once

#include "codec/format/element.h"
#include "gpu/math.cuh"
#include "gpu/pdl.cuh"
#include "store/place/device/device_kernels.h"
#include "store/place/device/device_reports.cuh"
#include "store/rows/device_tokens.h"

namespace tierkv::store {

inline constexpr int32_t kAppendThreads = 128;
inline constexpr int32_t kAppendTokens = 16;  // of a CTA

// The fp16 of a value; *code is kNonFinite or kOutOfRange where it has none.
__device__ __forceinline__ uint16_t checked_half(DType dtype, uint32_t bits, StatusCode* code) {
  const auto raw = static_cast<uint16_t>(bits);
  const float x = raw_to_float(dtype, raw);
  if (!is_finite(x)) {
    *code = StatusCode::kNonFinite;
    return 0;
  }
  const uint16_t half = dtype == DType::kFloat16 ? raw : float_to_half(x);
  if ((half & 0x7fffu) < 0x7c00u) return half;
  *code = worse_of(*code, StatusCode::kOutOfRange);
  return static_cast<uint16_t>((half & 0x8000u) | 0x7bffu);
}

__device__ __forceinline__ uint32_t checked_pair(DType dtype, uint32_t bits, StatusCode* code) {
  const uint32_t low = checked_half(dtype, bits & 0xffffu, code);
  return low | static_cast<uint32_t>(checked_half(dtype, bits >> 16, code)) << 16;
}

// The chunk's element 0 of a token of a row.
__device__ __forceinline__ int64_t chunk_element(const RawAppendCall& c, int32_t row,
                                                 int32_t token) {
  const int32_t sequence = row / c.num_kv_heads, kv_head = row - sequence * c.num_kv_heads;
  const int64_t line = int64_t{sequence} * c.chunk.tokens + token;
  return (line * c.num_kv_heads + kv_head) * c.raw.head_dim;
}

// What checked_half() finds among tokens, eight values at a time: it shows in the largest
// magnitude.
__device__ __forceinline__ StatusCode check_tokens(const RawAppendCall& c, int32_t row,
                                                   int32_t first, int32_t count) {
  const int32_t octets = c.raw.head_dim / 8, octet = static_cast<int32_t>(threadIdx.x) / 2;
  const int32_t tokens_on = kAppendThreads / 2 / octets, octets_on = kAppendThreads / 2 % octets;
  const int64_t line = int64_t{c.num_kv_heads} * c.raw.head_dim;
  const uint16_t* values =
      (threadIdx.x % 2 == 0 ? c.chunk.k : c.chunk.v) + chunk_element(c, row, first);
  int32_t bits = 0, token = octet / octets, piece = octet % octets;
#pragma unroll 4
  for (; token < count; token += tokens_on) {
    const uint4 x = *reinterpret_cast<const uint4*>(values + token * line + piece * 8);
    piece += octets_on;
    if (piece >= octets) piece -= octets, ++token;
    bits = most(bits, largest_magnitude(x));
  }
  return code_of_magnitude(c.chunk.dtype, bits);
}

// What the chunk says of a token's importance to queries behind it.
__device__ __forceinline__ RawScore score_of(const RawAppendCall& c, int32_t row, int32_t token,
                                             StatusCode* code) {
  if (c.chunk.significance == nullptr) return {};
  const float x = c.chunk.significance[row * c.chunk.stride + token];
  if (!is_finite(x) || x < 0) {
    *code = worse_of(*code, is_finite(x) ? StatusCode::kInvalidArgument : StatusCode::kNonFinite);
    return {};
  }
  return chunk_score(x, c.chunk.tokens - 1 - token);
}

// What score_of() finds in the row's whole chunk, by all CTAs of the row.
__device__ __forceinline__ StatusCode check_scores(const RawAppendCall& c, int32_t row) {
  auto code = StatusCode::kOk;
  const auto step = static_cast<int32_t>(gridDim.y) * kAppendThreads;
#pragma unroll 4
  for (int32_t token = static_cast<int32_t>(blockIdx.y * kAppendThreads + threadIdx.x);
       token < c.chunk.tokens; token += step) {
    score_of(c, row, token, &code);
  }
  return code;
}

// The worst fault that any thread of the CTA has found. A fault of a value hides one of a score.
__device__ __forceinline__ StatusCode worst_of_cta(StatusCode of_values, StatusCode of_scores) {
  const auto all = [](bool x) { return __syncthreads_and(x) != 0; };
  if (all(of_values == StatusCode::kOk && of_scores == StatusCode::kOk)) return StatusCode::kOk;
  if (!all(of_values != StatusCode::kNonFinite)) return StatusCode::kNonFinite;
  if (!all(of_values == StatusCode::kOk)) return StatusCode::kOutOfRange;
  return all(of_scores != StatusCode::kNonFinite) ? StatusCode::kInvalidArgument
                                                  : StatusCode::kNonFinite;
}

// A CTA for every gridDim.y-th kAppendTokens tokens of a row: x is the row, y the tokens.
inline __global__ void __launch_bounds__(kAppendThreads)
    raw_append_kernel(const __grid_constant__ RawAppendCall c) {
  wait_for_previous_kernel();
  let_next_kernel_start();  // attention, which waits for this one
  const auto thread = static_cast<int32_t>(threadIdx.x), row = static_cast<int32_t>(blockIdx.x);
  const int32_t sequence = row / c.num_kv_heads, kv_head = row - sequence * c.num_kv_heads;
  const int32_t slot = c.slots[sequence], n = c.chunk.tokens;
  LayerTokens to = c.to[static_cast<int64_t>(sequence) * c.stride];
  to.tokens += c.added;
  const int32_t first_in_ring = ring_first(c.laws, to), first = to.tokens - n;
  constexpr int32_t kLoads = 4;  // of a thread, in flight
  const int32_t pairs = c.raw.head_dim / 2;
  uint8_t* raw = c.memory.raw(slot, c.layer) + static_cast<int64_t>(kv_head) * c.raw.row_bytes;
  auto of_values = StatusCode::kOk;
  auto of_scores =
      c.is_checked && c.chunk.significance != nullptr ? check_scores(c, row) : StatusCode::kOk;
  const auto is_kept = [&](int32_t position) {
    return position < c.laws.sink_tokens || position >= first_in_ring;
  };
  // Tiles between those of the sinks and of the ring are passed over where nothing is to be
  // checked.
  const int32_t sink_tiles =
      most(0, c.laws.sink_tokens - first + kAppendTokens - 1) / kAppendTokens;
  const int32_t ring_tile = most(sink_tiles, (first_in_ring - first) / kAppendTokens);
  for (auto tile = static_cast<int32_t>(blockIdx.y);; tile += static_cast<int32_t>(gridDim.y)) {
    const bool is_behind = c.is_checked && tile >= sink_tiles;
    const int32_t begin = (is_behind ? tile - sink_tiles + ring_tile : tile) * kAppendTokens;
    if (begin >= n) break;
    const int32_t count = least(kAppendTokens, n - begin);
    if (first + begin < first_in_ring && !c.is_checked) {
      of_values = worse_of(of_values, check_tokens(c, row, begin, count));
    }
    const bool any_kept =
        first + begin < c.laws.sink_tokens || first + begin + count > first_in_ring;
    for (int32_t j = thread; any_kept && j < count * pairs; j += kLoads * kAppendThreads) {
      uint32_t k[kLoads], v[kLoads];
#pragma unroll
      for (int32_t i = 0; i < kLoads; ++i) {
        const int32_t at = j + i * kAppendThreads;
        if (at >= count * pairs) break;
        const int64_t from = chunk_element(c, row, begin + at / pairs) + at % pairs * 2;
        k[i] = *reinterpret_cast<const uint32_t*>(c.chunk.k + from);
        v[i] = *reinterpret_cast<const uint32_t*>(c.chunk.v + from);
      }
#pragma unroll
      for (int32_t i = 0; i < kLoads; ++i) {
        const int32_t at = j + i * kAppendThreads;
        if (at >= count * pairs) break;
        const int32_t position = first + begin + at / pairs;
        if (!is_kept(position)) continue;
        uint8_t* const to_key = raw + c.raw.token_byte(Component::kKey, position);
        uint8_t* const to_value = raw + c.raw.token_byte(Component::kValue, position);
        reinterpret_cast<uint32_t*>(to_key)[at % pairs] =
            checked_pair(c.chunk.dtype, k[i], &of_values);
        reinterpret_cast<uint32_t*>(to_value)[at % pairs] =
            checked_pair(c.chunk.dtype, v[i], &of_values);
      }
    }
    if (thread < count) {
      const int32_t token = begin + thread, position = first + token;
      const RawScore score = score_of(c, row, token, &of_scores);
      if (is_kept(position) && position >= c.laws.sink_tokens) {
        *reinterpret_cast<RawScore*>(raw + c.raw.score_byte(position)) = score;
      }
    }
  }
  const StatusCode code = worst_of_cta(of_values, of_scores);
  if (code != StatusCode::kOk && thread == 0) {
    report_fault(c.fault, {code, slot, c.layer, kv_head});
  }
  if (kv_head == 0 && blockIdx.y == 0 && thread == 0) {
    c.counts[static_cast<int64_t>(slot) * c.num_layers + c.layer] = to;
  }
}

// Raw positions of all kv_heads; a thread per pair of values.
inline __global__ void __launch_bounds__(kAppendThreads)
    raw_read_kernel(const __grid_constant__ RawReadCall c) {
  wait_for_previous_kernel();
  const int32_t pairs = c.raw.head_dim / 2;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kAppendThreads + threadIdx.x;
  if (i >= static_cast<int64_t>(c.end - c.first) * c.num_kv_heads * pairs) return;
  const auto dim = static_cast<int32_t>(i % pairs) * 2;
  const int64_t line = i / pairs;
  const auto kv_head = static_cast<int32_t>(line % c.num_kv_heads);
  const int32_t position = c.first + static_cast<int32_t>(line / c.num_kv_heads);
  const uint8_t* raw =
      c.memory.raw(c.slot, c.layer) + static_cast<int64_t>(kv_head) * c.raw.row_bytes;
  const int64_t to =
      (static_cast<int64_t>(position - c.origin) * c.num_kv_heads + kv_head) * c.raw.head_dim + dim;
  for (const Component comp : {Component::kKey, Component::kValue}) {
    uint16_t* x = comp == Component::kKey ? c.k : c.v;
    const auto* const token =
        reinterpret_cast<const uint16_t*>(raw + c.raw.token_byte(comp, position)) + dim;
    for (int32_t d = 0; d < 2; ++d) {
      const uint16_t half = token[d];
      x[to + d] = c.dtype == DType::kFloat16 ? half : float_to_bfloat16(half_to_float(half));
    }
  }
}

}  // namespace tierkv::store
